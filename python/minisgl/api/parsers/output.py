"""Selects the parsers for a model and a request, and splits an answer into the pieces from which each API writes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from minisgl.api.parsers.channels import ChannelParser
from minisgl.api.parsers.forms import HARMONY, TOOL_FORMS, ToolForm
from minisgl.api.parsers.pieces import Content, ParsedCall, Parser, Piece, Reasoning
from minisgl.api.parsers.reasoning import REASONING_FORMS, ReasoningForm, ReasoningParser
from minisgl.api.parsers.tools import ToolParser
from minisgl.api.protocol import ChatCompletionRequest
from minisgl.api.structured import forced_functions
from minisgl.core.errors import RequestError, unsupported
from minisgl.core.message import TokenizeMsg
from minisgl.core.params import Grammar, Thinking
from minisgl.core.plan import FinishReason
from minisgl.tokenizer.template import ChatTemplate

TOOL_CALLS: Final = "tool_calls"  # the finish reason
EFFORT: Final = "reasoning_effort"  # a variable that is a switch only if there is no other
# Variables that templates may have to turn reasoning off and on, and their values for both. The last that work count.
SWITCHES: Final[tuple[tuple[str, tuple[Any, Any]], ...]] = (
    *((name, (False, True)) for name in ("enable_thinking", "thinking", "reasoning")),
    *(("thinking_mode", values) for values in (("chat", "thinking"), ("disabled", "enabled"))),
    ("thinking_budget", (0, -1)),
    *((EFFORT, values) for values in (("no_think", "high"), ("none", "high"), ("none", "medium"))),
)

_arguments: Final = msgspec.json.Decoder(dict[str, Any], float_hook=float).decode  # numbers may be beyond float64

Step = Literal["open", "more", "close", "call"]


class OutputParser:
    """Parses one answer: reasoning first, then tool calls in the rest. Either parser may be None."""

    def __init__(
        self,
        reasoning: ReasoningParser | ChannelParser | None = None,
        tools: ToolParser | None = None,
        customs: frozenset[str] = frozenset(),
        hides_reasoning: bool = False,
    ) -> None:
        """Calls of the tools named in `customs` become calls with a text."""
        self.num_calls = 0
        self._customs = customs
        self._hides_reasoning = hides_reasoning
        self._parsers: list[Parser] = [p for p in (reasoning, tools) if p is not None]
        # The open block: its type and texts.
        self._block: tuple[type[Content] | type[Reasoning], list[str]] | None = None

    def feed(self, text: str, is_last: bool = False) -> list[Piece]:
        """Parse `text`; return the pieces that are certain now, or with `is_last` all that remain."""
        pieces: list[Piece] = [Content(text)] if text else []
        for parser in self._parsers:
            parsed: list[Piece] = []
            for piece in pieces:
                parsed += parser.feed(piece.text) if isinstance(piece, Content) else [piece]
            pieces = parsed + (parser.flush() if is_last else [])
        return self._shown(pieces) if self._parsers else pieces

    def _shown(self, pieces: list[Piece]) -> list[Piece]:
        """Merge adjacent texts of one kind, so that the number of events does not depend on the parser."""
        shown: list[Piece] = []
        for kind, group in itertools.groupby(pieces, type):
            run = list(group)
            texts = [piece.text for piece in run if not isinstance(piece, ParsedCall)]
            calls = [piece for piece in run if isinstance(piece, ParsedCall)]
            self.num_calls += len(calls)
            if not (self._hides_reasoning and kind is Reasoning):
                shown += [kind("".join(texts))] if texts else []
                shown += [_with_text(call) if call.name in self._customs else call for call in calls]
        return shown

    def finish_reason(self, reason: FinishReason) -> str:
        """Return the finish reason for the client: TOOL_CALLS if the model has stopped after a call."""
        return TOOL_CALLS if reason is FinishReason.STOP and self.num_calls else reason

    def steps(self, text: str, is_last: bool) -> Iterator[tuple[Step, Piece]]:
        """Yield how an answer's blocks grow by `text` and, if `is_last`, the end.

        Adjacent text or reasoning is a block: "open" with an empty piece, "more" with each new piece, and "close" with
        the whole. A "call" is complete. An answer without blocks gets an empty text.
        """
        pieces = self.feed(text, is_last)
        if is_last and not pieces and self._block is None and not self.num_calls:
            pieces = [Content("")]
        for piece in pieces:
            if self._block is not None and self._block[0] is not type(piece):
                yield "close", self._closed()
            if isinstance(piece, ParsedCall):
                yield "call", piece
                continue
            if self._block is None:
                self._block = type(piece), []
                yield "open", type(piece)("")
            if piece.text:
                self._block[1].append(piece.text)
                yield "more", piece
        if is_last and self._block is not None:
            yield "close", self._closed()

    def _closed(self) -> Piece:
        assert self._block is not None, "no block is open"
        (kind, texts), self._block = self._block, None
        return kind("".join(texts))


def _with_text(call: ParsedCall) -> ParsedCall:
    """Return the call of a custom tool with its `input`, or with the whole JSON if the model has given it otherwise."""
    given = _arguments(call.arguments).get("input")
    text = given if isinstance(given, str) else call.arguments
    return ParsedCall(call.id, call.name, text, is_custom=True)


def parser_names(template: ChatTemplate, tool_parser: str, reasoning_parser: str) -> tuple[str, str]:
    """Return the names of the parsers of tool calls and reasoning: "auto" is detected from `template`, or "none".

    Of a form with variants, the variant of `template` is returned. Channels are read by both parsers or by none.
    """
    source = template.source
    signed = {name: form for name, form in TOOL_FORMS.items() if re.search(form.sign, source)}
    if tool_parser == "auto":
        tool_parser = next(iter(signed), "none")
    tool_parser = next((name for name, form in signed.items() if form.variant_of == tool_parser), tool_parser)
    if reasoning_parser == "auto":
        signs = {name: form.sign or form.close for name, form in REASONING_FORMS.items()}
        reasoning_parser = next((name for name, sign in signs.items() if sign in source), "none")
    return tool_parser, HARMONY if tool_parser == HARMONY else reasoning_parser


@dataclass(frozen=True)
class OutputForms:
    """The forms of tool calls and reasoning of one model; None if it has none, or if they are not to be parsed.

    `switches` are the template's variables that turn reasoning off and on, with these two values. `opened` says whether
    its prompt ends inside the reasoning, for each switch (name, is on), and for None, the prompt without a switch.
    """

    tools: ToolForm | None = None
    reasoning: ReasoningForm | None = None
    opened: dict[tuple[str, bool] | None, bool] = field(default_factory=dict)
    switches: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @classmethod
    def of_model(cls, template: ChatTemplate, tool_parser: str, reasoning_parser: str) -> OutputForms:
        """Return the forms with these names, or those of `parser_names`; "none" is None."""
        tool_parser, reasoning_parser = parser_names(template, tool_parser, reasoning_parser)
        reasoning = REASONING_FORMS.get(reasoning_parser)
        switches = {n: v for n, v in SWITCHES if n in template.variables and _is_switch(template, n, v)}
        if len(switches) > 1:
            switches.pop(EFFORT, None)
        prompts: dict[tuple[str, bool] | None, str] = {None: _prompt(template)}
        prompts |= {(n, on): _prompt(template, {n: v[on]}) for n, v in switches.items() for on in (False, True)}
        opened = {switch: reasoning.is_open(prompt) for switch, prompt in prompts.items()} if reasoning else {}
        return cls(TOOL_FORMS.get(tool_parser), reasoning, opened, switches)

    def prepare(
        self,
        request: ChatCompletionRequest,
        message: TokenizeMsg,
        customs: frozenset[str] = frozenset(),
        budget: int | None = None,
    ) -> tuple[TokenizeMsg, Callable[[], OutputParser]]:
        """Return `message` with its grammar and visible markers, and a factory of its parser.

        Calls of the tools named in `customs` get a text instead of arguments. `budget`: the most tokens of reasoning.
        Raises `RequestError` for a `tool_choice` that cannot be honoured.
        """
        tools = self.tools if message.tools else None
        reasoning = self.reasoning
        is_opened = reasoning is not None and self._is_opened(reasoning, message)
        params = message.sampling_params
        grammar = self._grammar(request, params.grammar)
        if grammar is not None and reasoning is not None and is_opened:
            grammar = msgspec.structs.replace(grammar, after=reasoning.close)
        elif grammar is not None and reasoning is not None and reasoning.lead and message.add_generation_prompt:
            around = {"before": reasoning.open, "after": reasoning.close, "lead": reasoning.lead}
            grammar = msgspec.structs.replace(grammar, **around)
        thinking = reasoning and Thinking(reasoning.open, reasoning.close, is_opened, reasoning.lead, budget)
        markers = frozenset().union(*(form.markers for form in (tools, reasoning) if form))
        params = msgspec.structs.replace(
            params, grammar=grammar, thinking=thinking, shown_tokens=tuple(sorted(markers))
        )
        message = msgspec.structs.replace(message, sampling_params=params)
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in message.tools or ()}
        only_first = request.parallel_tool_calls is False
        hides = request.include_reasoning is False or bool(request.reasoning and request.reasoning.exclude)

        def calls() -> ToolParser | None:
            return ToolParser(tools, schemas, only_first) if tools else None

        def new() -> OutputParser:
            if reasoning is not None and reasoning.lead:
                reads_calls = tools is TOOL_FORMS[HARMONY]
                channels = ChannelParser(schemas if reads_calls else None, only_first)
                return OutputParser(channels, None if reads_calls else calls(), customs, hides)
            thoughts = ReasoningParser(reasoning, is_opened, tools) if reasoning else None
            return OutputParser(thoughts, calls(), customs, hides)

        return message, new

    def _grammar(self, request: ChatCompletionRequest, requested: Grammar | None) -> Grammar | None:
        """Return the grammar of a forced call, else the `requested` one, or a call instead if the model has tools."""
        functions = forced_functions(request)
        is_single = request.parallel_tool_calls is False or isinstance(request.tool_choice, dict)
        if functions is None:
            if requested is None or self.tools is None or not request.tools or request.tool_choice == "none":
                return requested
            offered = [tool["function"] for tool in request.tools]
            return msgspec.structs.replace(requested, calls=self.tools.calls(offered, is_single, is_exact=False))
        if self.tools is None:
            text = "tool_choice needs a model whose form of tool calls is known (--tool-call-parser)"
            raise unsupported(text, "tool_choice")
        return Grammar("calls", self.tools.calls(functions, is_single), param="tools")

    def _is_opened(self, form: ReasoningForm, message: TokenizeMsg) -> bool:
        """Return whether the prompt ends inside the reasoning."""
        if message.continue_final_message and message.messages:
            return form.is_open(message.messages[-1]["content"])
        kwargs = message.template_kwargs
        given = ((n, kwargs[n] != off) for n, (off, _) in self.switches.items() if kwargs.get(n) is not None)
        switch = next(given, None)
        return message.add_generation_prompt and self.opened.get(switch, False)


def _prompt(template: ChatTemplate, variables: dict[str, Any] | None = None) -> str:
    """Return the prompt of a short chat; "" without a template, or if it refuses these `variables`."""
    try:
        return template.render([{"role": "user", "content": "x"}], variables=variables)
    except RequestError:
        return ""


def _is_switch(template: ChatTemplate, name: str, values: tuple[Any, Any]) -> bool:
    """Return whether the prompt depends on which of both `values` the variable `name` has.

    A template that writes any word into the prompt, and does not know the one for off, has no switch.
    """
    off, prompts = values[0], {_prompt(template, {name: value}) for value in values}
    knows_off = not isinstance(off, str) or f'"{off}"' in template.source.replace("'", '"')
    return knows_off and len(prompts) == 2 and "" not in prompts
