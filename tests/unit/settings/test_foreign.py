"""Every flag of vLLM's, SGLang's and mini-sglang's help on our command line."""

from __future__ import annotations

import pytest

from minisgl.__main__ import main
from minisgl.errors import ConfigError
from minisgl.settings.foreign import foreign, sentence_for
from minisgl.settings.options import ServerArgs, options_of, spellings_of
from minisgl.settings.sources import Parser, add_options, parse_args
from tools.flag_table import ANYWAY, NAMED, UNKNOWN, WORKS, flags, outcome

FLAGS = list(dict.fromkeys(flag for names in flags().values() for flag in names))


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if outcome(flag) in (NAMED, UNKNOWN)])
def test_a_flag_without_an_equal_ends_the_start_with_its_sentence(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as e:
        main(["serve", flag, "1"])
    assert e.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    sentence = sentence_for(flag.lstrip("-").replace("-", "_"))
    assert (f"{flag}: {sentence}" if sentence else f"unrecognized arguments: {flag}") in line


def test_the_other_flags_are_taken() -> None:
    parser = Parser()
    add_options(parser)
    taken = {flag for flag in FLAGS if outcome(flag) in (WORKS, ANYWAY)} - {"--config", "--shell-mode"}
    assert taken <= {*parser._option_string_actions}
    assert len(taken) > 80


@pytest.mark.parametrize("name", foreign().redundant)
def test_what_happens_anyway_is_taken_and_nothing_else(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    for value in foreign().redundant[name]:
        assert parse_args([flag] if value == "true" else [flag, value]) == ServerArgs()
    if foreign().redundant[name] != ["true"]:
        with pytest.raises(ConfigError, match=f"^{flag}: "):
            parse_args([flag, "nonsense"])
    assert sentence_for(name), "other values need a sentence"


def test_no_sentence_hides_an_option() -> None:
    assert not {*foreign().redundant} & {*spellings_of(ServerArgs)}
    assert all(". " not in sentence and sentence[-1] != "." for sentence in foreign().sentences.values())
    named = {
        word
        for text in foreign().sentences.values()
        for word in text.replace(",", " ").split()
        if word.startswith("--")
    }
    ours = {flag for option in options_of(ServerArgs).values() for flag in (*option.flags, "--help")}
    assert {word.strip(";`").partition("=")[0] for word in named} <= ours
