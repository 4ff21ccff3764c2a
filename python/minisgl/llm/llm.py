"""`LLM`: prompts in, completions out, through the same scheduler as the server's."""

from __future__ import annotations

import contextlib
import itertools
import struct
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl.checkpoint.embedder import read_embedder
from minisgl.checkpoint.hf import resolve_model
from minisgl.errors import ConfigError, InvariantError, RequestError
from minisgl.llm.completions import Completion, Completions, Request
from minisgl.llm.ranks import running_ranks
from minisgl.message import AbortMsg, TokenizeMsg, UserMsg, ids_to_bytes
from minisgl.params import EMBED, SamplingParams, choice_params, validate_sampling
from minisgl.process.log import Progress
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.scheduler import Scheduler
from minisgl.settings.options import SchedulerConfig, build_config
from minisgl.settings.sources import as_written
from minisgl.tokenizer.detokenize import DetokenizeManager
from minisgl.tokenizer.template import ChatTemplate
from minisgl.tokenizer.tokenize import TokenizeManager, model_limits

Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | Mapping[str, Any]
Message = dict[str, Any]


# A batch job has no streams whose pace matters, so steps as large as the token budget finish it soonest. Its queue has
# no limits.
BATCH: Final = {"itl_target_ms": 0.0, "max_queue_time": 1e6, "max_queued_tokens": 1 << 62}


class LLM:
    """Owns a scheduler, and runs its steps until all requests are done.

    `options` are those of `minisgl generate --help`, such as `LLM(model, page_size=1, dtype="bfloat16", tp_size=2)`.
    Raises `ConfigError` for settings that cannot work.

    With `tp` above 1, the other ranks are child processes (`followers`), which end with this object or with `close()`.
    """

    def __init__(self, model: str = "", **options: Any) -> None:
        try:
            self._start({"model": model, **options} if model else options)
        except ConfigError as e:
            raise ConfigError(as_written(str(e), ((name, f"{name}=") for name in options))) from e

    def _start(self, given: Mapping[str, Any]) -> None:
        config = build_config(SchedulerConfig, {**BATCH, **given})
        engine = config.engine
        folder = resolve_model(engine.model, engine.download_source, weights=False, revision=engine.revision)
        template = ChatTemplate.of_folder(folder, engine.load_chat_template(), engine.template_kwargs)
        self.tokenizer = TokenizeManager(folder, model_limits(folder, engine.max_seq_len), template)
        self.detokenizer = DetokenizeManager(self.tokenizer.tokenizer)
        self._embedder = read_embedder(folder)
        with contextlib.ExitStack() as stack:
            ranks = stack.enter_context(running_ranks(config))
            self._io = OfflineIO()
            self.scheduler = ranks.start(lambda: Scheduler.from_config(config, self._io, ranks.group))
            stack.callback(self.scheduler.engine.shutdown)
            stack.callback(ranks.group.bus.close)  # called earlier: some collectives end only when all ranks leave
            stack.callback(self.scheduler.save)
            self.followers = ranks.followers
            self._close = weakref.finalize(self, stack.pop_all().close)
        self._uids = itertools.count()
        self._has_failed = False

    def close(self) -> None:
        """End the engine and the other ranks. Afterwards nothing can be generated."""
        self._has_failed = True
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        on_token: Callable[[int, str], None] | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Complete each prompt (text, token ids, or vLLM's mappings). Results are in the order of the prompts.

        `on_token(index, text)` is called with each increment of the text of a choice. With `SamplingParams(n=...)`, the
        choices of a prompt are adjacent. `use_tqdm` shows the progress on a terminal, if the call takes longer than a
        second. Raises `RequestError` for an invalid prompt or parameter, before any request is computed.
        """
        return self._run(prompt_messages(prompts), sampling_params, on_token, use_tqdm)

    def embed(self, prompts: Prompt | Sequence[Prompt], dimensions: int | None = None) -> npt.NDArray[np.float32]:
        """Return the embedding of each prompt (text or token ids), float32 [n, H] or [n, dimensions].

        Raises `RequestError` if the model generates text, and for an invalid prompt or number of dimensions.
        """
        messages = prompt_messages(prompts)
        if self._embedder is None:
            raise RequestError("this model generates text; it does not compute embeddings", code="unsupported_endpoint")
        length = self._embedder.length(dimensions)
        vectors = [self._embedder.vector(done.embedding, length) for done in self._run(messages, EMBED)]
        return np.stack(vectors) if vectors else np.empty((0, length), np.float32)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        on_token: Callable[[int, str], None] | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Generate the assistant's next message for one or more conversations of {"role", "content"} messages."""
        messages = chat_messages(conversations, tools=tools, template_kwargs=chat_template_kwargs or {})
        return self._run(messages, sampling_params, on_token, use_tqdm)

    def get_tokenizer(self) -> TextTokenizer:
        """The model's tokenizer and chat template."""
        return TextTokenizer(self.tokenizer)

    def prepare(
        self, messages: Sequence[TokenizeMsg], sampling_params: Params | Sequence[Params] | None
    ) -> list[Request]:
        """Validate and tokenize prompts, and assign uids. Raises `RequestError` before any request is computed."""
        if sampling_params is None or isinstance(sampling_params, SamplingParams | Mapping):
            params = [_sampling_params(sampling_params or SamplingParams())] * len(messages)
        else:
            params = [_sampling_params(p) for p in sampling_params]
        if len(params) != len(messages):
            raise RequestError(f"{len(messages)} prompts, {len(params)} sampling parameters", param="sampling_params")
        for p in params:
            validate_sampling(p, self.tokenizer.limits)
        ids = [
            self.tokenizer.tokenize(msgspec.structs.replace(m, sampling_params=p))
            for m, p in zip(messages, params, strict=True)
        ]
        for x, p in zip(ids, params, strict=True):
            self.scheduler.admission.output_budget(len(x), p)
        requests = []
        for m, x, p in zip(messages, ids, params, strict=True):
            choices = [choice_params(p, i) for i in range(p.n)]
            users = [UserMsg(uid=next(self._uids), input_ids=ids_to_bytes(x), sampling_params=c) for c in choices]
            requests.append(Request(users, m.text))
        return requests

    def _run(
        self,
        messages: list[TokenizeMsg],
        sampling_params: Params | Sequence[Params] | None,
        on_token: Callable[[int, str], None] | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        self.require_working()
        requests = self.prepare(messages, sampling_params)
        progress = Progress("generate", "requests", is_shown=use_tqdm and sys.stderr.isatty())
        completions = Completions(self.detokenizer, requests, on_token)
        total = completions.pending
        try:
            while completions.pending:
                self.advance(completions)
                progress.update(total - completions.pending, total)
        except BaseException:  # an error or Ctrl-C: abort the running requests
            self.abort(user.uid for request in requests for user in request.users)
            raise
        finally:
            self._settle(completions)
        done = iter(completions.finish())
        return [_with_others(next(done), [next(done) for _ in request.users[1:]]) for request in requests]

    def require_working(self) -> None:
        """Raise `InvariantError` after an error of the engine or after `close`."""
        if self._has_failed:
            raise InvariantError("the engine was closed, or failed in an earlier call; make a new LLM")

    def advance(self, completions: Completions) -> None:
        """Send waiting requests while the queue has capacity, compute one step, and process its replies."""
        # The queue has a limit, but a list of prompts has none.
        free = self.scheduler.admission.max_queued - self.scheduler.num_queued
        while completions.waiting and free > 0:
            self._io.inbox.append(completions.waiting.popleft())
            free -= 1
        self._step()
        while self._io.replies:
            self.abort(completions.take(self._io.replies.popleft()))

    def abort(self, uids: Iterable[int]) -> None:
        """Abort requests; they end with the next step."""
        self._io.inbox.extend(AbortMsg(uid) for uid in uids)

    @property
    def is_busy(self) -> bool:
        """Whether requests are running, or pages are still to be freed."""
        return not self._has_failed and (self.scheduler.is_busy or bool(self._io.inbox))

    def _step(self) -> None:
        try:
            self.scheduler.step()
        except BaseException:
            self._has_failed = True  # the step was not completed: the state is undefined
            raise

    def _settle(self, completions: Completions) -> None:
        """Run steps until aborted requests, including those that a stop string has ended, have freed their pages."""
        while self.is_busy:
            self._step()
        while self._io.replies:
            completions.drop(self._io.replies.popleft())


class TextTokenizer:
    """A model's tokenizer, with the most used methods of transformers' tokenizers. `core` has all others."""

    def __init__(self, manager: TokenizeManager) -> None:
        self.core = manager.tokenizer
        self._template = manager.template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.core.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self.core.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str | list[int]:
        """Return the conversation as token ids or text. Raises `RequestError` if the template refuses it."""
        text = self._template.render(list(conversation), tools, variables, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False) if tokenize else text


def prompt_messages(prompts: Prompt | Sequence[Prompt]) -> list[TokenizeMsg]:
    """Return a message for each of one or more prompts. Raises `RequestError` for other than text or token ids."""
    is_one = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))
    return [_prompt_message(p) for p in ([prompts] if is_one else prompts)]  # type: ignore[arg-type]


