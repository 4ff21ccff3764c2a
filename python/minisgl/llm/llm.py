"""`LLM`: prompts in, completions out, through the same scheduler as the server's."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl.config import SchedulerConfig, build_config
from minisgl.core import FinishReason
from minisgl.llm.ranks import running_ranks
from minisgl.message import (
    AbortBackendMsg,
    DetokenizeMsg,
    TokenizeMsg,
    TokenLogprob,
    UserMsg,
    UserReply,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.params import EMBED, SamplingParams
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.scheduler import Scheduler
from minisgl.tokenizer.detokenize import DetokenizeManager
from minisgl.tokenizer.tokenize import TokenizeManager
from minisgl.utils.embedder import read_embedder
from minisgl.utils.errors import InvariantError, RequestError
from minisgl.utils.hf import resolve_model

Prompt = str | Sequence[int]
Message = dict[str, Any]


@dataclass(slots=True)
class Completion:
    """One finished request. `text` has no stop string and no special tokens; `token_ids` has every generated token.

    With `echo`, `text` and `logprobs` begin with the prompt's. `embedding` is what `LLM.embed` makes vectors of.
    """

    prompt_tokens: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    embedding: bytes = b""


class _Answers:
    """Makes the completions of one call out of what the scheduler says; `take` its messages, `finish` in the end.

    Where somebody listens, a stop string may end a request, or more than text is wanted, text is made as the tokens
    come. Otherwise they are only noted, and text is made of all of them in the end: a step costs next to nothing then.
    """

    def __init__(
        self,
        detokenizer: DetokenizeManager,
        users: list[UserMsg],
        on_token: Callable[[int, str], None] | None,
    ) -> None:
        self.pending = len(users)
        self._detokenizer = detokenizer
        self._params = [u.sampling_params for u in users]
        self._first = users[0].uid if users else 0  # the others' numbers follow it
        self._on_token = on_token
        self._streams = on_token is not None or any(
            p.stop or p.echo or p.embed or p.logprobs is not None for p in self._params
        )
        self._completions = [Completion(len(ids_from_bytes(u.input_ids))) for u in users]
        self._texts: list[list[str]] = [[] for _ in users]
        # Where to cut a request's tokens: those of its answer, and of these those with text. None = nowhere.
        self._answer_stop: list[int | None] = [None] * len(users)
        self._text_stop: list[int | None] = [None] * len(users)
        self._uids: list[bytes] = []
        self._tokens: list[bytes] = []

    def take(self, msg: DetokenizeMsg) -> list[int]:
        """Take in one step; returns the uids that a stop string has ended. Raises `RequestError` if one has failed."""
        self._uids.append(msg.uids)
        self._tokens.append(msg.tokens)
        if self._streams:
            replies, stopped = self._detokenizer.detokenize(msg)
            for reply in replies:
                self._hear(reply)
            return stopped
        for started in msg.started:
            self._completions[started.uid - self._first].cached_tokens = started.cached_tokens
        for end in msg.finished:
            if end.reason is FinishReason.ERROR:
                raise RequestError(end.error, param=end.param, code=end.code or None, status=end.status)
            self._completions[end.uid - self._first].finish_reason = end.reason
            self._text_stop[end.uid - self._first] = None if end.has_text else -1
        self.pending -= len(msg.finished)
        return []

    def _hear(self, reply: UserReply) -> None:
        index = reply.uid - self._first
        done = self._completions[index]
        done.cached_tokens = reply.cached_tokens or done.cached_tokens
        done.logprobs += reply.logprobs
        done.embedding += reply.embedding
        if reply.text:
            self._texts[index].append(reply.text)
            if self._on_token is not None:
                self._on_token(index, reply.text)
        if reply.finish_reason is FinishReason.ERROR:
            raise RequestError(reply.error, param=reply.param, code=reply.code, status=reply.status)
        if reply.finish_reason is not None:
            done.finish_reason = reply.finish_reason
            self._answer_stop[index] = reply.completion_tokens  # what was computed beyond a stop string is not
            self.pending -= 1

    def drop(self, msg: DetokenizeMsg) -> None:
        """Forget a message that comes after the answers were given (or given up)."""
        if self._streams:
            self._detokenizer.detokenize(msg)

    def finish(self) -> list[Completion]:
        """The completions in the order of the prompts."""
        index = np.frombuffer(b"".join(self._uids), "<i8") - self._first
        order = np.argsort(index, kind="stable")
        ends = np.cumsum(np.bincount(index, minlength=len(self._completions)))
        tokens = ids_from_bytes(b"".join(self._tokens))[order]
        for i, (done, ids) in enumerate(zip(self._completions, np.split(tokens, ends[:-1]), strict=False)):
            done.token_ids = ids[: self._answer_stop[i]].tolist()
            if not self._streams:
                skip = self._params[i].skip_special_tokens
                self._texts[i].append(self._detokenizer.decode(done.token_ids[: self._text_stop[i]], skip))
            done.text = "".join(self._texts[i])
        return self._completions


class LLM:
    """Owns a scheduler and steps it until its requests are done.

    `options` are the fields of `SchedulerConfig` and `EngineConfig`, e.g. `LLM(model, page_size=1, dtype="bfloat16")`.
    Raises `ConfigError` for settings that cannot work.

    With `tp` above 1 the other ranks are child processes (`followers`), which end with this object or at `close()`.
    They are spawned: a script that does this needs the usual `if __name__ == "__main__":`.
    """

    def __init__(self, model: str = "", **options: Any) -> None:
        # Nobody watches the pace of a stream here: unless asked to, keep none.
        config = build_config(SchedulerConfig, {"model": model, "itl_target_ms": 0.0, **options})
        folder: Path = resolve_model(model, config.engine.download_source)
        self._tokenizer = TokenizeManager(folder)
        self._embedder = read_embedder(folder)
        self._detokenizer = DetokenizeManager(self._tokenizer.tokenizer)
        with contextlib.ExitStack() as stack:
            ranks = stack.enter_context(running_ranks(config))
            self._io = OfflineIO(ranks.group.bus)
            self.scheduler = ranks.start(lambda: Scheduler.from_config(config, self._io, ranks.group))
            stack.callback(self.scheduler.engine.shutdown)
            stack.callback(ranks.group.bus.close)  # first: some collectives end only when all ranks leave
            self.followers = ranks.followers
            self._close = weakref.finalize(self, stack.pop_all().close)
        self._next_uid = 0
        self._has_failed = False

    def close(self) -> None:
        """End the other ranks, if there are any; nothing can be generated any more."""
        self._has_failed = True
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: Callable[[int, str], None] | None = None,
    ) -> list[Completion]:
        """Complete each prompt (text or token ids); results in the order of the prompts.

        `on_token(index, text)` is called with each increment of a prompt's text. Raises `RequestError` for a prompt or
        parameter that cannot be served, before anything is computed.
        """
        return self._run(self._prompt_msgs(prompts), sampling_params, on_token)

    def embed(self, prompts: Prompt | Sequence[Prompt], dimensions: int | None = None) -> npt.NDArray[np.float32]:
        """The embedding of each prompt (text or token ids), [n, H] or [n, dimensions].

        Raises `RequestError` when the model generates text, or for a prompt or `dimensions` that it cannot do.
        """
        messages = self._prompt_msgs(prompts)
        if self._embedder is None:
            raise RequestError("this model generates text; it does not compute embeddings", code="unsupported_endpoint")
        length = self._embedder.length(dimensions)
        vectors = [self._embedder.vector(done.embedding, length) for done in self._run(messages, EMBED, None)]
        return np.stack(vectors) if vectors else np.empty((0, length), np.float32)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        on_token: Callable[[int, str], None] | None = None,
    ) -> list[Completion]:
        """The assistant's next message for one or more conversations of {"role", "content"} messages."""
        many = [conversations] if conversations and isinstance(conversations[0], dict) else list(conversations)
        template = TokenizeMsg(uid=0, sampling_params=SamplingParams(), tools=tools)
        messages = [msgspec.structs.replace(template, messages=list(c)) for c in many]
        return self._run(messages, sampling_params, on_token)

    def _prompt_msgs(self, prompts: Prompt | Sequence[Prompt]) -> list[TokenizeMsg]:
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer))):
            return [self._prompt_msg(prompts)]  # type: ignore[arg-type]
        return [self._prompt_msg(p) for p in prompts]  # type: ignore[arg-type]

    def _prompt_msg(self, prompt: Prompt) -> TokenizeMsg:
        if isinstance(prompt, str):
            return TokenizeMsg(uid=0, sampling_params=SamplingParams(), text=prompt)
        return TokenizeMsg(uid=0, sampling_params=SamplingParams(), input_ids=ids_to_bytes(prompt))

    def _run(
        self,
        messages: list[TokenizeMsg],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        on_token: Callable[[int, str], None] | None,
    ) -> list[Completion]:
        if self._has_failed:
            raise InvariantError("the engine was closed, or failed in an earlier call; make a new LLM")
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(messages)
        else:
            params = list(sampling_params)
        if len(params) != len(messages):
            raise RequestError(f"{len(messages)} prompts, {len(params)} sampling parameters", param="sampling_params")
        messages = [msgspec.structs.replace(m, sampling_params=p) for m, p in zip(messages, params, strict=True)]
        ids = [self._tokenizer.tokenize(m) for m in messages]
        users = [
            UserMsg(self._next_uid + i, ids_to_bytes(x), p) for i, (x, p) in enumerate(zip(ids, params, strict=True))
        ]
        for user in users:
            self.scheduler.door.output_budget(user)
        self._next_uid += len(users)
        answers = _Answers(self._detokenizer, users, on_token)
        waiting = iter(users)
        try:
            while answers.pending:
                # The queue has a limit, a list of prompts has none: feed it as it empties.
                room = self.scheduler.door.max_queued - self.scheduler.num_queued
                self._io.inbox.extend(user for _, user in zip(range(room), waiting, strict=False))
                self._step()
                while self._io.outbox:
                    stopped = answers.take(self._io.outbox.popleft())
                    self._io.inbox.extend(AbortBackendMsg(uid) for uid in stopped)
        except BaseException:  # an error, or Ctrl-C: leave nothing running
            self._io.inbox.extend(AbortBackendMsg(user.uid) for user in users)
            raise
        finally:
            self._settle(answers)
        return answers.finish()

    def _step(self) -> None:
        try:
            self.scheduler.step()
        except BaseException:
            self._has_failed = True  # half a step was done: nothing that comes after can be trusted
            raise

    def _settle(self, answers: _Answers) -> None:
        """Step until what was aborted (also by a stop string) has given its pages back."""
        while not self._has_failed and (self.scheduler.is_busy or self._io.inbox):
            self._step()
        while self._io.outbox:
            answers.drop(self._io.outbox.popleft())
