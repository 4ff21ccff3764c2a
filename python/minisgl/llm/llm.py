"""`LLM`: prompts in, completions out, through the same scheduler as the server's."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl.api import requests as api
from minisgl.api.fields import read_body, unread_kwargs
from minisgl.api.protocol import ChatCompletionRequest
from minisgl.api.structured import json_text
from minisgl.checkpoint.adapter import adapters_of
from minisgl.checkpoint.embedder import read_embedder
from minisgl.checkpoint.hf import model_name, resolve_model
from minisgl.core.errors import ConfigError, InvariantError, RequestError, did_you_mean
from minisgl.core.message import AbortMsg, TokenizeMsg, UserMsg, ids_to_bytes
from minisgl.core.params import EMBED, Limits, SamplingParams, choice_params, validate_sampling
from minisgl.llm.completions import Completion, Completions, Listener, Piece, Request
from minisgl.llm.ranks import running_ranks
from minisgl.process.log import Progress
from minisgl.process.processes import held_interrupt
from minisgl.scheduler.create import create_scheduler
from minisgl.scheduler.io import OfflineIO
from minisgl.settings.foreign import sentence_for
from minisgl.settings.options import SchedulerConfig, build_config
from minisgl.settings.sources import as_written
from minisgl.tokenizer.detokenize import DetokenizeManager
from minisgl.tokenizer.end_tokens import EndTokens
from minisgl.tokenizer.template import ChatTemplate
from minisgl.tokenizer.tokenize import TokenizeManager, model_limits

Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | Mapping[str, Any]
Message = Mapping[str, Any]
Lora = str | Sequence[str | None] | None  # names of adapters
Method = TypeVar("Method", bound=Callable[..., Any])

logger = logging.getLogger(__name__)

# A batch job has no streams whose pace matters, so steps as large as the token budget finish it soonest. Its queue has
# no limits.
BATCH: Final = {"itl_target_ms": 0.0, "max_queue_time": 1e6, "max_queued_tokens": 1 << 62}


def explained(method: Method) -> Method:
    """Have the `TypeError` for an unknown keyword of `method` say what to write instead."""
    known = inspect.signature(method).parameters

    @functools.wraps(method)
    def call(*args: Any, **given: Any) -> Any:
        for name in given.keys() - known.keys():
            is_sampling = name in SamplingParams.__struct_fields__
            hint = f"; write SamplingParams({name}=...)" if is_sampling else did_you_mean(name, known)
            hint = f"; {advice}" if (advice := sentence_for(f"call.{name}")) else hint
            raise TypeError(f"{method.__name__} has no parameter {name!r}{hint}")
        return method(*args, **given)

    return cast(Method, call)


class LLM:
    """Owns a scheduler, and runs its steps until all requests are done.

    `options` are those of `minisgl generate --help`, such as `LLM(model, page_size=1, dtype="bfloat16", tp_size=2)`.
    Raises `ConfigError` for settings that cannot work.

    With `tp` above 1, the other ranks are child processes (`followers`), which end with this object or with `close()`.
    One call runs at a time; `AsyncLLM` runs several.
    """

    def __init__(self, model: str | os.PathLike[str] = "", **options: Any) -> None:
        try:
            self._start({"model": os.fspath(model), **options} if model else options)
        except ConfigError as e:
            raise ConfigError(as_written(str(e), ((name, f"{name}=") for name in options))) from e

    def _start(self, given: Mapping[str, Any]) -> None:
        config = build_config(SchedulerConfig, {**BATCH, **given})
        engine = config.engine
        self.adapters = {adapter.name: adapter for adapter in adapters_of(engine.lora)}
        folder = resolve_model(engine.model, engine.download_source, weights=False, revision=engine.revision)
        template = ChatTemplate.of_folder(folder, engine.load_chat_template(), engine.template_kwargs)
        self.tokenizer = TokenizeManager(folder, model_limits(folder, engine.max_seq_len), template)
        self.detokenizer = DetokenizeManager(self.tokenizer.tokenizer)
        self._embedder = read_embedder(folder)
        for problem in EndTokens.of_folder(folder, template).problems if self._embedder is None else ():
            logger.warning("%s", problem)
        with contextlib.ExitStack() as stack:
            ranks = stack.enter_context(running_ranks(config))
            self._io = OfflineIO()
            self.scheduler = ranks.start(lambda: create_scheduler(config, self._io, ranks.group))
            has_snapshots = self.scheduler.cache.bounded is not None
            self.tokenizer.limits = msgspec.structs.replace(self.tokenizer.limits, has_snapshots=has_snapshots)
            stack.callback(self.scheduler.engine.shutdown)
            stack.callback(ranks.group.bus.close)  # called earlier: some collectives end only when all ranks leave
            stack.callback(self.scheduler.save)
            self.followers = ranks.followers
            self._close = weakref.finalize(self, stack.pop_all().close)
        os.register_at_fork(after_in_child=self._close.detach)  # the engine and its threads stay with the parent
        self._uids = itertools.count()
        self._has_failed = False
        self._call = threading.Lock()  # held by the call that runs
        facts = {"model": model_name(engine.model), **self.scheduler.describe()}
        shown = ("model", "dtype", "quantization", "device", "kv_tokens", "max_model_len")
        self._shown = ", ".join(f"{name}={facts[name]!r}" for name in shown)

    def __repr__(self) -> str:
        return f"LLM({self._shown})" if self._close.alive else f"LLM({self._shown}, closed)"

    def close(self) -> None:
        """End the engine and the other ranks. Afterwards nothing can be generated."""
        self._close()

    shutdown = close

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @explained
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        lora: Lora = None,
        on_token: Callable[[int, str], None] | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Complete each prompt (text, token ids, or vLLM's mappings). Results are in the order of the prompts.

        `lora` is the name of an adapter in `LLM(lora={name: path})`, or a list with one, or None, for each prompt.
        `on_token(index, text)` is called with each increment of the text of a choice. With `SamplingParams(n=...)`, the
        choices of a prompt are adjacent. `use_tqdm` shows the progress on a terminal, if the call takes longer than a
        second. Raises `RequestError` for an invalid prompt or parameter, before any request is computed.
        """
        messages = self.adapted(prompt_messages(prompts, self.tokenizer.limits), lora)
        return self._run(messages, sampling_params, on_token, use_tqdm)

    @explained
    def stream(
        self, prompt: Prompt, sampling_params: Params | None = None, *, lora: str | None = None
    ) -> Generator[Piece, None, None]:
        """Yield the completion of one prompt, or of its `n` choices, in pieces: `piece.text` is new.

        Leaving the loop aborts the request and frees its pages. Until then no other call can run. Raises `RequestError`
        as `generate` does.
        """
        self.require_working()
        messages = self.adapted(prompt_messages(prompt, self.tokenizer.limits), lora)
        return self._pieces(self.prepare_one(messages, sampling_params))

    @explained
    def embed(
        self, prompts: Prompt | Sequence[Prompt], dimensions: int | None = None, *, lora: Lora = None
    ) -> npt.NDArray[np.float32]:
        """Return the embedding of each prompt (text or token ids), float32 [n, H] or [n, dimensions].

        Raises `RequestError` if the model generates text, and for an invalid prompt or number of dimensions.
        """
        messages = self.adapted(prompt_messages(prompts, self.tokenizer.limits), lora)
        if self._embedder is None:
            raise RequestError("this model generates text; it does not compute embeddings", code="unsupported_endpoint")
        length = self._embedder.length(dimensions)
        vectors = [self._embedder.vector(done.embedding, length) for done in self._run(messages, EMBED)]
        return np.stack(vectors) if vectors else np.empty((0, length), np.float32)

    @explained
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora: Lora = None,
        on_token: Callable[[int, str], None] | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Generate the assistant's next message for one or more conversations of {"role", "content"} messages.

        Raises `RequestError` for what the server refuses in /v1/chat/completions, in the same words.
        """
        chats = self.chat_messages(messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
        return self._run(self.adapted(chats, lora), sampling_params, on_token, use_tqdm)

    def chat_messages(self, messages: Sequence[Any], **fields: Any) -> list[TokenizeMsg]:
        """Return a message for each of one or more conversations. `fields` are those of a chat completion."""
        is_one = not _listed(messages) or isinstance(messages[0], Mapping)
        chats = [messages] if is_one else messages
        return [self._chat_message({"messages": _listed(chat), **fields}) for chat in chats]

    def _chat_message(self, fields: dict[str, Any]) -> TokenizeMsg:
        """Validate a chat completion as the server does; warn of names without an effect."""
        body = json_text(fields, "messages").encode()
        chat, _, ignored = read_body(body, ChatCompletionRequest)
        ignored += unread_kwargs(chat.chat_template_kwargs, self.tokenizer.template.variables, refuses=False)
        message = api.chat_message(chat, api.SamplingDefaults(), self.tokenizer.limits)
        if ignored:
            warnings.warn(f"no effect: {', '.join(ignored)}", stacklevel=5)
        return message

    def adapted(self, messages: Sequence[TokenizeMsg], lora: Lora) -> list[TokenizeMsg]:
        """Return `messages` with the adapters that `lora` names: one for all, or one for each.

        Raises `RequestError` for an unknown name.
        """
        names = [lora] * len(messages) if lora is None or isinstance(lora, str) else [*lora]
        if len(names) != len(messages):
            raise RequestError(f"lora has {len(names)} names for {len(messages)} prompts", param="lora")
        for name in {*names} - self.adapters.keys() - {None}:
            message = f"lora={name!r} is not an adapter of this LLM: {', '.join(self.adapters) or 'it has none'}"
            raise RequestError(message, param="lora", code="model_not_found")
        params = (SamplingParams(adapter=None if name is None else self.adapters[name]) for name in names)
        return [msgspec.structs.replace(m, sampling_params=p) for m, p in zip(messages, params, strict=True)]

    def get_tokenizer(self) -> TextTokenizer:
        """The model's tokenizer and chat template."""
        return TextTokenizer(self.tokenizer)

    def prepare(
        self, messages: Sequence[TokenizeMsg], sampling_params: Params | Sequence[Params] | None
    ) -> list[Request]:
        """Validate and tokenize prompts, and assign uids. Raises `RequestError` before any request is computed."""
        if isinstance(sampling_params, list | tuple):
            params = [_sampling_params(p) for p in sampling_params]
        else:
            params = [_sampling_params(sampling_params)] * len(messages)
        if len(params) != len(messages):
            error = f"there are {len(params)} sampling_params for {len(messages)} prompts: give one, or one for each"
            raise RequestError(error, param="sampling_params")
        adapters = (m.sampling_params.adapter for m in messages)
        params = [msgspec.structs.replace(p, adapter=a or p.adapter) for p, a in zip(params, adapters, strict=True)]
        for p in params:
            validate_sampling(p, self.tokenizer.limits)
        requests = []
        for m, p in zip(messages, params, strict=True):
            ids = self.tokenizer.tokenize(msgspec.structs.replace(m, sampling_params=p))
            self.scheduler.admission.output_budget(len(ids), p)
            choices = [choice_params(p, i) for i in range(p.n)]
            head, packed = self.tokenizer.system_tokens(m, ids), ids_to_bytes(ids)
            users = [
                UserMsg(uid=next(self._uids), input_ids=packed, sampling_params=c, system_tokens=head) for c in choices
            ]
            requests.append(Request(users, m.text))
        return requests

    def prepare_one(self, messages: Sequence[TokenizeMsg], sampling_params: Params | None) -> Request:
        """Do what `prepare` does for a call that takes one prompt."""
        if len(messages) != 1:
            raise RequestError("give one prompt per call", param="prompt")
        return self.prepare(messages, sampling_params)[0]

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
        completions = Completions(self.detokenizer)
        done: list[Completion] = []
        for request in requests:
            done.append(completions.add(request, _listener(on_token, completions.pending)))
        total, stats = completions.pending, self.scheduler.stats
        before = stats.generation_tokens
        with self._running(completions, requests):
            while completions.pending:
                self.advance(completions)
                progress.update(total - completions.pending, total, stats.generation_tokens - before)
        return done

    def _pieces(self, request: Request) -> Generator[Piece, None, None]:
        pieces: list[Piece] = []
        completions = Completions(self.detokenizer)
        with self._running(completions, [request]):
            completions.add(request, pieces.append)
            while completions.pending:
                self.advance(completions)
                for piece in pieces:
                    if piece.failure is not None:
                        raise piece.failure
                    yield piece
                pieces.clear()

    @contextlib.contextmanager
    def _running(self, completions: Completions, requests: Sequence[Request]) -> Iterator[None]:
        """Keep other calls out of the engine. If the block fails or is left early, abort the requests."""
        if not self._call.acquire(blocking=False):
            raise InvariantError("another call or stream of this LLM is open: end it first, or use AsyncLLM")
        try:
            yield
        except BaseException:  # an error, Ctrl-C, or a stream that is left
            self.abort(user.uid for request in requests for user in request.users)
            raise
        finally:
            with held_interrupt():
                self._drain(completions)
                self._call.release()

    def require_working(self) -> None:
        """Raise `InvariantError` after an error of the engine or after `close`, and in a forked process."""
        if self._has_failed or not self._close.alive:
            raise InvariantError("this LLM was closed, has failed, or belongs to a parent process; make a new one")

    def advance(self, completions: Completions) -> None:
        """Send waiting requests while the queue has capacity, compute one step, and process its replies."""
        self.require_working()
        # The queue has a limit, but a list of prompts has none.
        free = self.scheduler.admission.max_queued - self.scheduler.num_queued
        while completions.waiting and free > 0:
            self._io.inbox.append(completions.waiting.popleft())
            free -= 1
        self._step()
        while self._io.replies:
            self.abort(completions.process(self._io.replies.popleft()))

    def abort(self, uids: Iterable[int]) -> None:
        """Abort requests; they end with the next step."""
        self._io.inbox.extend(AbortMsg(uid) for uid in uids)

    @property
    def is_busy(self) -> bool:
        """Whether requests are running, or pages are still to be freed."""
        return self._close.alive and not self._has_failed and (self.scheduler.is_busy or bool(self._io.inbox))

    def _step(self) -> None:
        with held_interrupt():
            try:
                self.scheduler.step()
            except BaseException:
                self._has_failed = True  # the step was not completed: the state is undefined
                raise

    def _drain(self, completions: Completions) -> None:
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
        text = self._template.render(
            [*map(dict, conversation)], tools, variables, add_generation_prompt=add_generation_prompt
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def prompt_messages(prompts: Prompt | Sequence[Prompt], limits: Limits) -> list[TokenizeMsg]:
    """Return a message for each of one or more prompts. Raises `RequestError` as the server does."""
    plain = _plain(prompts)
    if isinstance(plain, list) and api.is_batch(plain):
        plain = [_plain(prompt) for prompt in plain]
    return api.prompt_messages(plain, "prompt", SamplingParams(), limits, sys.maxsize) if plain != [] else []


def _plain(prompt: Any) -> str | list[Any]:
    """Return text or a list for what Python programs have: arrays, tuples, vLLM's mappings."""
    if isinstance(prompt, Mapping):
        if extra := prompt.keys() - {"prompt", "prompt_token_ids"}:
            raise RequestError(f"a prompt may have prompt or prompt_token_ids, not {min(extra)!r}", param="prompt")
        ids = prompt.get("prompt_token_ids")
        prompt = prompt.get("prompt") if ids is None else ids
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    elif isinstance(prompt, list | tuple):
        prompt = np.asarray(prompt).tolist() if prompt and isinstance(prompt[0], np.integer) else list(prompt)
    if not isinstance(prompt, str | list):
        kind = type(prompt).__name__
        raise RequestError(f"prompt must be text, token ids, or a list of either, not {kind}", param="prompt")
    return prompt


def _listed(messages: Any) -> list[Any]:
    """Return messages, or conversations, as a list. Raises `RequestError` for a text or a single message."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        example = '[{"role": "user", "content": "Hello"}]'
        raise RequestError(f"chat takes a list of messages, such as {example}; generate takes text", param="messages")
    return list(messages)


def _sampling_params(given: Any) -> SamplingParams:
    """Return checked `SamplingParams`, also from a mapping, as in SGLang. Raises `RequestError` for anything else."""
    if given is None or isinstance(given, SamplingParams):  # `msgspec.structs.replace` checks nothing
        given = {} if given is None else msgspec.structs.asdict(given)
    if not isinstance(given, Mapping):
        raise RequestError("give a SamplingParams, or one for each prompt", param="sampling_params")
    try:
        return SamplingParams(**{"max_tokens" if name == "max_new_tokens" else name: v for name, v in given.items()})
    except TypeError as e:
        raise RequestError(f"sampling_params: {e}", param="sampling_params") from None


def _listener(on_token: Callable[[int, str], None] | None, first: int) -> Listener | None:
    """Return what calls `on_token` with the new text of a prompt's choices, the first of which is choice `first`."""
    if on_token is None:
        return None

    def listen(piece: Piece) -> None:
        if piece.text:
            on_token(first + piece.index, piece.text)
        if piece.failure is not None:
            raise piece.failure

    return listen
