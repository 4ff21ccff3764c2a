"""`LLM`: prompts in, completions out, through the same scheduler as the server's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from minisgl.config import SchedulerConfig, build_config
from minisgl.core import FinishReason
from minisgl.message import (
    AbortBackendMsg,
    DetokenizeMsg,
    TokenizeMsg,
    UserMsg,
    UserReply,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.params import SamplingParams
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.scheduler import Scheduler
from minisgl.tokenizer.detokenize import DetokenizeManager
from minisgl.tokenizer.tokenize import TokenizeManager
from minisgl.utils.errors import InvariantError, RequestError
from minisgl.utils.hf import resolve_model

Prompt = str | Sequence[int]
Message = dict[str, Any]


@dataclass(slots=True)
class Completion:
    """One finished request. `text` has no stop string and no special tokens; `token_ids` has every generated token."""

    prompt_tokens: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0


class LLM:
    """Owns a scheduler and steps it until its requests are done.

    `options` are the fields of `SchedulerConfig` and `EngineConfig`, e.g. `LLM(model, page_size=1, dtype="bfloat16")`.
    Raises `ConfigError` for settings that cannot work.
    """

    def __init__(self, model: str = "", **options: Any) -> None:
        config = build_config(SchedulerConfig, {"model": model, **options})
        folder: Path = resolve_model(model)
        self._tokenizer = TokenizeManager(folder)
        self._detokenizer = DetokenizeManager(self._tokenizer.tokenizer)
        self._io = OfflineIO()
        self.scheduler = Scheduler.from_config(config, self._io)
        self._next_uid = 0
        self._has_failed = False

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
        batch: list[Prompt]
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer))):
            batch = [prompts]  # type: ignore[list-item]
        else:
            batch = list(prompts)  # type: ignore[arg-type]
        return self._run([self._prompt_msg(p) for p in batch], sampling_params, on_token)

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
            raise InvariantError("the engine failed in an earlier call; make a new LLM")
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(messages)
        else:
            params = list(sampling_params)
        if len(params) != len(messages):
            raise RequestError(f"{len(messages)} prompts, {len(params)} sampling parameters", param="sampling_params")
        ids = [self._tokenizer.tokenize(m) for m in messages]
        users = [
            UserMsg(self._next_uid + i, ids_to_bytes(x), p) for i, (x, p) in enumerate(zip(ids, params, strict=True))
        ]
        for user in users:
            self.scheduler.check_request(user)
        first = self._next_uid
        self._next_uid += len(users)
        completions = [Completion(len(x)) for x in ids]
        waiting = iter(users)
        pending = len(users)
        try:
            while pending:
                # The queue has a limit, a list of prompts has none: feed it as it empties.
                room = self.scheduler.max_queued - len(self.scheduler.prefill.waiting)
                self._io.inbox.extend(user for _, user in zip(range(room), waiting, strict=False))
                self._step()
                for reply in self._replies(completions, first):
                    pending -= reply.finish_reason is not None
                    if on_token is not None and reply.text:
                        on_token(reply.uid - first, reply.text)
        except BaseException:  # an error, or Ctrl-C: leave nothing running
            self._io.inbox.extend(AbortBackendMsg(user.uid) for user in users)
            raise
        finally:
            self._settle()
        return completions

    def _replies(self, completions: list[Completion], first: int) -> list[UserReply]:
        """Take what the last step said; fills in the completions."""
        replies: list[UserReply] = []
        while self._io.outbox:
            msg: DetokenizeMsg = self._io.outbox.popleft()
            uids = np.frombuffer(msg.uids, "<i8").tolist()
            for uid, token in zip(uids, ids_from_bytes(msg.tokens).tolist(), strict=True):
                if completions[uid - first].finish_reason is None:
                    completions[uid - first].token_ids.append(token)
            new, aborts = self._detokenizer.detokenize(msg)
            self._io.inbox.extend(AbortBackendMsg(uid) for uid in aborts)
            replies += new
        for reply in replies:
            done = completions[reply.uid - first]
            done.text += reply.text
            done.cached_tokens = reply.cached_tokens or done.cached_tokens
            if reply.finish_reason is FinishReason.ERROR:
                raise RequestError(reply.error, param=reply.param, code=reply.code, status=reply.status)
            if reply.finish_reason is not None:
                done.finish_reason = reply.finish_reason
                del done.token_ids[reply.completion_tokens :]  # computed beyond a stop string
        return replies

    def _step(self) -> None:
        try:
            self.scheduler.step()
        except BaseException:
            self._has_failed = True  # half a step was done: nothing that comes after can be trusted
            raise

    def _settle(self) -> None:
        """Step until what was aborted (also by a stop string) has given its pages back."""
        while not self._has_failed and (self.scheduler.is_busy or self._io.inbox):
            self._step()
        while self._io.outbox:
            self._detokenizer.detokenize(self._io.outbox.popleft())
