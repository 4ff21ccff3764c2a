"""The declared options: their ranges, and what depends on more than one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minisgl.errors import ConfigError
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
    with pytest.raises(ConfigError, match="--page-size"):
        build_config(SchedulerConfig, {"page_size": page_size})


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"there is no option 'run_dir'; `minisgl serve --help` lists them"):
        build_config(ServerArgs, {"run_dir": "/x"})


@pytest.mark.parametrize("wrong", ["prot", "max-sequence-len", "attention_backnd", "num-tokeniser"])
def test_misspelt_option_is_recognised(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no option '{wrong}'; did you mean [a-z_]+\\?"):
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
    given = {} if option.name == "auth" else {"auth": False}
    for flag in option.flags:
        spellings = {flag[2:]: value, flag[2:].replace("-", "_"): value}
        if option.kind is bool:
            spellings["no-" + flag[2:]] = not value
        for spelling, written in spellings.items():
            config = build_config(ServerArgs, given | {spelling: written})
            owner = next(c for c in (config, config.scheduler, config.scheduler.engine) if type(c) is option.owner)
            assert getattr(owner, option.name) == value


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
