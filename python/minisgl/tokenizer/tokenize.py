"""Turns requests into token ids. The worker process and the offline `LLM` use it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from minisgl.checkpoint import hf
from minisgl.checkpoint.embedder import read_embedder
from minisgl.core.errors import ConfigError, RequestError, is_unicode
from minisgl.core.message import DecodeMsg, EncodeMsg, TokenizeMsg, ids_from_bytes
from minisgl.core.params import Limits, SamplingParams, too_long, validate_prompt
from minisgl.tokenizer.folder import load_tokenizer
from minisgl.tokenizer.template import ChatTemplate

if TYPE_CHECKING:
    from minisgl.core.plan import Ints

EXACT_CHARS: Final = 256 * 1024  # up to this length, the tokens of a prompt that is too long are counted exactly
PIECE_CHARS: Final = 64 * 1024
CUT_TOKENS: Final = 16
MAX_HEADS: Final = 16  # system prompts whose tokens are kept
MAX_CONTEXTS: Final = 4  # the limit of a text that is only tokenized


def model_limits(folder: Path, max_seq_len: int | None = None) -> Limits:
    """Return the limits of requests to the model in `folder`."""
    config = hf.load_config(folder)
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ConfigError(f"{folder / 'config.json'} has vocab_size={vocab_size!r}")
    embeds = read_embedder(folder) is not None
    return Limits(max_model_len=max_seq_len or hf.max_model_len(config), vocab_size=vocab_size, embeds=embeds)


class TokenizeManager:
    """The tokenizer and chat template of one model."""

    def __init__(self, folder: Path, limits: Limits | None = None, template: ChatTemplate | None = None) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.limits = limits or model_limits(folder)
        self.template = template or ChatTemplate.of_folder(folder)
        longest = max((len(token.encode()) for token in self.tokenizer.get_vocab()), default=1)
        self._last: tuple[TokenizeMsg, Ints] | None = None  # the newest prompt: choices of a request repeat it
        self._heads: dict[str, Ints] = {}
        self._max_chars = self.limits.max_model_len * longest  # longer texts cannot fit

    def tokenize(self, msg: TokenizeMsg) -> Ints:
        """Return the prompt's token ids, int32 [n]. Raises `RequestError` for a prompt that cannot be served.

        A plain prompt gets the tokenizer's special tokens (such as BOS); a chat template adds its own.
        """
        prompt = msgspec.structs.replace(msg, uid=0, sampling_params=SamplingParams())
        if self._last is None or self._last[0] != prompt:
            self._last = prompt, self._prompt_ids(prompt)
        ids = self._last[1]
        validate_prompt(ids, self.limits)
        return ids

    def system_tokens(self, msg: TokenizeMsg, ids: Ints) -> int:
        """Return how many of a prompt's tokens `ids` are its system prompt with its tools.

        0 if there is none, or the scheduler takes no snapshots: only they need the position.
        """
        if not self.limits.has_snapshots:
            return 0
        messages = msg.messages or []
        head = list(itertools.takewhile(lambda m: m.get("role") in ("system", "developer"), messages))
        if len(head) == len(messages) or not (head or msg.tools):
            return 0
        key = repr((head, msg.tools, msg.template_kwargs))
        if key not in self._heads:
            if len(self._heads) == MAX_HEADS:
                del self._heads[next(iter(self._heads))]
            opened = [*head, {"role": "user", "content": ""}]
            try:
                text = self._render(msgspec.structs.replace(msg, messages=opened, continue_final_message=True))
                self._heads[key] = self._encode(text, add_special_tokens=False)
            except RequestError:  # the template wants more, or drops such a message
                self._heads[key] = ids[:0]
        known = self._heads[key][: len(ids)]
        return int(np.logical_and.accumulate(ids[: len(known)] == known).sum())

    def _prompt_ids(self, msg: TokenizeMsg) -> Ints:
        if msg.input_ids is not None:
            return ids_from_bytes(msg.input_ids)
        if msg.messages is not None:
            return self._encode(self._render(msg), add_special_tokens=False)
        if msg.text is not None:
            return self._encode(msg.text, add_special_tokens=msg.add_special_tokens)
        raise RequestError("the request has no prompt", param="prompt")

    def encode(self, msg: EncodeMsg) -> Ints:
        """Return the token ids, int32 [n], of a prompt that may exceed the context. Raises `RequestError`."""
        is_chat = msg.prompt.messages is not None
        text = self._render(msg.prompt) if is_chat else msg.prompt.text or ""
        add = not is_chat if msg.add_special_tokens is None else msg.add_special_tokens
        return self._encode(text, add_special_tokens=add, contexts=MAX_CONTEXTS)

    def decode(self, msg: DecodeMsg) -> str:
        """Return the text of tokens, with U+FFFD for invalid UTF-8. Raises `RequestError` for too many tokens."""
        ids = ids_from_bytes(msg.input_ids)
        if len(ids) > self.limits.max_model_len:
            raise RequestError(f"tokens has {len(ids)} ids; the limit is {self.limits.max_model_len}", param="tokens")
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=msg.skip_special_tokens)

    def _render(self, msg: TokenizeMsg) -> str:
        assert msg.messages is not None
        return self.template.render(
            msg.messages,
            msg.tools,
            msg.template_kwargs,
            add_generation_prompt=msg.add_generation_prompt,
            continue_final_message=msg.continue_final_message,
        )

    def _encode(self, text: str, add_special_tokens: bool, contexts: int = 1) -> Ints:
        if len(text) > self._max_chars:
            raise too_long(self.limits, f"{len(text)} characters")
        if not is_unicode(text):
            raise RequestError("the prompt is not text in UTF-8: it has a lone surrogate", param="prompt")
        if len(text) > EXACT_CHARS:
            self._require_plausible(text, contexts * self.limits.max_model_len)
        # The batch call without offsets is the fast path of the tokenizers library.
        encoding = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return np.array(encoding.ids, dtype=np.int32)

    def _require_plausible(self, text: str, limit: int) -> None:
        """Raise `RequestError` as soon as pieces of a long `text` have more than `limit` tokens.

        So the work depends on the context length, not on the text. Cuts may add some tokens, which are not counted.
        """
        count = 0
        for start in range(0, len(text), PIECE_CHARS):
            piece = self.tokenizer.encode_batch_fast([text[start : start + PIECE_CHARS]], add_special_tokens=False)[0]
            count += max(0, len(piece.ids) - CUT_TOKENS)
            if count > limit:
                raise too_long(self.limits, f"at least {count} tokens in {len(text)} characters")
