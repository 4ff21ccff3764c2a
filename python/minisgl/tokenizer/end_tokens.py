"""The tokens that end an answer, from every file of a model folder that knows one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minisgl.checkpoint import hf
from minisgl.tokenizer.folder import end_names, load_tokenizer, read_settings, special_names
from minisgl.tokenizer.template import ChatTemplate

NESTED: Final = ("text_config", "llm_config", "language_config")  # in config.json


@dataclass(frozen=True)
class EndTokens:
    """The ids of the tokens that end an answer, and sentences for the log about what is wrong with them."""

    ids: frozenset[int]
    problems: list[str]

    @classmethod
    def of_folder(cls, folder: Path, template: ChatTemplate) -> EndTokens:
        """Read the configurations and the tokenizer's files, and take what `template` writes after an answer.

        Configurations may keep ids of the model that they were copied from. So an id counts only if it is in the
        vocabulary, and, if the folder knows any special or added token as an end, only if it is such a token. Raises
        `ConfigError` for an unreadable file.
        """
        given = [*_given(folder)]
        vocab_size = hf.load_config(folder).get("vocab_size", 2**31)
        ids = {value for _, value in given if type(value) is int and 0 <= value < vocab_size}
        if (folder / "tokenizer.json").is_file():
            ids = {i for i in _markers(folder, template, ids) if i < vocab_size} or ids
        problems = [
            f"{file} has eos_token_id={value!r:.60}, which is not a token that ends an answer: ignored"
            for file, value in given
            if type(value) is not int or value not in ids
        ]
        if not ids:
            problems.append(f"no file of {folder} names a token that ends an answer: answers end at their limits")
        return cls(frozenset(ids), problems)


def _markers(folder: Path, template: ChatTemplate, ids: set[int]) -> set[int]:
    """Return the ends that the tokenizer's files name, and those special or added tokens that are in `ids` or that
    `template` writes first after an answer.
    """
    tokenizer, names = load_tokenizer(folder), end_names(folder)
    unknown = special_names(read_settings(folder)).get("unk_token")
    added = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.content != unknown}
    named = {token for text in names if (token := tokenizer.token_to_id(text)) is not None}
    written = (tokenizer.encode(text.lstrip(), add_special_tokens=False).ids for text in template.endings)
    return named | added & (ids | {tokens[0] for tokens in written if tokens})


def _given(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield (file, value) for each value of `eos_token_id` but null."""
    config = hf.load_config(folder)
    nested = [config[name] for name in NESTED if isinstance(config.get(name), dict)]
    for file, values in (
        ("config.json", [config, *nested]),
        ("generation_config.json", [hf.load_generation_config(folder)]),
    ):
        for value in (v.get("eos_token_id") for v in values):
            yield from ((file, token) for token in (value if isinstance(value, list) else [value]) if token is not None)
