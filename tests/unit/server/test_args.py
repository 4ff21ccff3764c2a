"""Flags are fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.config import option_fields
from minisgl.server.args import ServerArgs, is_loopback, parse_args
from minisgl.utils.errors import ConfigError


def test_defaults() -> None:
    assert parse_args([]) == ServerArgs()


def test_flags_and_aliases(tmp_path: Path) -> None:
    args = parse_args(
        f"--model-path {tmp_path} --dtype float32 --max-seq-len-override 77 --attn a,b --cache naive --no-overlap "
        "--max-extend-length 64 --port 0 --num-tokenizer 3 --dummy-weight --memory-ratio 0.5 --threads 2".split()
    )
    engine = args.scheduler.engine
    assert engine.model == str(tmp_path)
    assert (engine.max_seq_len, engine.attention_backend, engine.dtype) == (77, "a,b", "float32")
    assert (engine.dummy_weight, engine.memory_ratio, engine.threads) == (True, 0.5, 2)
    assert (args.scheduler.cache_type, args.scheduler.overlap, args.scheduler.max_prefill_length) == (
        "naive",
        False,
        64,
    )
    assert (args.port, args.num_tokenizer) == (0, 3)


def test_positional_model() -> None:
    assert parse_args(["owner/name"]).scheduler.engine.model == "owner/name"
    with pytest.raises(ConfigError, match="once"):
        parse_args(["a/b", "--model", "c/d"])


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_PORT", "8123")
    monkeypatch.setenv("MINISGL_OVERLAP", "off")
    monkeypatch.setenv("MINISGL_RUN_DIR", "/x")
    args = parse_args([])
    assert (args.port, args.scheduler.overlap, args.run_dir) == (8123, False, "")
    assert parse_args(["--port", "9"]).port == 9
    for name, value in [("PORT", "many"), ("OVERLAP", "perhaps"), ("CACHE_TYPE", "none")]:
        monkeypatch.setenv(f"MINISGL_{name}", value)
        with pytest.raises(ConfigError, match=name):
            parse_args([])
        monkeypatch.delenv(f"MINISGL_{name}")


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        parse_args(["--help"])
    assert e.value.code == 0
    text = capsys.readouterr().out
    for name in option_fields(ServerArgs).keys() - {"run_dir"}:
        assert "--" + name.replace("_", "-") in text
    assert "default: 1919" in text


@pytest.mark.parametrize("flags", ["--port x", "--unknown", "--dtype int4", "--por 3"])
def test_unparsable(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        parse_args(flags.split())
    assert e.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "flags",
    ["--port -1", "--num-tokenizer 999", "--drain-timeout 0", "--ready-timeout nan", "--max-body 1", "--host ::"],
)
def test_values_that_cannot_work(flags: str) -> None:
    with pytest.raises(ConfigError, match=flags.split()[0]):
        parse_args(flags.split())


def test_reachable_host_needs_a_key() -> None:
    assert parse_args(["--host", "0.0.0.0", "--api-key", "k"]).api_key == "k"
    assert not parse_args(["--host", "0.0.0.0", "--no-auth"]).auth
    assert [is_loopback(h) for h in ("127.0.0.1", "127.9.9.9", "::1", "localhost", "0.0.0.0", "example.org")] == [
        *([True] * 4),
        *([False] * 2),
    ]


def test_addresses_are_distinct() -> None:
    args = ServerArgs(run_dir="/r", num_tokenizer=2)
    addrs = [args.zmq_backend_addr, args.zmq_frontend_addr, args.zmq_detokenizer_addr, *args.zmq_tokenizer_addrs]
    assert len(set(addrs)) == 5
    assert ServerArgs(run_dir="/r").zmq_tokenizer_addrs == ["ipc:///r/detokenizer"]
