"""Tokenizer folders as publishers write them: the tokens, templates and texts are those of transformers."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, normalizers

from minisgl.core.errors import ConfigError
from minisgl.core.message import TokenizeMsg
from minisgl.core.params import Limits, SamplingParams
from minisgl.tokenizer.detokenize import DetokenizeManager
from minisgl.tokenizer.folder import load_tokenizer
from minisgl.tokenizer.tokenize import TokenizeManager


def _conftest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tokenizers_for_tests", Path(__file__).parent / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MADE = _conftest()
LIMITS = Limits(max_model_len=256, vocab_size=1000)
TEXTS = ["the world", "  the  wall", "a</s>b <tool>c</tool> d", "<s>[INST] hello", "größe 🙂", "x<pad>", "<|mid|> the"]
TEMPLATE = (
    "{% for m in messages %}{{ bos_token }}[INST] {{ m.content }} [/INST]{{ eos_token }}{% endfor %}"
    "<tool>{{ pad_token }}{{ unk_token }} the <|mid|>"
)
CHAT = [{"role": "user", "content": "the wall"}, {"role": "user", "content": "</s> hello"}]


def llama2() -> Tokenizer:
    """As in Llama 2's tokenizer.json: the normalizer prepends a space, also after special tokens."""
    tokenizer = MADE.byte_fallback()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    data = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(json.dumps(data | {"pre_tokenizer": None}))


def added(content: str, **flags: bool) -> dict[str, Any]:
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": content, **usual, **flags}


NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LISTED = {str(i): added(content) for i, content in enumerate(("<unk>", "<s>", "</s>"))}
NEXT_ID = MADE.byte_fallback().get_vocab_size()
FOLDERS: dict[str, dict[str, Any]] = {
    "only the map has names": {
        "special_tokens_map.json": {
            "bos_token": {k: v for k, v in added("<s>").items() if k != "special"},
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "additional_special_tokens": ["<tool>"],
        }
    },
    "the map replaces names": {
        "tokenizer_config.json": {**NAMED, "eos_token": "<unk>"},
        "special_tokens_map.json": {"eos_token": "</s>"},
    },
    "the map does not count": {
        "tokenizer_config.json": {**NAMED, "added_tokens_decoder": LISTED},
        "special_tokens_map.json": {"eos_token": "<unk>", "pad_token": "<pad>"},
    },
    "added tokens in their own file": {
        "tokenizer_config.json": NAMED,
        "added_tokens.json": {"</tool>": NEXT_ID + 1, "<tool>": NEXT_ID, "<|mid|>": NEXT_ID + 2},
        "special_tokens_map.json": {"additional_special_tokens": ["<tool>"]},
    },
    "added tokens in the config": {
        "tokenizer_config.json": {
            **NAMED,
            "pad_token": "<pad>",
            "added_tokens_decoder": LISTED
            | {
                str(NEXT_ID + 1): added("</tool>", special=False, lstrip=True),
                str(NEXT_ID): added("<tool>", rstrip=True),
                str(NEXT_ID + 2): added("<|mid|>", special=False, normalized=True),
            },
        }
    },
    "extra tokens": {"tokenizer_config.json": {**NAMED, "extra_special_tokens": ["<tool>", "</tool>", "the"]}},
    "extra tokens with names": {"tokenizer_config.json": {**NAMED, "extra_special_tokens": {"mid_token": "<|mid|>"}}},
}
LLAMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("llama", {"tokenizer_class": "LlamaTokenizer", "legacy": False}),
    "llama 2, fast": ("llama", {"tokenizer_class": "LlamaTokenizerFast"}),
    "legacy": ("llama", {"tokenizer_class": "LlamaTokenizer", "legacy": True}),
    "legacy null": ("llama", {"tokenizer_class": "LlamaTokenizer", "legacy": None}),
    "no prefix": ("llama", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}),
    "another class": ("llama", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "qwen3": ("qwen3", {"tokenizer_class": "LlamaTokenizer"}),
    "mistral": ("mistral", {"tokenizer_class": "LlamaTokenizer", "legacy": False}),
    "mixtral": ("mixtral", {"tokenizer_class": "LlamaTokenizer"}),
    "phi3": ("phi3", {"tokenizer_class": "LlamaTokenizer", "legacy": False}),
}


def require_equal(folder: Path) -> None:
    from transformers import AutoTokenizer

    judge, manager = AutoTokenizer.from_pretrained(folder), TokenizeManager(folder, LIMITS)
    detokenizer = DetokenizeManager(manager.tokenizer)

    def ids_of(**fields: Any) -> list[int]:
        return manager.tokenize(TokenizeMsg(uid=1, sampling_params=SamplingParams(max_tokens=1), **fields)).tolist()

    for text in TEXTS:
        for special in (True, False):
            ids = judge(text, add_special_tokens=special)["input_ids"]
            assert ids_of(text=text, add_special_tokens=special) == ids, text
            for skip in (True, False):
                assert detokenizer.decode(ids, SamplingParams(skip_special_tokens=skip), []) == judge.decode(
                    ids, skip_special_tokens=skip
                ), text
    want = judge.apply_chat_template(CHAT, tokenize=False)
    assert manager.template.render(CHAT, add_generation_prompt=False) == want
    want = judge.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    assert ids_of(messages=CHAT, add_generation_prompt=False) == want


def write(folder: Path, model_type: str, tokenizer: Tokenizer, files: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", FOLDERS)
def test_special_and_added_tokens(tmp_path: Path, name: str) -> None:
    config = FOLDERS[name].get("tokenizer_config.json", {}) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    write(tmp_path, "qwen3", MADE.byte_fallback(), FOLDERS[name] | {"tokenizer_config.json": config})
    require_equal(tmp_path)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", LLAMAS)
def test_spaces_behind_special_tokens(tmp_path: Path, name: str) -> None:
    model_type, options = LLAMAS[name]
    tokens = {**NAMED, "pad_token": "</s>", "added_tokens_decoder": LISTED}
    write(tmp_path, model_type, llama2(), {"tokenizer_config.json": tokens | options})
    require_equal(tmp_path)


@pytest.mark.filterwarnings("default")
def test_byte_level_tokenizers_stay_as_they_are(tmp_path: Path) -> None:
    tokenizer = MADE.byte_level()
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    write(tmp_path, "llama", tokenizer, {"tokenizer_config.json": {**config, "unk_token": None, "pad_token": None}})
    require_equal(tmp_path)
    assert isinstance(load_tokenizer(tmp_path).decoder, decoders.ByteLevel)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("special_tokens_map.json", "{"),
        ("added_tokens.json", "[]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": 5}'),
        ("tokenizer_config.json", '{"extra_special_tokens": [5]}'),
        ("tokenizer_config.json", "[" * 100_000),
    ],
)
def test_broken_files_are_one_sentence(folder: Path, tmp_path: Path, name: str, text: str) -> None:
    for file in ("config.json", "tokenizer.json"):
        shutil.copy(folder / file, tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=str(tmp_path)) as e:
        load_tokenizer(tmp_path)
    assert "\n" not in str(e.value)
