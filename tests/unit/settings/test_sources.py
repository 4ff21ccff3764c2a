"""Options from flags, the environment and a YAML file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minisgl import __main__ as cli
from minisgl.__main__ import COMMANDS, main
from minisgl.core.errors import ConfigError
from minisgl.settings.options import COMMON, ServerArgs, options_of
from minisgl.settings.sources import engine_options, parse_args


def test_no_flags_give_the_defaults() -> None:
    assert parse_args([]) == ServerArgs()


def test_flags_and_their_aliases_set_options(tmp_path: Path) -> None:
    args = parse_args(
        f"--model-path {tmp_path} --dtype float32 --max-seq-len-override 77 --attn a,b --cache naive --no-overlap "
        "--quantization int8 --max-extend-length 64 --port 0 --num-tokenizer 3 --dummy-weight --memory-ratio 0.5 "
        "--threads 2".split()
    )
    engine = args.scheduler.engine
    assert engine.model == str(tmp_path)
    assert (engine.max_seq_len, engine.attention_backend, engine.dtype) == (77, "a,b", "float32")
    assert (engine.dummy_weight, engine.memory_ratio, engine.threads) == (True, 0.5, 2)
    assert engine.quantization == "int8"
    assert (args.scheduler.cache_type, args.scheduler.overlap, args.scheduler.max_prefill_length) == (
        "naive",
        False,
        64,
    )
    assert (args.port, args.num_tokenizer) == (0, 3)


def test_model_may_be_positional_but_not_given_twice() -> None:
    assert parse_args(["owner/name"]).scheduler.engine.model == "owner/name"
    with pytest.raises(ConfigError, match="once"):
        parse_args(["a/b", "--model", "c/d"])


def test_flags_of_other_engines_set_our_options() -> None:
    flags = (
        "m --max-model-len 32k --max-num-seqs 8 --enforce-eager --no-enable-prefix-caching --seed 3 -tp 2 --attn fa "
        "--served-model-name a b --api-key k1,k2 --api-key k3 --no-enable-lora --disable-overlap-schedule "
        "--enable-lora --max-loras-per-batch 4 --lora-dtype auto --lora-modules a=/x b=/y --lora c=z"
    )
    args = parse_args(flags.split())
    engine = args.scheduler.engine
    assert (engine.model, engine.max_seq_len, engine.max_running_requests) == ("m", 32_000, 8)
    assert (engine.cuda_graph_max_bs, engine.tp, engine.attention_backend) == (0, 2, "fa3")
    assert (args.scheduler.cache_type, args.scheduler.sampling_seed, args.scheduler.overlap) == ("naive", 3, False)
    assert (args.served_model_name, args.load_keys()) == ("a,b", {"k1": 0, "k2": 0, "k3": 0})
    assert (engine.lora, engine.max_loras) == ("a=/x,b=/y,c=z", 4)


def test_the_last_of_two_flags_counts() -> None:
    assert parse_args(["--port", "1", "--port", "2", "--enforce-eager", "--graph", "4"]).port == 2
    assert parse_args(["--enforce-eager", "--graph", "4"]).scheduler.engine.cuda_graph_max_bs == 4


def test_a_model_behind_several_names_is_recognised() -> None:
    with pytest.raises(ConfigError, match="--served-model-name takes all words after it: put MODEL Qwen/x first"):
        parse_args(["--served-model-name", "a", "Qwen/x"])


def test_other_sources_take_the_words_of_other_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("enforce-eager: true\nserved-model-name: [a, b]\nenable_lora: false\nmax-model-len: 512\n")
    monkeypatch.setenv("MINISGL_ENABLE_PREFIX_CACHING", "0")
    args = parse_args(["--config", str(path)])
    assert (args.scheduler.engine.cuda_graph_max_bs, args.served_model_name) == (0, "a,b")
    assert (args.scheduler.engine.max_seq_len, args.scheduler.cache_type) == (512, "naive")
    path.write_text("\ngpu-memory-utilization: 0.9\n")
    with pytest.raises(ConfigError, match="line 2: gpu-memory-utilization: use --memory-ratio"):
        parse_args(["--config", str(path)])
    monkeypatch.setenv("MINISGL_TRUST_REMOTE_CODE", "1")
    with pytest.raises(ConfigError, match="MINISGL_TRUST_REMOTE_CODE: code from a checkpoint"):
        parse_args([])


def test_flags_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_PORT", "8123")
    monkeypatch.setenv("MINISGL_OVERLAP", "off")
    monkeypatch.setenv("MINISGL_RUN_DIR", "/x")
    args = parse_args([])
    assert (args.port, args.scheduler.overlap, args.run_dir) == (8123, False, "")
    assert parse_args(["--port", "9"]).port == 9
    for name, value in [("PORT", "many"), ("PORT", "-1"), ("OVERLAP", "perhaps"), ("CACHE_TYPE", "none")]:
        monkeypatch.setenv(f"MINISGL_{name}", value)
        with pytest.raises(ConfigError, match=name):
            parse_args([])
        monkeypatch.delenv(f"MINISGL_{name}")


def test_environment_takes_every_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_TP_SIZE", "2")
    monkeypatch.setenv("MINISGL_NO_UI", "1")
    args = parse_args([])
    assert (args.scheduler.engine.tp, args.ui) == (2, False)
    monkeypatch.setenv("MINISGL_TP", "4")
    with pytest.raises(ConfigError, match="MINISGL_TP_SIZE is set twice"):
        parse_args([])


def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "CONFIG", "MODEL", "API_KEY", "OVERLAP", "TP_SIZE", "CHAT_TEMPLATE", "NO_UI", "PROT", "CHECK"):
        monkeypatch.setenv(f"MINISGL_{name}", " " * len(name[4:]))
    assert parse_args([]) == ServerArgs()


@pytest.mark.parametrize("flag", ["--served-model-name", "--model", "--host", "--uds", "--chat-template", "--api-key"])
def test_bytes_that_are_not_utf_8_are_refused(flag: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = [flag, "gr\udcfcn"]
    with pytest.raises(ConfigError, match=rf"{flag} 'gr\\udcfcn' is not text in UTF-8"):
        parse_args(words)
    (tmp_path / "x.yaml").write_text(f'{flag[2:]}: "\\udcfc"')
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        parse_args(["--config", str(tmp_path / "x.yaml")])
    monkeypatch.setenv("MINISGL_" + flag[2:].replace("-", "_").upper(), words[1])
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        parse_args([])


def test_misspelt_variable_is_an_error_and_a_strange_one_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINISGL_FAVOURITE_COLOUR", "blue")
    monkeypatch.setenv("MINISGL_CPU_ISA", "none")
    assert parse_args([]) == ServerArgs()
    warning = "minisgl: the environment variable MINISGL_FAVOURITE_COLOUR is not an option and is ignored\n"
    assert capsys.readouterr().err == warning
    monkeypatch.setenv("MINISGL_PROT", "9")
    with pytest.raises(ConfigError, match=r"MINISGL_PROT is not an option; did you mean MINISGL_PORT\?"):
        parse_args([])


def test_environment_and_flags_override_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(
        "port: 1\nmax-seq-len: 99  # a comment\nmemory_ratio: 1\noverlap: off\napi-key: null\ncache-type: naive\n"
    )
    flags = ["--config", str(path)]
    args = parse_args(flags)
    assert (args.port, args.api_key, args.scheduler.overlap, args.scheduler.cache_type) == (1, None, False, "naive")
    assert (args.scheduler.engine.max_seq_len, args.scheduler.engine.memory_ratio) == (99, 1.0)
    monkeypatch.setenv("MINISGL_PORT", "2")
    assert parse_args(flags).port == 2
    assert parse_args([*flags, "--port", "3"]).port == 3
    monkeypatch.setenv("MINISGL_CONFIG", str(path))
    assert parse_args([]).scheduler.engine.max_seq_len == 99
    # Commands without a server read their options from the same file.
    options = engine_options({"dtype": "float32"})
    assert (options["max_seq_len"], options["dtype"], "port" in options) == (99, "float32", False)
    path.write_text("# nothing\n")
    assert parse_args(flags).scheduler.engine.max_seq_len is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: many", r"line 1: port='many' is not of type int"),
        ("\nport: true", r"line 2: port=True is not of type int"),
        ("port: 1.5", r"port=1.5 is not of type int"),
        ("overlap: 1", r"overlap=1 is not of type bool"),
        ("model: [a]", r"model=\['a'\] is not of type str"),
        ("dtype: int4", r"dtype='int4' is not one of auto, "),
        ("prot: 1", r"line 1: prot is not an option; did you mean port\?"),
        ("port: 1\ntp-sise: 2", r"line 2: tp-sise is not an option; did you mean tp_size\?"),
        ("tp: 1\ntp-size: 2", r"line 2: tp-size is set twice"),
        ("tp-size: two", r"tp-size='two' is not of type int"),
        ("run-dir: /x", r"run-dir is not an option"),
        ("config: x", r"config is not an option"),
        ("1: 1", r"1: 1 is not an option"),
        ("max-seq-len: 7\nmax_seq_len: 8", r"line 2: max_seq_len is set twice"),
        ("- port", r"must hold lines like"),
        ("a: [", r"not valid YAML"),
        ("a: 2026-13-40", r"not valid YAML"),
        ("a: !!python/object:os.system x", r"not valid YAML"),
        ("port: 99999", r"line 1: port=99999 must be at most 65535"),
    ],
)
def test_errors_name_the_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as e:
        parse_args(["--config", str(path)])
    assert "\n" not in str(e.value)
    assert "bad.yaml" in str(e.value)


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read --config .*No such file"):
        parse_args(["--config", str(tmp_path / "none.yaml")])


def test_help_begins_with_the_common_options_and_help_all_has_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    def help_of(*words: str) -> str:
        with pytest.raises(SystemExit) as e:
            main([*words])
        assert e.value.code == 0
        return capsys.readouterr().out

    flags = re.findall(r"^  (--[\w-]+)", help_of("serve", "--help"), re.MULTILINE)
    assert {*flags} == {"--shell", "--help-all", "--config", *("--" + name.replace("_", "-") for name in COMMON)}
    assert "--num-prompts" in (bench := help_of("bench", "offline", "--help")) and "--page-size" not in bench
    text = help_of("serve", "--help-all")
    for name in options_of(ServerArgs):
        assert "--" + name.replace("_", "-") in text
    assert "default: 1919" in text
    assert text.startswith("usage: minisgl serve [MODEL] [OPTIONS]\n")
    assert "--page-size, --block-size {1,2,4,8,16,32,64,128}\n" in text  # once for all of its flags


def test_flags_of_other_engines_set_the_drafter() -> None:
    for flags in (
        ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "3"],
        ["--spec-method", "ngram", "--spec-tokens", "3"],
    ):
        engine = parse_args(flags).scheduler.engine
        assert (engine.speculate, engine.num_draft_tokens) == ("ngram", 3)
    with pytest.raises(
        ConfigError, match="'EAGLE3' is not one of off, auto, ngram, tree, mtp, draft:PATH, eagle3:PATH"
    ):
        parse_args(["--speculative-algorithm", "EAGLE3"])


def test_file_takes_every_spelling(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("tensor-parallel-size: 2\nmodel_path: x\nno-overlap: true\ncache: naive\n")
    scheduler = parse_args(["--config", str(path)]).scheduler
    assert (scheduler.engine.tp, scheduler.engine.model) == (2, "x")
    assert (scheduler.overlap, scheduler.cache_type) == (False, "naive")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("doctro", "there is no command 'doctro'; did you mean doctor?"),
        ("serv", "did you mean serve?"),
        ("qwertz", "there is no command 'qwertz' (see minisgl --help)"),
        ("serve --prot 9", "unrecognized arguments: --prot; did you mean --port?"),
        ("bench onlin", "there is no command 'onlin'; did you mean online?"),
        ("verify --lenght=3", "did you mean --length?"),
    ],
)
def test_misspelt_commands_and_flags_are_recognised(words: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(words.split())
    assert e.value.code == 2
    assert hint in capsys.readouterr().err


def test_without_a_command_the_short_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert not err and out == cli.__doc__
    assert all(command in out for command in COMMANDS if command != "env")


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max-model-len", "100000", "SET is more than the model's context of 4096 tokens; give less"),
        ("context-length", "99999", "SET is more than the model's context"),
        ("max-seq-len", "99999", "SET is more than the model's context"),
        ("tensor-parallel-size", "512", "SET is too much for a machine of "),
        ("data-parallel-size", "64", "SET --tp 1 is too much for a machine of "),
        ("q", "fp8", "SET is not for cpu, where it can be int8 or int4"),
        ("max-cudagraph-capture-size", "4", "NAME needs an NVIDIA GPU"),
        ("num-gpu-blocks-override", "100000000", "SET "),
        ("api-key", "é", "NAME or the file of --api-key-file must be printable"),
        ("max-num-seqs", "0", "SET must be at least 1"),
    ],
)
def test_a_setting_is_named_as_it_was_written(
    source: str,
    name: str,
    value: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, variable = tmp_path / "s.yaml", f"MINISGL_{name.replace('-', '_').upper()}"
    path.write_text(f"device: cpu\n{name}: {value}\n", encoding="utf-8")
    if source == "environment":
        monkeypatch.setenv(variable, value)
    flags = {"flag": [f"--{name}", value], "environment": [], "file": ["--config", str(path)]}[source]
    assert main(["serve", "--device", "cpu", *flags]) == 2
    shown, set_to = {
        "flag": (f"--{name}", f"--{name} {value}"),
        "environment": (variable, f"{variable}={value}"),
        "file": (name, f"{path}, line 2: {name}={value}"),
    }[source]
    assert message.replace("SET", set_to).replace("NAME", shown) in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("words", ["./nowhere", "owner/name", "--port 3"])
def test_model_or_flag_without_a_command_is_served(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[object] = []
    monkeypatch.setitem(COMMANDS, "serve", lambda options: served.append(options) or 0)
    assert (main(words.split()), len(served)) == (0, 1)


@pytest.mark.parametrize("flags", ["--port x", "--unknown", "--dtype int4", "--por 3"])
def test_unparsable_flags_end_the_process_with_one_line(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["serve", *flags.split()])
    except SystemExit as e:
        code = e.code
    assert code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
