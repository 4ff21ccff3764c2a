"""Chat templates as Hugging Face writes them: Jinja in a sandbox, with the conventions of transformers.

The template comes from the model folder, never from a client. A client's messages only fill it in, and rendering is
limited in size and time.
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minisgl.checkpoint.hf import read_json
from minisgl.errors import ConfigError, RequestError

MAX_MESSAGES: Final = 2048  # templates may loop over messages within messages
MAX_RENDERED_CHARS: Final = 16 * 1024 * 1024
MAX_RENDER_SECONDS: Final = 5.0
_CONTINUE_MARK: Final = "\ue000continue-here\ue000"  # private-use characters: no template strips or escapes them
_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _sources(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return template name -> text; a single template is called "default"."""
    named: dict[str, str] = {}
    value = tokenizer_config.get("chat_template")
    if isinstance(value, str):
        named["default"] = value
    elif isinstance(value, list):  # several named templates
        named = {
            str(t["name"]): str(t["template"])
            for t in value
            if isinstance(t, dict) and {"name", "template"} <= t.keys()
        }
    file = folder / "chat_template.jinja"
    if file.is_file():
        named["default"] = file.read_text(encoding="utf-8")
    return named


class ChatTemplate:
    """The chat templates of one model folder; `render` turns messages into the text to be encoded."""

    def __init__(self, folder: Path) -> None:
        """Raise `ConfigError` if a template does not compile. A folder without one is fine until `render`."""
        path = folder / "tokenizer_config.json"
        config = read_json(path) if path.is_file() else {}
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        env.filters["tojson"] = _to_json
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = _strftime_now
        sources = _sources(folder, config)
        self.source = "\n".join(sources.values())  # the API derives the model's abilities from it
        try:
            self._templates = {name: env.from_string(text) for name, text in sources.items()}
        except TemplateError as e:
            raise ConfigError(f"the chat template of {folder} does not compile: {e}") from e
        self._knows_developer = any("developer" in text for text in sources.values())
        self._special_tokens: dict[str, str] = {}
        for name in _SPECIAL_TOKENS:
            token = config.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                self._special_tokens[name] = text

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return the conversation as one text, special tokens included.

        `continue_final_message` leaves the last message open for the model to continue. Raises `RequestError` if there
        is no template, or the template refuses the conversation.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions", param="messages", code="no_chat_template"
            )
        if len(messages) > MAX_MESSAGES:
            raise RequestError(f"messages has {len(messages)} entries; the limit is {MAX_MESSAGES}", param="messages")
        messages = [self._adapt(m) for m in messages]
        if continue_final_message:
            if not messages or not isinstance(messages[-1].get("content"), str):
                raise RequestError(
                    "continue_final_message needs a last message with text", param="continue_final_message"
                )
            final = messages[-1]["content"]
            messages[-1]["content"] = final.rstrip() + _CONTINUE_MARK
        # The names fixed by convention come last, so that template_kwargs cannot override them.
        context = self._special_tokens | kwargs
        context |= {"messages": messages, "tools": tools or None, "documents": None}
        text = self._run(template.generate(**context, add_generation_prompt=add_generation_prompt))
        if continue_final_message:
            head, mark, _ = text.rpartition(_CONTINUE_MARK)
            if not mark:
                raise RequestError("the chat template drops the last message", param="continue_final_message")
            text = head + final[len(final.rstrip()) :]
        return text

    def _adapt(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a copy for the template; "developer" is OpenAI's newer role for "system", which few templates know."""
        if message.get("role") == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return dict(message)

    @staticmethod
    def _run(pieces: Any) -> str:
        deadline = time.monotonic() + MAX_RENDER_SECONDS
        parts: list[str] = []
        size = 0
        try:
            for piece in pieces:
                parts.append(piece)
                size += len(piece)
                if size > MAX_RENDERED_CHARS or time.monotonic() > deadline:
                    raise RequestError("the conversation is too large for the chat template", param="messages")
        except RequestError:
            raise
        except Exception as e:  # a template is a program: a missing field can raise anything
            raise RequestError(
                f"the chat template refuses this conversation: {e}", param="messages", code="chat_template_error"
            ) from e
        return "".join(parts)
