"""The chat templates of a model folder.

A template comes from the model folder, never from a client. Clients only provide messages. Each template is first tried
in a process with limits (`trial.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from minisgl.core.errors import RequestError
from minisgl.tokenizer.folder import read_object, read_settings, special_names
from minisgl.tokenizer.jinja import compile_template, fill_in
from minisgl.tokenizer.reading import Reading
from minisgl.tokenizer.trial import try_template

MAX_MESSAGES: Final = 2048  # templates may loop over messages within messages
_CONTINUE_MARK: Final = "\ue000continue-here\ue000"  # private-use characters: no template strips or escapes them


def _sources(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return name -> text of all templates; a single one is "default". Files override tokenizer_config.json."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if named := {n: f.read_text(encoding="utf-8", errors="replace") for n, f in files.items() if f.is_file()}:
        return named
    value = settings.get("chat_template")
    if value is None:  # where a multimodal model's processor has it
        value = read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if not isinstance(value, list):
        return {}
    listed = (t for t in value if isinstance(t, dict) and {"name", "template"} <= t.keys())
    return {str(t["name"]): str(t["template"]) for t in listed}


@dataclass(frozen=True)
class ChatTemplate:
    """The chat templates of one model folder by name, as text. `render` turns messages into the prompt's text.

    `readings` has the result of each template's trial. `defaults` are variables that requests may set.
    """

    sources: dict[str, str]
    special_tokens: dict[str, str]
    readings: dict[str, Reading]
    defaults: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_folder(
        cls, folder: Path, source: str | None = None, defaults: Mapping[str, Any] | None = None
    ) -> ChatTemplate:
        """Read the templates of a folder, which may have none, or use only `source`; and try each.

        Raises `ConfigError` for unreadable JSON.
        """
        settings = read_settings(folder)
        sources = _sources(folder, settings) if source is None else {"default": source}
        tokens, defaults = special_names(settings), dict(defaults or {})
        readings = {name: try_template(text, defaults | tokens) for name, text in sources.items()}
        return cls(sources, tokens, readings, defaults)

    @property
    def problems(self) -> dict[str, str]:
        """The reason for each template that cannot be used."""
        return {name: reading.problem for name, reading in self.readings.items() if reading.problem}

    @property
    def endings(self) -> frozenset[str]:
        """What the templates write after an answer, such as "<|im_end|>", without those that write nothing."""
        return frozenset(reading.ending for reading in self.readings.values() if reading.ending.strip())

    @property
    def source(self) -> str:
        """The text of all templates, from which the model's abilities are detected."""
        return "\n".join(self.sources.values())

    @property
    def variables(self) -> frozenset[str]:
        """The names of the variables that the templates read."""
        usable = (text for name, text in self.sources.items() if name not in self.problems)
        return frozenset().union(*(compile_template(text)[1] for text in usable))

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Render a conversation as text, special tokens included.

        `continue_final_message` leaves the last message open, so that the model continues it. Raises `RequestError` if
        no template is usable, or if the template rejects the conversation.
        """
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        problem = self.problems.get(name)
        if problem is not None or name not in self.sources:
            why = "no chat template" if problem is None else f"a chat template that cannot be used ({problem})"
            raise RequestError(f"this model has {why}; use /v1/completions", param="messages", code="no_chat_template")
        template, known = compile_template(self.sources[name])
        if len(messages) > MAX_MESSAGES:
            raise RequestError(f"messages has {len(messages)} entries; the limit is {MAX_MESSAGES}", param="messages")
        if continue_final_message:
            *_, last = messages or [{}]
            if not isinstance(last.get("content"), str):
                raise RequestError(
                    "continue_final_message needs a last message with text", param="continue_final_message"
                )
            final: str = last["content"]
            messages = [*messages[:-1], {**last, "content": final.rstrip() + _CONTINUE_MARK}]
        reading, given = self.readings[name], self.defaults | dict(variables or {})
        context = reading.variables(self.special_tokens | {k: v for k, v in given.items() if k in known})
        adapted = [reading.adapt(self._known_role(m)) for m in messages]
        text = fill_in(template, context, adapted, tools, add_generation_prompt)
        if continue_final_message:
            head, mark, _ = text.rpartition(_CONTINUE_MARK)
            if not mark:
                raise RequestError("the chat template drops the last message", param="continue_final_message")
            text = head + final[len(final.rstrip()) :]
        return text

    def _known_role(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message, with "developer" as "system": few templates know OpenAI's newer name."""
        if message.get("role") == "developer" and "developer" not in self.source:
            return message | {"role": "system"}
        return message
