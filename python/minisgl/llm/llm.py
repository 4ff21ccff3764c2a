"""`LLM`: prompts in, completions out, through the same scheduler as the server's."""

from __future__ import annotations

import contextlib
import itertools
import struct
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl.checkpoint.embedder import read_embedder
from minisgl.checkpoint.hf import resolve_model
from minisgl.errors import InvariantError, RequestError
from minisgl.llm.completions import Completion, Completions
from minisgl.llm.ranks import running_ranks
from minisgl.message import AbortMsg, TokenizeMsg, UserMsg, ids_to_bytes
from minisgl.params import EMBED, SamplingParams, validate_sampling
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.scheduler import Scheduler
from minisgl.settings.options import SchedulerConfig, build_config
from minisgl.tokenizer.detokenize import DetokenizeManager
from minisgl.tokenizer.tokenize import TokenizeManager

Prompt = str | Sequence[int]
Message = dict[str, Any]


# In a batch job no stream has a pace to keep: steps as large as the token budget finish it soonest. Its queue may be as
# long as the job.
BATCH: Final = {"itl_target_ms": 0.0, "max_queue_time": 1e6, "max_queued_tokens": 1 << 62}


class LLM:
    """Owns a scheduler and steps it until its requests are done.

    `options` are those of `minisgl generate --help`, e.g. `LLM(model, page_size=1, dtype="bfloat16", tp_size=2)`.
    Raises `ConfigError` for settings that cannot work.

    With `tp` above 1 the other ranks are child processes (`followers`), which end with this object or at `close()`.
    They are spawned, so such a script needs the usual `if __name__ == "__main__":`.
    """

    def __init__(self, model: str = "", **options: Any) -> None:
        given = {"model": model, **options} if model else options
        config = build_config(SchedulerConfig, {**BATCH, **given})
        folder: Path = resolve_model(config.engine.model, config.engine.download_source, weights=False)
        self._tokenizer = TokenizeManager(folder)
        self._embedder = read_embedder(folder)
        self._detokenizer = DetokenizeManager(self._tokenizer.tokenizer)
        with contextlib.ExitStack() as stack:
            ranks = stack.enter_context(running_ranks(config))
            self._io = OfflineIO()
            self.scheduler = ranks.start(lambda: Scheduler.from_config(config, self._io, ranks.group))
            stack.callback(self.scheduler.engine.shutdown)
            stack.callback(ranks.group.bus.close)  # called first: some collectives end only when all ranks leave
            self.followers = ranks.followers
            self._close = weakref.finalize(self, stack.pop_all().close)
        self._next_uid = 0
        self._has_failed = False

    def close(self) -> None:
        """End the other ranks, if there are any; afterwards nothing can be generated."""
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
        """Complete each prompt (text or token ids); results are in the order of the prompts.

        `on_token(index, text)` is called with each increment of a prompt's text. Raises `RequestError` for a prompt or
        parameter that cannot be served, before any request is computed.
        """
        return self._run(self._prompt_msgs(prompts), sampling_params, on_token)

    def embed(self, prompts: Prompt | Sequence[Prompt], dimensions: int | None = None) -> npt.NDArray[np.float32]:
        """Return the embedding of each prompt (text or token ids), [n, H] or [n, dimensions].

        Raises `RequestError` if the model generates text, or for a prompt or `dimensions` out of its range.
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
        """Generate the assistant's next message for one or more conversations of {"role", "content"} messages."""
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
        try:
            return TokenizeMsg(uid=0, sampling_params=SamplingParams(), input_ids=ids_to_bytes(prompt))
        except (struct.error, TypeError) as e:
            raise RequestError(f"a prompt must be text or token ids: {e}", param="prompt") from e

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
        if not all(isinstance(p, SamplingParams) for p in params):
            raise RequestError("give a SamplingParams, or one for each prompt", param="sampling_params")
        if len(params) != len(messages):
            raise RequestError(f"{len(messages)} prompts, {len(params)} sampling parameters", param="sampling_params")
        for p in params:
            validate_sampling(p, self._tokenizer.limits)
        messages = [msgspec.structs.replace(m, sampling_params=p) for m, p in zip(messages, params, strict=True)]
        ids = [self._tokenizer.tokenize(m) for m in messages]
        users = [
            UserMsg(uid=self._next_uid + i, input_ids=ids_to_bytes(x), sampling_params=p)
            for i, (x, p) in enumerate(zip(ids, params, strict=True))
        ]
        for x, p in zip(ids, params, strict=True):
            self.scheduler.admission.output_budget(len(x), p)
        self._next_uid += len(users)
        completions = Completions(self._detokenizer, users, on_token)
        waiting = iter(users)
        try:
            while completions.pending:
                # The queue has a limit, a list of prompts has none: fill the queue as it empties.
                free = self.scheduler.admission.max_queued - self.scheduler.num_queued
                self._io.inbox.extend(itertools.islice(waiting, max(0, free)))
                self._step()
                while self._io.replies:
                    stopped = completions.take(self._io.replies.popleft())
                    self._io.inbox.extend(AbortMsg(uid) for uid in stopped)
        except BaseException:  # an error, or Ctrl-C: abort what is running
            self._io.inbox.extend(AbortMsg(user.uid) for user in users)
            raise
        finally:
            self._settle(completions)
        return completions.finish()

    def _step(self) -> None:
        try:
            self.scheduler.step()
        except BaseException:
            self._has_failed = True  # half a step was done: the state is not to be trusted any more
            raise

    def _settle(self, completions: Completions) -> None:
        """Step until aborted requests (a stop string aborts, too) have given their pages back."""
        while not self._has_failed and (self.scheduler.is_busy or self._io.inbox):
            self._step()
        while self._io.replies:
            completions.drop(self._io.replies.popleft())
