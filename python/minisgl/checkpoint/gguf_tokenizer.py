"""Makes the tokenizer's files of a model folder of a GGUF file's metadata. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from minisgl.core.errors import ConfigError

SPACE: Final = "\u2581"  # SentencePiece's mark for a space
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # `tokenizer.ggml.token_type`
# Names of tokens in the metadata -> in tokenizer_config.json.
NAMES: Final = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
ENDS: Final = ("eos", "eot", "eom")

# -- pre-tokenizers: how texts are split before byte-pair encoding, as in the tokenizer.json of the models

_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_FIRST: Final = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    return rf"{_ENDINGS}|{_FIRST}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"


def _cased_words(digits: str, ending: str) -> str:
    words = rf"{_FIRST}{_UPPER}*{_LOWER}+{ending}|{_FIRST}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"


_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WITH_BOS: Final = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "pixtral",
    "lfm2",
    "tekken",
)  # unless the file says so
_IGNORE_MERGES: Final = (*_WITH_BOS, "glm4")  # a word that is a token is not split
# `tokenizer.ggml.pre` -> the expressions that split a text, one after the other.
PRE_TOKENIZERS: Final = {
    name: patterns
    for names, *patterns in (
        ("gpt-2 phi-2 mpt olmo exaone4 trillion granite-docling", _GPT2),
        ("starcoder refact command-r smollm codeshell exaone", r"\p{N}", _GPT2),
        ("llama3 llama-v3 llama-bpe falcon3 pixtral lfm2 dbrx smaug-bpe chatglm-bpe glm4", _words(r"\p{N}{1,3}")),
        ("qwen2 deepseek-r1-qwen stablelm2 hunyuan", _words(r"\p{N}")),
        ("tekken", _cased_words(r"\p{N}", "")),
        ("gpt-4o", _cased_words(r"\p{N}{1,3}", f"{_ENDINGS}?")),
    )
    for name in names.split()
}


def tokenizer_files(path: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return tokenizer.json, tokenizer_config.json and generation_config.json, made of the metadata of `path`.

    Raises `ConfigError` for a tokenizer that is not supported.
    """
    given = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    kind, pre = given.get("model"), given.get("pre")
    for name, value, known in (("model", kind, ("gpt2", "llama")), ("pre", pre, PRE_TOKENIZERS)):
        if value not in known and (name == "model" or kind == "gpt2"):
            listed = ", ".join(known)
            raise ConfigError(
                f"{path} has tokenizer.ggml.{name}={value!r:.40}, which is not supported; supported: {listed}"
            )
    try:
        tokens, types = given["tokens"], given["token_type"]
        tokenizer = _byte_level(given) if kind == "gpt2" else _sentence_piece(given)
        kept = [(tokens[i], number) for i, number in enumerate(types) if number in (CONTROL, USER_DEFINED)]
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=number == CONTROL) for text, number in kept])
        ids = {name: i for name in (*NAMES, *ENDS) if (i := given.get(f"{name}_token_id", len(tokens))) < len(tokens)}
        has_bos = given.get("add_bos_token", kind == "llama" or pre in _WITH_BOS)
        before = [tokens[ids["bos"]]] if has_bos and "bos" in ids else []
        after = [tokens[ids["eos"]]] if given.get("add_eos_token") and "eos" in ids else []
        around = [(text, tokens.index(text)) for text in {*before, *after}]
        tokenizer.post_processor = TemplateProcessing([*before, "$A", *after], special_tokens=around)
    except Exception as e:  # errors of tokenizers have no class of their own
        raise ConfigError(f"{path} has a tokenizer that cannot be read ({type(e).__name__}: {e})") from e
    mark = "tokenizer.chat_template"
    settings: dict[str, Any] = {field: tokens[ids[name]] for name, field in NAMES.items() if name in ids}
    settings["chat_template"] = [
        {"name": key.removeprefix(mark).strip(".") or "default", "template": text}
        for key, text in metadata.items()
        if key.startswith(mark) and isinstance(text, str)
    ]
    return {
        "tokenizer.json": json.loads(tokenizer.to_str()),
        "tokenizer_config.json": settings,
        "generation_config.json": {"eos_token_id": [ids[name] for name in ENDS if name in ids]},
    }


def _byte_level(given: dict[str, Any]) -> Tokenizer:
    """Return a byte-level BPE tokenizer, whose merges are stored."""
    vocab = {text: i for i, text in enumerate(given["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in given["merges"]]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=given["pre"] in _IGNORE_MERGES))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[given["pre"]]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(given: dict[str, Any]) -> Tokenizer:
    """Return a SentencePiece tokenizer of BPE's kind: it joins the neighbours whose joined token has the best score."""
    tokens, scores, unknown = given["tokens"], given["scores"], given.get("unknown_token_id")
    pieces = {text: i for i, text in enumerate(tokens) if given["token_type"][i] == NORMAL}
    merges = [
        (text[:cut], text[cut:])
        for text, _ in sorted(pieces.items(), key=lambda piece: -scores[piece[1]])
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    ]
    vocab = {text: i for i, text in enumerate(tokens)}
    unk_token = None if unknown is None else tokens[unknown]
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    has_prefix = given.get("add_space_prefix", True)
    prefix, strip = ([normalizers.Prepend(SPACE)], [decoders.Strip(" ", 1, 0)]) if has_prefix else ([], [])
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    to_text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*to_text, *strip])
    return tokenizer
