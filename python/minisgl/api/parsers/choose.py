"""Which parsers a model needs, read off its chat template, and which of them a request wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from minisgl.api.parsers.output import OutputParser
from minisgl.api.parsers.reasoning import REASONING_FORMS, ReasoningForm, ReasoningParser
from minisgl.api.parsers.tool_forms import TOOL_FORMS, ToolForm
from minisgl.api.parsers.tools import ToolParser
from minisgl.api.protocol import ChatCompletionRequest
from minisgl.api.tool_choice import forced_functions
from minisgl.errors import RequestError
from minisgl.message import TokenizeMsg
from minisgl.tokenizer.template import ChatTemplate

# What the template of each family contains; the first that fits counts.
_TOOL_SIGNS: Final = {
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "llama3": ("<|python_tag|>", "<|start_header_id|>ipython", "Environment: ipython"),
}
_SWITCHES: Final = ("enable_thinking", "thinking")  # chat_template_kwargs by which templates open or skip the reasoning


@dataclass(frozen=True)
class OutputForms:
    """How one model writes calls and reasoning; None = it does not, or nobody wants it parsed.

    `opened` says for each thinking switch (name, value), and for none of them, whether the template's prompt ends
    inside the reasoning.
    """

    tools: ToolForm | None = None
    reasoning: ReasoningForm | None = None
    opened: dict[tuple[str, bool] | None, bool] = field(default_factory=dict)

    @classmethod
    def of_model(cls, folder: Path, tool_parser: str, reasoning_parser: str) -> OutputForms:
        """The forms by name, or as the chat template in `folder` shows them ("auto"); "none" is none."""
        template = ChatTemplate(folder)
        if tool_parser == "auto":
            found = (n for n, signs in _TOOL_SIGNS.items() if any(sign in template.source for sign in signs))
            tool_parser = next(found, "none")
        if reasoning_parser == "auto":
            found = (n for n, form in REASONING_FORMS.items() if form.close in template.source)
            reasoning_parser = next(found, "none")
        reasoning = REASONING_FORMS.get(reasoning_parser)
        switches: list[tuple[str, bool] | None] = [None, *((n, v) for n in _SWITCHES for v in (True, False))]
        opened = {switch: _opens(template, reasoning, switch) for switch in switches} if reasoning else {}
        return cls(TOOL_FORMS.get(tool_parser), reasoning, opened)

    def prepare(
        self, request: ChatCompletionRequest, message: TokenizeMsg
    ) -> tuple[TokenizeMsg, Callable[[], OutputParser] | None]:
        """`message` such that the parser sees what it needs, and what makes the parser of one answer, if any.

        Raises `RequestError` for a `tool_choice` that cannot be honoured.
        """
        message = self._constrain(request, message)
        tools = self.tools if message.tools else None
        reasoning = self.reasoning
        if tools is None and reasoning is None:
            return message, None
        if tools is not None and tools.shows_special:
            params = msgspec.structs.replace(message.sampling_params, skip_special_tokens=False)
            message = msgspec.structs.replace(message, sampling_params=params)
        names = frozenset(str(tool["function"].get("name")) for tool in message.tools or ())
        only_first = request.parallel_tool_calls is False
        is_opened = reasoning is not None and self._is_opened(reasoning, message)

        def new() -> OutputParser:
            return OutputParser(
                ReasoningParser(reasoning, is_opened) if reasoning else None,
                ToolParser(tools, names, only_first) if tools else None,
            )

        return message, new

    def _constrain(self, request: ChatCompletionRequest, message: TokenizeMsg) -> TokenizeMsg:
        """A call that must come is a grammar, and a grammar holds for what follows the reasoning."""
        grammar, functions = message.sampling_params.grammar, forced_functions(request)
        if functions is not None:
            if self.tools is None:
                error = "tool_choice needs a model whose form of tool calls is known (--tool-call-parser)"
                raise RequestError(error, param="tool_choice", code="unsupported_value")
            if grammar is not None:
                raise RequestError(f"tool_choice and {grammar.param} exclude each other", param="tool_choice")
            is_single = request.parallel_tool_calls is False or isinstance(request.tool_choice, dict)
            grammar = self.tools.grammar(functions, is_single)
        if grammar is not None and self.reasoning is not None and self._is_opened(self.reasoning, message):
            grammar = msgspec.structs.replace(grammar, after=self.reasoning.close)
        params = msgspec.structs.replace(message.sampling_params, grammar=grammar)
        return msgspec.structs.replace(message, sampling_params=params)

    def _is_opened(self, form: ReasoningForm, message: TokenizeMsg) -> bool:
        """Whether the prompt ends inside the reasoning."""
        if message.continue_final_message and message.messages:
            return form.is_open(message.messages[-1]["content"])
        kwargs = message.template_kwargs
        switch = next(((n, v) for n in _SWITCHES if isinstance(v := kwargs.get(n), bool)), None)
        return message.add_generation_prompt and self.opened.get(switch, False)


def _opens(template: ChatTemplate, form: ReasoningForm, switch: tuple[str, bool] | None) -> bool:
    """Whether a prompt ends inside the reasoning, found out by making one."""
    kwargs: dict[str, Any] = dict([switch]) if switch else {}
    try:
        return form.is_open(template.render([{"role": "user", "content": "x"}], **kwargs))
    except RequestError:
        return False  # no template, or one that wants another conversation: then its prompts are not opened for certain
