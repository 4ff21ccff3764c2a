"""`AsyncLLM` with the built-in model: concurrent requests on one engine, and their ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Iterator

import pytest

from minisgl import LLM, AsyncLLM, Piece, SamplingParams
from minisgl.core.errors import ConfigError, InvariantError, RequestError
from minisgl.core.plan import FinishReason

pytestmark = pytest.mark.usefixtures("fixed_costs")

GREEDY = SamplingParams(temperature=0, max_tokens=16)
LONG = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
PROMPTS = [f"Once upon a time, there was a {animal}" for animal in ("cat", "dog", "fox", "cow", "owl", "bear", "pig")]
OPTIONS = {"threads": 1, "num_pages": 600, "max_queued_requests": 5}
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    engine = AsyncLLM(**OPTIONS)
    yield engine
    engine.close()


async def until_idle(llm: AsyncLLM) -> None:
    """Wait until every page is given back, and the detokenizer has forgotten every request."""
    deadline = time.monotonic() + PATIENCE_S
    while llm._llm.is_busy or llm._llm.scheduler.cache.available < 600 or llm._llm.detokenizer.entries:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def gathered(pieces: AsyncGenerator[Piece, None]) -> tuple[str, list[int], Piece]:
    text, ids = "", []
    async for piece in pieces:
        text += piece.text
        ids += piece.token_ids
        assert piece.completion.text.startswith(text)
    return text, ids, piece


def test_concurrent_requests_give_the_results_of_llm(llm: AsyncLLM) -> None:
    async def run() -> None:
        streams = [gathered(llm.generate(prompt, GREEDY)) for prompt in PROMPTS]  # more than the queue takes
        question = [{"role": "user", "content": "What is 12 + 30?"}]
        *results, answer = await asyncio.gather(*streams, gathered(llm.chat(question, GREEDY)))
        with LLM(**OPTIONS) as offline:
            for (text, ids, last), want in zip(results, offline.generate(PROMPTS, GREEDY), strict=True):
                assert (text, ids) == (want.text, want.token_ids)
                assert last.finish_reason is want.finish_reason
                assert last.outputs[0].text == text and last.completion.prompt_token_ids == want.prompt_token_ids
        assert "42" in answer[0] and answer[2].finish_reason is FinishReason.STOP
        await until_idle(llm)

    asyncio.run(run())


def test_leaving_the_loop_aborts_the_request(llm: AsyncLLM) -> None:
    async def run() -> None:
        async for piece in llm.generate(PROMPTS[0], LONG):
            assert not piece.finished
            break
        stream = llm.generate(PROMPTS[1], LONG)
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(llm.complete(PROMPTS[2], LONG))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(llm)

    asyncio.run(run())


def test_a_request_that_waits_can_be_aborted(llm: AsyncLLM) -> None:
    async def run() -> None:
        tasks = [asyncio.create_task(llm.complete(f"{i}", LONG)) for i in range(300)]
        await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        assert {type(e) for e in await asyncio.gather(*tasks, return_exceptions=True)} == {asyncio.CancelledError}
        await until_idle(llm)
        assert (await llm.complete(PROMPTS[0], GREEDY)).text

    asyncio.run(run())


def test_choices_are_those_of_llm(llm: AsyncLLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=8)
    prompt = list(range(300, 340))
    done = asyncio.run(llm.complete(prompt, params))
    with LLM(**OPTIONS) as offline:
        (want,) = offline.generate([prompt], params)
    assert [c.text for c in done.outputs] == [c.text for c in want.outputs]
    assert [c.index for c in done.outputs] == [0, 1, 2]
    assert len({c.text for c in done.outputs}) > 1
    assert [c.num_cached_tokens for c in done.outputs[1:]] == [32, 32], "the first choice computes the prompt"


def test_an_invalid_request_costs_the_others_nothing(llm: AsyncLLM) -> None:
    async def run() -> None:
        wrong = (("x", {"top_p": 2}), ("", GREEDY), ([5] * 4096, GREEDY), (["a", "b"], GREEDY))
        calls = [llm.complete(prompt, params) for prompt, params in wrong]  # type: ignore[arg-type]
        *errors, good = await asyncio.gather(*calls, llm.complete(PROMPTS[0], GREEDY), return_exceptions=True)
        assert [type(e) for e in errors] == [RequestError] * 4
        assert not isinstance(good, BaseException) and good.text
        await until_idle(llm)

    asyncio.run(run())


def test_two_event_loops_share_an_engine(llm: AsyncLLM) -> None:
    texts: dict[int, str] = {}

    def run(i: int) -> None:
        texts[i] = asyncio.run(llm.complete(PROMPTS[i], GREEDY)).text

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert texts == {i: asyncio.run(llm.complete(PROMPTS[i], GREEDY)).text for i in range(3)}


def test_a_lost_event_loop_does_not_hold_up_the_engine(llm: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()
    stream = llm.generate(PROMPTS[0], LONG)
    loop.run_until_complete(anext(stream))
    loop.close()
    assert asyncio.run(llm.complete(PROMPTS[1], GREEDY)).text
    with contextlib.suppress(RuntimeError):
        del stream  # collected outside of its loop
    asyncio.run(until_idle(llm))


def test_closing_ends_open_requests_with_an_error() -> None:
    async def run() -> None:
        async with AsyncLLM(**OPTIONS) as llm:
            task = asyncio.create_task(llm.complete(PROMPTS[0], LONG))
            await asyncio.sleep(0.1)
        with pytest.raises(InvariantError, match="closed"):
            await task
        with pytest.raises(InvariantError, match="closed"):
            await llm.complete(PROMPTS[0], GREEDY)

    asyncio.run(run())


def test_an_engine_that_fails_ends_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        llm = AsyncLLM(**OPTIONS)
        tasks = [asyncio.create_task(llm.complete(prompt, LONG)) for prompt in PROMPTS]
        await asyncio.sleep(0.1)

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("a broken device")

        monkeypatch.setattr(llm._llm.scheduler, "plan", fail)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, InvariantError) and "a broken device" in str(error)
        with pytest.raises(InvariantError, match="a broken device"):
            await llm.complete(PROMPTS[0], GREEDY)
        llm.close()

    asyncio.run(run())


def test_an_unused_engine_ends_its_thread() -> None:
    before = {*threading.enumerate()}
    llm = AsyncLLM(**OPTIONS)
    (thread,) = (t for t in threading.enumerate() if t.name == "minisgl-engine" and t not in before)
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_wrong_options_are_told_to_the_caller() -> None:
    with pytest.raises(ConfigError, match="did you mean tp_size"):
        AsyncLLM(tp_siz=2)


def test_python_s_own_errors_say_what_to_write(llm: AsyncLLM) -> None:
    with pytest.raises(TypeError, match=r"complete has no parameter 'max_tokens'; write SamplingParams\(max_tokens="):
        asyncio.run(llm.complete("x", max_tokens=5))  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="role 'usr' is not one of"):
        llm.chat([{"role": "usr", "content": "Hello"}])
