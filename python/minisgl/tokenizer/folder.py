"""Loads the tokenizer of a model folder from its files, as transformers 5 does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from minisgl.checkpoint import hf
from minisgl.core.errors import ConfigError

NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Model types whose folders may say LlamaTokenizer although tokenizer.json is meant.
UNCHANGED: Final = ("mistral", "mixtral", "phi3", "qwen2")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load tokenizer.json, and the special and added tokens that only other files of the folder have.

    Raises `ConfigError` if there is no tokenizer.json, or if a file cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json; make one with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    settings = read_settings(folder)
    try:
        tokenizer = _as_llama(path, settings) if _is_llama(folder, settings) else Tokenizer.from_file(str(path))
        known = {repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
        tokenizer.add_tokens([token for token in _added_tokens(settings) if repr(token) not in known])
        texts = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        special = [settings[name] for name in special_names(settings)] + _unnamed(settings)
        tokenizer.add_tokens([_token(token, special=True) for token in special if _text(token) not in texts])
    except Exception as e:  # the library raises bare Exception
        raise ConfigError(f"{path} is not a readable tokenizer: {e}") from e
    # Checkpoints may have these from training; a server never truncates or pads a prompt.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, and the older files, whose tokens replace its own unless it lists added tokens."""
    settings = read_object(folder / "tokenizer_config.json")
    if not settings.get("extra_special_tokens"):
        settings["extra_special_tokens"] = settings.pop("additional_special_tokens", None) or []
    if "added_tokens_decoder" not in settings:
        settings |= read_object(folder / "special_tokens_map.json")
        settings["added_tokens"] = read_object(folder / "added_tokens.json")
    return settings


def special_names(settings: dict[str, Any]) -> dict[str, str]:
    """Return the text of each special token by its name, which templates use."""
    texts = {name: _text(settings.get(name)) for name in NAMES}
    return {name: text for name, text in texts.items() if text is not None}


def end_names(folder: Path) -> set[str]:
    """Return what the tokenizer's files call the end-of-sequence token, which is one token or two that differ."""
    files = ("tokenizer_config.json", "special_tokens_map.json")
    return {text for file in files if (text := _text(read_object(folder / file).get("eos_token")))}


def read_object(path: Path) -> dict[str, Any]:
    return hf.read_json(path) if path.is_file() else {}


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _token(token: Any, **flags: bool) -> AddedToken:
    """Return an added token, given by its text or by an object with text and flags."""
    if isinstance(token, str):
        return AddedToken(token, **flags)
    known = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(token["content"], **({k: token[k] for k in known if k in token} | flags))


def _unnamed(settings: dict[str, Any]) -> list[Any]:
    """Return the special tokens that have no name."""
    tokens = settings["extra_special_tokens"] or settings.get("additional_special_tokens") or []
    return list(tokens.values() if isinstance(tokens, dict) else tokens)


def _added_tokens(settings: dict[str, Any]) -> list[AddedToken]:
    """Return the added tokens in the order of their ids, which follow the vocabulary."""
    if "added_tokens_decoder" in settings:
        return [_token(token) for _, token in sorted(settings["added_tokens_decoder"].items(), key=lambda t: int(t[0]))]
    special = {*special_names(settings).values(), *map(_text, settings["extra_special_tokens"] or ())}
    ids = settings["added_tokens"]
    return [_token(text, special=text in special, normalized=text not in special) for text in sorted(ids, key=ids.get)]


def _is_llama(folder: Path, settings: dict[str, Any]) -> bool:
    """Return whether transformers uses its `LlamaTokenizer` for this folder, with its own pre-tokenizer."""
    config = read_object(folder / "config.json")
    kind = settings.get("tokenizer_class") or config.get("tokenizer_class")
    return kind in ("LlamaTokenizer", "LlamaTokenizerFast") and config.get("model_type") not in UNCHANGED


def _as_llama(path: Path, settings: dict[str, Any]) -> Tokenizer:
    """Load a tokenizer that puts a space before a text, but not before text after a special token."""
    data = hf.read_json(path)
    if '"ByteLevel"' in json.dumps([data.get("pre_tokenizer"), data.get("decoder")]):
        return Tokenizer.from_file(str(path))
    has_prefix = settings.get("add_prefix_space") is not False
    scheme = ("always" if settings.get("legacy") else "first") if has_prefix else "never"
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    parts: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        parts.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    decoder = {"type": "Sequence", "decoders": parts}
    return Tokenizer.from_str(json.dumps(data | {"normalizer": None, "pre_tokenizer": space, "decoder": decoder}))
