"""Compiles grammars to matchers that compute token masks, with llguidance (an Earley parser over a token trie).

Compiling is bounded: texts are short (`params.Limits`), and llguidance limits its own work ("fuel"). Measured on one
core (AMD EPYC): common schemas take 1 ms, the worst text found 2.3 s; a mask over 151,000 tokens takes 14 us in the
median, and 3.6 ms at most.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from minisgl.core.errors import RequestError
from minisgl.core.params import KEY, NUMBER, CallItem, Grammar, Thinking, ToolCalls
from minisgl.core.rounding import ceil_div
from minisgl.grammar.gbnf import gbnf_to_lark, is_gbnf
from minisgl.grammar.schema import exact_schema
from minisgl.grammar.thinking import Anything, ThinkingMatcher
from minisgl.tokenizer.folder import load_tokenizer
from minisgl.tokenizer.text import TokenBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from minisgl.core.plan import Ints

_Body = dict[str, Any]  # a grammar of several, in the library's form
# JSON as `json.dumps` writes it: if white space is allowed anywhere, a model may never stop writing it.
JSON_STYLE: Final[dict[str, Any]] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
MAX_LEXER_STATES: Final = 20_000  # 1 to 2 kB each
MAX_ERROR_CHARS: Final = 300
INVALID: Final = "invalid_grammar"
# What llguidance does not read although it changes no text: lines without a rule, and priorities.
_LARK_BLANK: Final = re.compile(r"^[ \t]*(?:(?:#|//).*)?$", re.MULTILINE)
_LARK_PRIORITY: Final = re.compile(r"^([!?]*\w+)\.-?\d+(?=\s*[:\[])", re.MULTILINE)
ANYTHING: Final = r"/(.|\n)*/"
_JSON_TOKENS: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[:,] |[{}\[\]]|\n|[^"{}\[\]:,\n]+|.', re.DOTALL)
# A mask is computed in the engine's loop. It may take MASK_S on average, with bursts of MASK_BURST_S.
MASK_S: Final = 0.002
MASK_BURST_S: Final = 0.04
PARALLEL_FROM: Final = 4  # masks from which on threads are used: waking them costs about as much as one mask
MAX_THREADS: Final = 8


class _Vocabulary:
    """The vocabulary in the form that llguidance expects: bytes by id, and a function that encodes text (bytes)."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> None:
        bytes_of = TokenBytes(tokenizer)
        self.tokens = [bytes_of[i] for i in range(vocab_size)]
        added = tokenizer.get_added_tokens_decoder().items()
        self.special_ids = {token.content: i for i, token in added if token.special}
        self.special_token_ids = list(self.special_ids.values())
        self.eos_token_id = min(eos_ids, default=vocab_size - 1)
        self.bos_token_id = None
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False).ids
        return ids


