"""Many clients at once, some of whom leave at a random byte (T1, T2): nothing leaks or sticks, answers stay right."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter, defaultdict

import httpx
import pytest

from e2e.harness import PATIENCE_S, ServerProcess, require_no_leak

AT_ONCE = 32
PREFIXES = ["You are a helpful assistant. " * 20, "Here is a long text about cats and dogs. " * 15, ""]


def make_body(rng: random.Random) -> dict[str, object]:
    question = rng.choice(["What is 12 + 30?", "Who are you?", "Tell me a story about a dog named Max.", "Say hello."])
    return {
        "messages": [{"role": "system", "content": rng.choice(PREFIXES)}, {"role": "user", "content": question}],
        "temperature": rng.choice([0, 0, 1.0]),
        "max_tokens": rng.choice([1, 8, 32]),
        "stream": rng.random() < 0.7,
        "stop": rng.choice([None, ["e", "."], ["zebra"]]),
    }


async def leave_early(request: httpx.Request, seconds: float) -> None:
    """Send it over a connection of its own and close that after so long, whatever has come until then.

    (A client that is cancelled while it connects leaves its socket to the garbage collector, which warns.)
    """
    head = f"{request.method} {request.url.raw_path.decode()} HTTP/1.1".encode()
    fields = (name + b": " + value for name, value in request.headers.raw)
    _, writer = await asyncio.open_connection(request.url.host, request.url.port)
    try:
        writer.write(b"\r\n".join([head, *fields, b"", request.content]))
        await writer.drain()
        await asyncio.sleep(seconds)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def one_request(
    client: httpx.AsyncClient, rng: random.Random, texts: dict[str, set[str]], leaver_tokens: int
) -> str:
    """Send a request and read it to the end, or leave at a random moment; greedy answers are added to `texts`."""
    body = make_body(rng)
    leaves = rng.random() < 0.3
    if leaves:  # long enough that it is not over before
        body |= {"max_tokens": leaver_tokens, "ignore_eos": True, "stop": None, "stream": True}
    if leaves and rng.random() < 0.5:  # while it is queued or computed
        await leave_early(client.build_request("POST", "/v1/chat/completions", json=body), rng.random() * 0.3)
        return "left early"
    until = rng.randrange(3000) if leaves else None
    seen = b""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for data in response.aiter_bytes():
            seen += data
            if until is not None and len(seen) > until:
                return "left in between"
    if body["stream"]:
        assert seen.endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in seen
    text, reason = read_answer(seen)
    assert reason in ("stop", "length")
    if body["temperature"] == 0:
        texts[json.dumps(body | {"stream": False})].add(text)
    return "done"


def read_answer(data: bytes) -> tuple[str, str | None]:
    """Text and finish reason of a whole response, streamed or not."""
    if not data.startswith(b"data: "):
        choice = json.loads(data)["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]
    text, reason = "", None
    for line in data.decode().split("\n\n")[:-2]:
        choice = json.loads(line.removeprefix("data: "))["choices"][0]
        text += choice["delta"].get("content", "")
        reason = choice["finish_reason"] or reason
    return text, reason


async def run_load(url: str, total: int, texts: dict[str, set[str]], leaver_tokens: int) -> Counter[str]:
    rng = random.Random(1)
    results: Counter[str] = Counter()
    seeds = [random.Random(rng.random()) for _ in range(total)]
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits, trust_env=False) as client:

        async def worker() -> None:
            while seeds:
                results[await asyncio.wait_for(one_request(client, seeds.pop(), texts, leaver_tokens), PATIENCE_S)] += 1

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    return results


def golden(server: ServerProcess) -> str:
    body = {"messages": [{"role": "user", "content": "Tell me a story about a cat named Tom."}], "temperature": 0}
    with server.client() as client:
        text: str = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    return text


def check_load(server: ServerProcess, total: int, leaver_tokens: int = 64) -> None:
    before = golden(server)
    started = time.monotonic()
    texts: dict[str, set[str]] = defaultdict(set)
    results = asyncio.run(run_load(server.url, total, texts, leaver_tokens))
    print(f"{dict(results)} in {time.monotonic() - started:.1f} s")
    assert sum(results.values()) == total
    assert results["left early"] + results["left in between"] > 0.2 * total
    require_no_leak(server)
    with server.client() as client:
        for body, seen in list(texts.items())[:40]:
            answer = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
            assert seen == {read_answer(answer.content)[0]}, "a greedy answer differs from that of its solo run"
    assert golden(server) == before
    require_no_leak(server)
    assert "Traceback" not in server.log


def test_200_requests_with_disconnects(server: ServerProcess) -> None:
    check_load(server, 200, leaver_tokens=400)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--overlap"],
        ["--no-overlap", "--num-tokenizer", "1"],
        ["--overlap", "--num-pages", "30"],  # T2: one and a half times the largest request
    ],
)
def test_2000_requests_with_disconnects(flags: list[str]) -> None:
    with ServerProcess("--num-pages", "1024", *flags) as server:
        check_load(server, 2000)
