"""`AsyncLLM`: concurrent requests to one engine, from asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

from minisgl.core.errors import InvariantError, MinisglError
from minisgl.core.message import TokenizeMsg
from minisgl.llm.completions import Completion, Completions, Piece
from minisgl.llm.llm import LLM, Message, Params, Prompt, TextTokenizer, explained, prompt_messages

Job = Callable[[LLM, Completions], None]
Inbox = asyncio.Queue[Piece]

logger = logging.getLogger(__name__)


class AsyncLLM:
    """An `LLM` in its own thread, for callers in any event loop. `options` are those of `LLM`.

    `generate` and `chat` are async iterators of pieces. Leaving the loop aborts the request:

        async for piece in llm.generate("Once upon a time", SamplingParams(max_tokens=50)):
            print(piece.text, end="")

    The constructor returns when the model is loaded.
    """

    def __init__(self, model: str = "", **options: Any) -> None:
        self._worker = _Worker()
        started: Future[LLM] = Future()
        arguments = model, {"itl_target_ms": None, **options}, started
        thread = threading.Thread(target=self._worker.run, args=arguments, name="minisgl-engine", daemon=True)
        thread.start()
        self._llm = started.result()
        self._lock = threading.Lock()  # for the tokenizer
        self._close = weakref.finalize(self, _stop, self._worker, thread)

    def close(self) -> None:
        """End all requests with an error, and end the engine."""
        self._close()

    shutdown = close

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def get_tokenizer(self) -> TextTokenizer:
        """Return the model's tokenizer and chat template."""
        return self._llm.get_tokenizer()

    @explained
    def generate(
        self, prompt: Prompt, sampling_params: Params | None = None, *, lora: str | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of the completion of one prompt, or of its `n` choices. Raises `RequestError`."""
        messages = self._llm.adapted(prompt_messages(prompt, self._llm.tokenizer.limits), lora)
        return self._pieces(messages, sampling_params)

    @explained
    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: Params | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora: str | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of the assistant's next message. Raises `RequestError`."""
        chat = self._llm.chat_messages(messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
        return self._pieces(self._llm.adapted(chat, lora), sampling_params)

    @explained
    async def complete(
        self, prompt: Prompt, sampling_params: Params | None = None, *, lora: str | None = None
    ) -> Completion:
        """Return the whole completion of one prompt. Raises `RequestError`."""
        choices = {piece.index: piece.completion async for piece in self.generate(prompt, sampling_params, lora=lora)}
        return choices[0]

    async def _pieces(self, messages: list[TokenizeMsg], sampling_params: Params | None) -> AsyncGenerator[Piece, None]:
        with self._lock:
            request = self._llm.prepare_one(messages, sampling_params)
        loop, uids = asyncio.get_running_loop(), [user.uid for user in request.users]
        inbox: Inbox = asyncio.Queue()

        def start(llm: LLM, completions: Completions) -> None:
            completions.add(request, lambda piece: self._worker.outbox[loop].append((inbox, piece)))

        def leave(llm: LLM, completions: Completions) -> None:
            completions.forget(uids)
            llm.abort(uids)

        self._worker.submit(start)
        unfinished = len(uids)
        try:
            while unfinished:
                piece = await inbox.get()
                if piece.failure is not None:
                    raise piece.failure
                unfinished -= piece.finished
                yield piece
        finally:
            if unfinished:
                with contextlib.suppress(MinisglError):  # the engine has ended
                    self._worker.submit(leave)


class _Worker:
    """The engine's thread. It runs jobs between steps, and passes all pieces of a step to an event loop at once."""

    def __init__(self) -> None:
        self.outbox: defaultdict[asyncio.AbstractEventLoop, list[tuple[Inbox, Piece]]] = defaultdict(list)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._failure: MinisglError | None = None

    def submit(self, job: Job | None) -> None:
        """Let the thread run `job`, or end if it is None. Raises the cause if the thread has ended."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._jobs.put(job)

    def run(self, model: str, options: dict[str, Any], started: Future[LLM]) -> None:
        """Load the model, and run steps until the thread is to end."""
        try:
            llm = LLM(model, **options)
        except BaseException as e:
            started.set_exception(e)
            return
        started.set_result(llm)
        completions = Completions(llm.detokenizer)
        failure = InvariantError("the engine was closed; make a new AsyncLLM")
        try:
            while self._run_jobs(llm, completions, waits=not (llm.is_busy or completions.waiting)):
                llm.advance(completions)
                self._deliver()
        except Exception as e:
            logger.exception("the engine failed")
            failure = InvariantError(f"the engine failed: {e}")
        with self._lock:
            self._failure = failure
        while not self._jobs.empty():
            self._run_jobs(llm, completions, waits=False)
        completions.fail(failure)
        self._deliver()
        llm.close()

    def _run_jobs(self, llm: LLM, completions: Completions, waits: bool) -> bool:
        """Run all queued jobs; with `waits`, wait for one. Return whether to continue."""
        while waits or not self._jobs.empty():
            if (job := self._jobs.get()) is None:
                return False
            job(llm, completions)
            waits = False
        return True

    def _deliver(self) -> None:
        for loop, pieces in self.outbox.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_hand_out, pieces)
        self.outbox.clear()


def _hand_out(pieces: list[tuple[Inbox, Piece]]) -> None:
    for inbox, piece in pieces:
        inbox.put_nowait(piece)


def _stop(worker: _Worker, thread: threading.Thread) -> None:
    with contextlib.suppress(MinisglError):
        worker.submit(None)
    if thread is not threading.current_thread():
        thread.join()