class GrammarCompiler:
    """Compiles grammars for the tokenizer in `folder` and a model with logits of `vocab_size` tokens."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)

    @cached_property
    def _vocabulary(self) -> _Vocabulary:
        return _Vocabulary(load_tokenizer(self._folder), self._vocab_size, self._eos_ids)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(
            TokenizerWrapper(self._vocabulary), n_vocab=self._vocab_size, eos_token=self._eos_ids or None
        )

    def load(self) -> None:
        """Load the tokenizer now, instead of with the first grammar."""
        assert self._tokenizer is not None, "the tokenizer of grammars could not be loaded"

    @cached_property
    def _executor(self) -> LLExecutor | None:
        """Return threads for masks; None if the engine needs all cores."""
        cores = len(os.sched_getaffinity(0))
        return LLExecutor(min(cores // 2, MAX_THREADS)) if cores >= 4 else None

    def compile(self, grammar: Grammar, ignore_eos: bool) -> TokenMatcher:
        """Return a matcher at the start of `grammar`. Raises `RequestError` if the grammar is invalid.

        With `ignore_eos`, the text ends only where nothing can follow.
        """
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        try:
            matcher = LLMatcher(self._tokenizer, self._source(grammar), log_level=0, limits=limits)
        except (ValueError, msgspec.MsgspecError, RecursionError) as e:
            raise refusal(grammar, str(e)) from e
        if matcher.is_error():
            raise refusal(grammar, matcher.get_error())
        return TokenMatcher(grammar, matcher, self._vocab_size, self._eos_ids, may_end=not ignore_eos)

    def limit(self, thinking: Thinking, grammar: TokenMatcher | None) -> ThinkingMatcher:
        """Return a matcher of an answer with limited reasoning, which follows the matcher of a `grammar`, if any."""
        inner = Anything(self._vocab_size) if grammar is None else grammar
        return ThinkingMatcher(thinking, self._vocabulary.tokens, self._vocabulary, inner)

    def compute_masks(self, matchers: Sequence[TokenMatcher | ThinkingMatcher]) -> None:
        """Compute the mask of each matcher; set its error if its grammar has become too ambiguous to follow."""
        masks = np.zeros((len(matchers), ceil_div(self._vocab_size, 32)), np.int32)
        # In this order: a trial, whose memory is limited, has one matcher and starts no threads.
        if len(matchers) < PARALLEL_FROM or self._executor is None:
            for matcher, mask in zip(matchers, masks, strict=True):
                matcher.compute_mask(mask)
            return
        jobs = [(matcher.matcher, i) for i, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(jobs, masks.ctypes.data, masks[0].nbytes, len(masks))
        for matcher, mask in zip(matchers, masks, strict=True):
            matcher.set_mask(mask)

    def _source(self, grammar: Grammar) -> str:
        """Return `grammar` in the library's form: anything up to `after`, then the text or, if there are any, calls."""
        bodies = {}
        if calls := grammar.text if grammar.kind == "calls" else grammar.calls:
            bodies["calls"] = self._calls(calls)
        if grammar.kind != "calls":
            bodies["text"] = _FORMS[grammar.kind](grammar.text)
        parts = [body | {"name": name} for name, body in bodies.items()]
        if len(parts) > 1 or grammar.after or grammar.lead:
            rules = _Rules(self._vocabulary.special_ids)
            lead = rules.literal(grammar.lead)
            head = f"{rules.literal(grammar.before)} {rules.text_before(grammar.after)}" if grammar.after else ""
            head = f"({head})?" if grammar.before else head
            names = (f"{lead if name == 'text' else ''} @{name}" for name in bodies)
            parts.insert(0, rules.body(f"{head} ({' | '.join(names)})") | {"name": "head"})
        return json.dumps({"grammars": parts})

    def _calls(self, text: str) -> _Body:
        calls = msgspec.json.decode(text, type=ToolCalls)
        rules = _Rules(self._vocabulary.special_ids, calls.markers)
        begin, between, end = (rules.literal(t or "") for t in (calls.begin, calls.between, calls.end))
        names = []
        for before, arguments, after in calls.calls:
            value = _json(arguments) if isinstance(arguments, dict) else rules.items(arguments, calls.comma)
            names.append(rules.rule(f"{rules.literal(before)} {value} {rules.literal(after)}"))
        call = rules.rule(" | ".join(names))
        return rules.body(f"{begin} {call} {'' if calls.between is None else f'({between} {call})*'} {end}")