def _prompt_message(prompt: Prompt) -> TokenizeMsg:
    if isinstance(prompt, Mapping):  # vLLM's
        prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt", ())
    if isinstance(prompt, str):
        return TokenizeMsg(uid=0, sampling_params=SamplingParams(), text=prompt)
    try:
        return TokenizeMsg(uid=0, sampling_params=SamplingParams(), input_ids=ids_to_bytes(prompt))  # type: ignore[arg-type]
    except (struct.error, TypeError) as e:
        raise RequestError(f"a prompt must be text or token ids: {e}", param="prompt") from e


def chat_messages(conversations: Sequence[Message] | Sequence[Sequence[Message]], **fields: Any) -> list[TokenizeMsg]:
    """Return a message for each of one or more conversations. `fields` are those of `TokenizeMsg`."""
    many = [conversations] if conversations and isinstance(conversations[0], dict) else list(conversations)
    template = TokenizeMsg(uid=0, sampling_params=SamplingParams(), **fields)
    return [msgspec.structs.replace(template, messages=list(c)) for c in many]


def _sampling_params(given: Params) -> SamplingParams:
    """Return `SamplingParams`, also from a mapping, as in SGLang. Raises `RequestError` for anything else."""
    if isinstance(given, SamplingParams):
        return given
    if not isinstance(given, Mapping):
        raise RequestError("give a SamplingParams, or one for each prompt", param="sampling_params")
    try:
        return SamplingParams(**{"max_tokens" if name == "max_new_tokens" else name: v for name, v in given.items()})
    except TypeError as e:
        raise RequestError(f"sampling_params: {e}", param="sampling_params") from None


def _with_others(first: Completion, others: list[Completion]) -> Completion:
    first.others = others
    return first
