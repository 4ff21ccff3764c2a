"""Every flag of vLLM's, SGLang's and mini-sglang's help on our command line."""

from __future__ import annotations

import pytest

from minisgl.__main__ import main
from minisgl.core.errors import ConfigError
from minisgl.settings.foreign import foreign, sentence_for
from minisgl.settings.options import ServerArgs, spellings_of
from minisgl.settings.sources import Parser, add_options, parse_args
from tools.flag_table import ANYWAY, NAMED, UNKNOWN, WORKS, flags, outcome

FLAGS = list(dict.fromkeys(flag for names in flags().values() for flag in names))


@pytest.fixture(scope="module")
def parser() -> Parser:
    made = Parser(prog="minisgl serve")
    add_options(made)
    return made


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if outcome(flag) in (NAMED, UNKNOWN)])
def test_a_flag_without_an_equal_ends_the_start_with_its_sentence(
    flag: str, parser: Parser, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as e:
        parser.parse_args([flag, "1"])
    assert e.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    sentence = sentence_for(flag.lstrip("-").replace("-", "_"))
    assert (f"{flag}: {sentence}" if sentence else f"unrecognized arguments: {flag}") in line


def test_the_other_flags_are_taken(parser: Parser) -> None:
    taken = {flag for flag in FLAGS if outcome(flag) in (WORKS, ANYWAY)} - {"--config", "--shell-mode"}
    assert taken <= {*parser._option_string_actions}
    assert len(taken) > 80


@pytest.mark.parametrize("name", foreign().redundant)
def test_what_happens_anyway_is_taken_and_nothing_else(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    for value in foreign().redundant[name]:
        assert parse_args([flag] if value in ("true", "false") else [flag, value]) == ServerArgs()
    if "true" not in foreign().redundant[name]:
        with pytest.raises(ConfigError, match=f"^{flag}: "):
            parse_args([flag, "nonsense"])
    assert sentence_for(name), "other values need a sentence"


@pytest.mark.parametrize("command", foreign().commands)
def test_a_command_of_another_program_is_answered_with_ours(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main([*command.split(), "llama3"])
    assert e.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"there is no command {command.split()[-1]!r}: {foreign().commands[command]}" in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("-m x.gguf", "-m: give the model's folder or Hugging Face id"),
        ("-hf org/name-GGUF:Q4_K_M", "-hf: give the model's folder or Hugging Face id"),
        ("serve -ngl 99", "-ngl: a model runs wholly on the GPU"),
        ("serve --n-gpu-layers=99", "--n-gpu-layers: a model runs wholly on the GPU"),
        ("chat -c 4096", "-c: use --max-seq-len"),
        ("serve -t 8", "-t: use --threads"),  # and not the beginning of -tp
        ("serve -d", "-d: a server runs in the foreground"),
        ("serve -np 4", "-np: requests always run together"),
        ("generate -n 128 x", "-n: a request's max_tokens"),
        ("serve -z", "unrecognized arguments: -z"),
        ("x.gguf", "x.gguf does not exist"),
        ("llama3:8b", "llama3:8b is a name for Ollama"),
        ("serve hf.co/org/name:Q4", "is an address; give the id org/name"),
        ("bench", "`minisgl bench offline` measures the engine, `minisgl bench online` a server"),
        ("-tp=2 --tp 512", "--tp 512"),
    ],
)
def test_users_of_other_programs_get_one_sentence(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(words.split())
    except SystemExit as e:
        code = e.code
    assert code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_no_sentence_hides_an_option() -> None:
    assert not {*foreign().redundant} & {*spellings_of(ServerArgs)}
    texts = [*foreign().sentences.values(), *foreign().commands.values()]
    assert all(". " not in text and text[-1] != "." for text in texts)
    named = {word for text in texts for word in text.replace(",", " ").split() if word.startswith("--")}
    ours = {"--help", "--version", "--scheme", "--workload", "--url"}
    ours |= {"--" + name.replace("_", "-") for name in spellings_of(ServerArgs)}
    assert {word.strip(";`").partition("=")[0] for word in named} <= ours