class _Rules:
    """Writes rules in Lark's notation, with special tokens as tokens.

    `markers` are the texts that may be special tokens, and no part of free text; None: all special tokens.
    """

    def __init__(self, special_ids: Mapping[str, int], markers: Sequence[str] | None = None) -> None:
        self._ids = {m: special_ids[m] for m in (special_ids if markers is None else markers) if m in special_ids}
        self._texts = [m for m in markers or () if m not in self._ids]
        self._rules: list[str] = []
        self._befores: dict[str, str] = {}  # the texts before each end

    def body(self, start: str) -> _Body:
        """Return the grammar that begins with `start`."""
        return _lark(f"start: {start}", *self._rules)

    def rule(self, definition: str, attributes: str = "", prefix: str = "rule") -> str:
        """Add a rule, or a terminal if `prefix` is in capitals; return its name."""
        name = f"{prefix}_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {definition}")
        return name

    def literal(self, text: str) -> str:
        """Return `text` in Lark's notation.

        It is cut as the library cuts JSON, since it cannot tell alternatives apart in the middle of a literal.
        """
        patterns = {NUMBER: "/[0-9]+/", KEY: r"/[\w.-]+/"} | {marker: f"<[{i}]>" for marker, i in self._ids.items()}
        parts = re.split(f"({'|'.join(map(re.escape, patterns))})", text)
        words = [[patterns[p]] if p in patterns else map(json.dumps, _JSON_TOKENS.findall(p)) for p in parts]
        return " ".join(itertools.chain(*words))

    def text_before(self, end: str) -> str:
        """Return any text up to the first `end`, and that. `end` may begin with a special token, which no text has."""
        if end in self._befores:
            return self._befores[end]
        token = next((marker for marker in self._ids if end.startswith(marker)), None)
        others = {token or end, *self._texts} - {end if token is None else ""}
        without = " | ".join(map(json.dumps, sorted(others)))
        text = self.rule(f"{ANYTHING} & ~({ANYTHING} ({without}) {ANYTHING})" if without else ANYTHING, prefix="TEXT")
        is_token = token is not None
        self._befores[end] = (
            f"{text} {self.literal(end)}" if is_token else self.rule(text, f"[suffix={json.dumps(end)}]")
        )
        return self._befores[end]

    def items(self, items: Sequence[CallItem], comma: str) -> str:
        """Return the arguments of a call one by one. With a `comma`, those that may be missing are last."""
        names, between = [self._item(item) for item in items], self.literal(comma)
        if any(item.count == "*" for item in items):
            either = f"({' | '.join(names)})"
            return f"({either} ({between} {either})*)?"
        if not comma:
            return " ".join(f"{name}{item.count}" for name, item in zip(names, items, strict=True))
        more = [f"({between} {name}){item.count}" for name, item in zip(names, items, strict=True)]
        firsts = [" ".join([name, *more[i + 1 :]]) for i, name in enumerate(names)]
        if items and not items[0].count:
            return firsts[0]
        return f"({' | '.join(firsts)})?" if firsts else ""

    def _item(self, item: CallItem) -> str:
        before = self.literal(item.before)
        if item.value is None:
            tag, bracket, rest = item.after.lstrip().partition(">")
            return self.rule(f"{before} {self.text_before(tag + bracket)} {self.literal(rest)}")
        value = _json(item.value) if isinstance(item.value, dict) else " | ".join(map(self.literal, item.value))
        return self.rule(f"{before} ({value}) {self.literal(item.after)}")


