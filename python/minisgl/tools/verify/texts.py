"""Compares tokenization, detokenization and chat templates with transformers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from minisgl.core.params import SamplingParams
from minisgl.tokenizer.detokenize import DetokenizeManager
from minisgl.tokenizer.tokenize import TokenizeManager
from minisgl.tools.verify.checks import Result

if TYPE_CHECKING:
    from pathlib import Path

TEXTS: Final = (
    "",
    " two  spaces, a\ttab\n\n and a line ",
    "Größe, naïve, 你好世界, こんにちは, 🙂🇩🇪, e\u0301, \u200d, 3.14159, don't, <b>",
    "def area(width: float) -> float:\n    return width * 2  # 7.0\n",
)
USER: Final = {"role": "user", "content": " What is 2 + 2? "}
ASSISTANT: Final = {"role": "assistant", "content": "It is 4."}
TOOL: Final = {"name": "add", "description": "Add <two> numbers.", "parameters": {"type": "object", "properties": {}}}
CHATS: Final[tuple[dict[str, Any], ...]] = (
    {"messages": [USER]},
    {"messages": [{"role": "system", "content": "Be brief."}, USER, ASSISTANT, {"role": "user", "content": "Why?"}]},
    {"messages": [USER, ASSISTANT], "add_generation_prompt": False},
    {"messages": [USER], "tools": [{"type": "function", "function": TOOL}]},
)
MAX_ADDED: Final = 300  # added tokens to try, from the first on: these have names


def check_texts(folder: Path) -> list[Result]:
    """Compare the tokenizer and the chat templates in `folder` with transformers'."""
    from transformers import AutoTokenizer

    try:
        reference = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as e:  # any kind: an unknown class, a missing package, a broken file
        cause = f"transformers cannot load the tokenizer ({type(e).__name__})"
        return [Result.skipped(f"{name} = transformers", cause) for name in ("tokens", "text", "chats")]
    manager = TokenizeManager(folder)
    tokenizer, decode = manager.tokenizer, DetokenizeManager(manager.tokenizer).decode
    added = {token.content: None for token in tokenizer.get_added_tokens_decoder().values()}
    texts = [
        *TEXTS,
        *(f"a {mark}b{mark} c" for mark in list(added | dict.fromkeys(reference.all_special_tokens))[:MAX_ADDED]),
    ]
    tokens, decoded = {}, {}
    for text, special in product(texts, (True, False)):
        ids = reference(text, add_special_tokens=special)["input_ids"]
        tokens[text, special] = tokenizer.encode(text, add_special_tokens=special).ids == ids
        for skip in (True, False):
            theirs = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            decoded[text, special, skip] = decode(ids, SamplingParams(skip_special_tokens=skip), []) == theirs
    chats = {}
    for chat in CHATS if manager.template.sources else ():
        options = {"tools": None, "add_generation_prompt": True} | chat
        messages = options.pop("messages")
        theirs = _render(reference.apply_chat_template, messages, tokenize=False, **options)
        chats[str(chat)] = _render(manager.template.render, messages, **options) == theirs
    return [_result("tokens", "texts", tokens), _result("text", "texts", decoded), _result("chats", "chats", chats)]


def _render(render: Callable[..., Any], messages: list[dict[str, str]], **options: Any) -> Any:
    """Return the text, or None if the template refuses the conversation."""
    try:
        return render(messages, **options)
    except Exception:  # a template may raise anything
        return None


def _result(name: str, what: str, equal: dict[Any, bool]) -> Result:
    if not equal:
        return Result.skipped(f"{name} = transformers", "the folder has no chat template")
    different = [text for text, is_equal in equal.items() if not is_equal]
    figure = f"{len(equal) - len(different)} identical" + (f", not {different[0]!r:.60}" if different else "")
    return Result(f"{name} = transformers", f"{len(equal)} {what}", figure, "all", not different)
