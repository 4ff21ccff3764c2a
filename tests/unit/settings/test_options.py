"""The declared options: their ranges, and what depends on more than one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl.core.errors import ConfigError
from minisgl.settings.options import (
    EngineConfig,
    SchedulerConfig,
    ServerArgs,
    build_config,
    is_loopback,
    options_of,
)
from minisgl.settings.sources import parse_args


@pytest.mark.parametrize("option", options_of(ServerArgs).values(), ids=lambda option: option.name)
def test_every_default_is_in_range_and_just_outside_is_refused(option: Any) -> None:
    assert option.check(option.default, "") == option.default
    outside = [option.minimum is not None and option.minimum - 1, option.maximum is not None and option.maximum + 1]
    outside += [option.above is not None and option.above, option.choices and "nonsense", object(), float("nan")]
    for value in outside:
        if value is not False and value != ():
            with pytest.raises(ConfigError, match=r"^here "):
                option.check(value, "here ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--port -1", "--port -1 must be at least 0"),
        ("--num-tokenizer 999", "at most 64"),
        ("--drain-timeout 0", "--drain-timeout 0.0 must be above 0"),
        ("--ready-timeout nan", "above 0 and at most 1000000.0"),
        ("--max-body 1", "at least 1024"),
        ("--num-pages 0", "at least 1"),
        ("--memory-ratio 1.5", "at most 1"),
        ("--cuda-graph-max-bs -1", "at least 0"),
        ("--host ::", "--api-key"),
    ],
)
def test_flags_out_of_range_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as e:
        parse_args(flags.split())
    assert flags.split()[0] in str(e.value)


@pytest.mark.parametrize("page_size", [0, 3, 256, "16", True])
def test_page_size_is_a_power_of_two_up_to_128(page_size: Any) -> None:
    with pytest.raises(ConfigError, match="--page-size"):
        EngineConfig(page_size=page_size)
    with pytest.raises(ConfigError, match="page_size="):
        build_config(SchedulerConfig, {"page_size": page_size})


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run_dir is not an option; `minisgl serve --help-all` lists them"):
        build_config(ServerArgs, {"run_dir": "/x"})


@pytest.mark.parametrize("wrong", ["prot", "max-sequence-len", "attention_backnd", "num-tokeniser"])
def test_misspelt_option_is_recognised(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"^{wrong} is not an option; did you mean [a-z_]+\\?"):
        build_config(ServerArgs, {wrong: 1})


@pytest.mark.parametrize("option", options_of(ServerArgs).values(), ids=lambda option: option.name)
def test_every_spelling_of_the_help_is_understood(option: Any, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k")
    value: Any = (
        option.choices[-1]
        if option.choices
        else {str: str(tmp_path / "key"), bool: not option.default}.get(option.kind)
    )
    if value is None:
        value = option.kind(option.minimum or 1)
    if option.form is dict:
        value = '{"a": 1}'
    given = {} if option.name == "auth" else {"auth": False}
    given |= {"api_key": f"{value}=k"} if option.name == "classes" else {}
    for flag in option.flags:
        spellings = {flag[2:]: value, flag[2:].replace("-", "_"): value}
        if option.kind is bool:
            spellings["no-" + flag[2:]] = not value
        for spelling, written in spellings.items():
            config = build_config(ServerArgs, given | {spelling: written})
            owner = next(c for c in (config, config.scheduler, config.scheduler.engine) if type(c) is option.owner)
            assert getattr(owner, option.name) == value


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"max_model_len": "auto"}, "max_seq_len", None),
        ({"max_model_len": -1}, "max_seq_len", None),
        ({"enforce_eager": True}, "cuda_graph_max_bs", 0),
        ({"enforce_eager": False}, "cuda_graph_max_bs", None),
        ({"enable_prefix_caching": False}, "cache_type", "naive"),
        ({"no_enable_prefix_caching": True}, "cache_type", "naive"),
        ({"disable_radix_cache": False}, "cache_type", "radix"),
        ({"disable_overlap_schedule": True}, "overlap", False),
        ({"load_format": "dummy"}, "dummy_weight", True),
        ({"dtype": "half"}, "dtype", "float16"),
        ({"attn": "fa,flashinfer"}, "attention_backend", "fa3,fi"),
        ({"tool_call_parser": "qwen25"}, "tool_call_parser", "hermes"),
        ({"reasoning_parser": "deepseek-r1"}, "reasoning_parser", "deepseek_r1"),
        ({"tool_call_parser": "openai"}, "tool_call_parser", "harmony"),
        ({"served_model_name": ["a", "b"]}, "served_model_name", "a,b"),
        ({"lora": {"a": Path("/x"), "b": "y"}}, "lora", "a=/x,b=y"),
        ({"lora_modules": [{"name": "a", "path": "/x"}]}, "lora", '{"name": "a", "path": "/x"}'),
        ({"lora_paths": "a=/x,b=/y"}, "lora", "a=/x,b=/y"),
        ({"allowed_origins": '["https://a.example"]'}, "allowed_origins", "https://a.example"),
        ({"default_chat_template_kwargs": {"x": 1}}, "default_chat_template_kwargs", '{"x": 1}'),
    ],
)
def test_words_of_other_engines_mean_ours(given: dict[str, Any], name: str, value: Any) -> None:
    config = build_config(ServerArgs, given)
    owners = (config, config.scheduler, config.scheduler.engine)
    assert [getattr(o, name) for o in owners if hasattr(o, name)] == [value]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enforce_eager": 3}, "enforce_eager=3 is not of type bool"),
        ({"load_format": "pt"}, "load_format='pt' is not one of auto, safetensors, dummy"),
        ({"gpu_memory_utilization": 0.9}, "gpu_memory_utilization: use --memory-ratio, "),
        ({"trust_remote_code": True}, "trust_remote_code: code from a checkpoint is never run"),
        ({"quantization": "awq"}, "is recognised by its config.json"),
        ({"pipeline_parallel_size": 2}, "there is no pipeline parallelism"),
        ({"enable_chunked_prefill": False}, "prompts are always computed in chunks"),
        ({"default_chat_template_kwargs": "[1]"}, r"default-chat-template-kwargs \[1\] is not a JSON object"),
        ({"allowed_origins": '["a'}, "is not of type list"),
        ({"chat_template": "/no/file"}, "--chat-template /no/file cannot be read"),
    ],
)
def test_what_other_engines_have_is_refused_with_a_sentence(given: dict[str, Any], message: str) -> None:
    def read() -> tuple[Any, Any]:
        engine = build_config(ServerArgs, given).scheduler.engine
        return engine.template_kwargs, engine.load_chat_template()

    with pytest.raises(ConfigError, match=message):
        read()


def test_an_option_of_the_server_alone_is_told_to_the_engine() -> None:
    with pytest.raises(ConfigError, match="api_key is an option of `minisgl serve` only"):
        build_config(SchedulerConfig, {"api_key": "k"})


def test_what_asks_for_nothing_is_taken() -> None:
    given = {"trust_remote_code": False, "swap_space": None, "pipeline_parallel_size": 1, "enable_lora": False}
    assert build_config(ServerArgs, given) == ServerArgs()


def test_option_given_in_two_spellings_is_refused() -> None:
    with pytest.raises(ConfigError, match="tp_size is set twice"):
        build_config(SchedulerConfig, {"tp": 1, "tp_size": 2})


def test_reachable_host_needs_a_key() -> None:
    assert parse_args(["--host", "0.0.0.0", "--api-key", "k"]).api_key == "k"
    assert not parse_args(["--host", "0.0.0.0", "--no-auth"]).auth


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "example.org")),
    ],
)
def test_loopback_hosts(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_addresses_are_distinct() -> None:
    args = ServerArgs(run_dir="/r", num_tokenizer=2)
    addrs = [args.zmq_backend_addr, args.zmq_frontend_addr, args.zmq_detokenizer_addr, *args.zmq_tokenizer_addrs]
    assert len(set(addrs)) == 5
    assert ServerArgs(run_dir="/r", num_tokenizer=0).zmq_tokenizer_addrs == ["ipc:///r/detokenizer"]
    incarnations = [ServerArgs(run_dir="/r", dp=2, incarnation=incarnation) for incarnation in (0, 1, 2)]
    assert len({a.zmq_backend_addr for a in incarnations} | {a.zmq_scheduler_addr for a in incarnations}) == 4