class TokenMatcher:
    """The state of one request in its grammar.

    mask         int32 [ceil(V / 32)], bit i of word w: token 32 w + i may come next
    is_stale     the mask is that of an earlier token
    is_complete  the text is complete: only an EOS may follow
    error        why the grammar can no longer be followed
    """

    def __init__(
        self, grammar: Grammar, matcher: LLMatcher, vocab_size: int, eos_ids: list[int], may_end: bool
    ) -> None:
        """Raise `RequestError` if no token can begin the `grammar`."""
        self.matcher = matcher
        self._grammar = grammar
        self._ends = np.zeros(ceil_div(vocab_size, 32), np.uint32)
        for token in eos_ids:
            self._ends[token // 32] |= np.uint32(1 << token % 32)
        self._eos_ids = eos_ids
        self._may_end = may_end
        self.mask: Ints = np.zeros(len(self._ends), np.int32)
        self.is_stale = False
        self.is_complete = False
        self.error: RequestError | None = None
        self._ahead: list[tuple[int, Ints, bool]] = []  # drafts, with `mask` and `is_complete` after each
        self._overdraft = 0.0  # seconds by which masks have exceeded MASK_S each
        matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)  # builds tables, off the engine's loop
        self.set_mask(self.mask)
        if self.error is not None:
            raise self.error
        if self.is_complete:
            raise refusal(grammar, "it allows nothing but the empty text")

    def advance(self, token: int) -> None:
        """Append a sampled `token`, which is not an EOS. Unless it was a draft, the mask must be computed again."""
        self.matcher.consume_token(token)  # an error shows when the mask is computed
        self.is_stale = not self._ahead or self._ahead[0][0] != token
        if self.is_stale:
            self._ahead = []
        else:
            _, self.mask, self.is_complete = self._ahead.pop(0)

    def forced(self) -> Ints:
        """Return the tokens of the text that must come next, as the tokenizer encodes it; maybe none."""
        return np.array(self.matcher.compute_ff_tokens(), np.int32)

    def count_allowed(self, tokens: Ints) -> int:
        """Return how many of `tokens` may come next, up to the first EOS."""
        ends = np.flatnonzero(np.isin(tokens, self._eos_ids))
        count: int = self.matcher.validate_tokens(tokens[: ends[0] if len(ends) else None].tolist())
        return count

    def along(self, drafts: Ints) -> list[Ints]:
        """Return the mask after each of `drafts`; after a draft that is not allowed, any mask.

        A copy of the matcher follows them, since a rejected draft must cause no error.
        """
        probe = self.matcher.deep_copy()
        self._ahead = []
        for token in drafts.tolist():
            if token in self._eos_ids or not probe.consume_token(token):
                break
            mask = np.zeros_like(self.mask)
            probe.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if probe.is_error():
                break
            self._ahead.append((token, mask, self._finish(probe, mask)))
        masks = [mask for _, mask, _ in self._ahead]
        return masks + [self.mask] * (len(drafts) - len(masks))

    def compute_mask(self, mask: Ints) -> None:
        """Compute the tokens that may come next into `mask`, or set `error`."""
        start = time.thread_time()
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._overdraft = max(0.0, self._overdraft + time.thread_time() - start - MASK_S)
        self.set_mask(mask)

    def set_mask(self, mask: Ints) -> None:
        """Use the computed `mask`, with the EOS tokens that are allowed now."""
        if self.matcher.is_error():
            self.error = refusal(self._grammar, f"it cannot be followed: {self.matcher.get_error()}")
            return
        if self._overdraft > MASK_BURST_S:
            self.error = refusal(self._grammar, f"its masks take more than {MASK_S * 1e3:g} ms a token")
            return
        self.mask, self.is_complete = mask, self._finish(self.matcher, mask)
        self.is_stale = False

    def _finish(self, matcher: LLMatcher, mask: Ints) -> bool:
        """Allow the EOS tokens in `mask` if the text may end here; return whether only an EOS may follow."""
        bits = mask.view(np.uint32)
        bits &= ~self._ends
        is_complete = not bits.any()
        if self._may_end and matcher.is_accepting():
            bits |= self._ends
        return is_complete


def _lark(*rules: str) -> _Body:
    return {"lark_grammar": "\n".join(rules)}


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps(_schema(schema))}"


def _schema(schema: Any) -> dict[str, Any]:
    return exact_schema(schema) | {"x-guidance": JSON_STYLE}


def _ebnf(text: str) -> _Body:
    """Return a grammar in Lark's notation, translated if it is in GBNF."""
    text = text.removeprefix("\ufeff")
    if is_gbnf(text):
        return _lark(gbnf_to_lark(text))
    return _lark(_LARK_PRIORITY.sub(r"\1", _LARK_BLANK.sub("", text)))


_FORMS: Final[dict[str, Callable[[str], _Body]]] = {
    "json_schema": lambda text: {"json_schema": _schema(msgspec.json.decode(text))},
    "regex": lambda text: json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0],
    "choice": lambda text: _lark("start: " + " | ".join(map(json.dumps, json.loads(text)))),
    "ebnf": _ebnf,
}


def refusal(grammar: Grammar, error: str) -> RequestError:
    """Return the error for an invalid grammar; the library's `error` may have several lines."""
    cause = " ".join(error.split())[:MAX_ERROR_CHARS] or "unknown error"
    return RequestError(f"{grammar.param} is not a usable grammar: {cause}", param=grammar.param, code=INVALID)
