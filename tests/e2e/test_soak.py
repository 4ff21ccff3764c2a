"""Minutes of everything at once, hostile requests, and thousands of short ones (T19): nothing leaks, nothing grows.

`MINISGL_SOAK_MINUTES=30 make soak ARGS=tests/e2e/test_soak.py`
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import string
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.harness import PATIENCE_S, ServerProcess, require_no_leak
from e2e.test_load import leave_early

pytestmark = pytest.mark.slow

MINUTES = float(os.environ.get("MINISGL_SOAK_MINUTES", "3"))
ROUND_S = 60.0
AT_ONCE = 24
STORY = "Once upon a time there was a fox. "
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
VALUES: list[Any] = [None, "", "x", "é" * 300, -1, 0, 1, 2**31, 2**63, 2**70, 1e308, 0.5, True, [], [[]], {}, {"a": {}}]
VALUES += [["a"] * 50, [1, 2], [-1], "\x00", "\ud83e", [{"role": "user"}], [{"role": "user", "content": None}]]
FIELDS = [
    "prompt",
    "messages",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stop",
    "stream",
    "seed",
    "logprobs",
    "top_logprobs",
    "echo",
]
FIELDS += [
    "logit_bias",
    "response_format",
    "tools",
    "tool_choice",
    "guided_json",
    "guided_regex",
    "guided_grammar",
    "user",
    "model",
]
FIELDS += [
    "stream_options",
    "presence_penalty",
    "repetition_penalty",
    "min_tokens",
    "cache_salt",
    "chat_template_kwargs",
    "text",
]
FIELDS += ["sampling_params", "input_ids", "temprature", "best_of", "suffix", "input", "return_logprob"]
PATHS = ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize", "/v1/embeddings"]


def resources(server: ServerProcess) -> tuple[int, int]:
    """Open descriptors and resident KB of all processes."""
    pids = [server.process.pid, *server.info()["processes"].values()]
    statm = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids), sum(statm) * os.sysconf("SC_PAGE_SIZE") // 1024


def body_of(rng: random.Random) -> tuple[str, dict[str, Any], int]:
    """A request: path, body and the status that it must have."""
    prompt = f"{rng.randrange(40)} {STORY * rng.choice([1, 1, 5, 40, 300])}"
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.choice([1, 8, 40, 200])}
    match rng.randrange(8):
        case 0:
            body |= {"n": 3, "temperature": 1.0, "seed": 5}
        case 1:
            body |= {"guided_json": SCHEMA, "max_tokens": 60}
        case 2:
            body |= {"guided_regex": "[a-z]{1,20} [0-9]{3}"}
        case 3:
            body |= {"logprobs": 5, "echo": True, "max_tokens": 4}
        case 4:
            body |= {"stop": ["fox", "e "], "presence_penalty": 0.5, "logit_bias": {"7": -5}}
        case 5:
            return "/v1/completions", body | {rng.choice(["temperature", "n", "top_p"]): -7}, 400
        case 6:
            question = [{"role": "user", "content": "What is 12 + 30?"}]
            return "/v1/chat/completions", {"messages": question, "max_tokens": 20, "stream": rng.random() < 0.5}, 200
        case _:
            body |= {"stream": True}
    return "/v1/completions", body, 200


async def one(client: httpx.AsyncClient, rng: random.Random) -> str:
    path, body, status = body_of(rng)
    if status == 200 and rng.random() < 0.3:
        leaving = {"stream": True, "ignore_eos": True, "max_tokens": 200}
        if rng.random() < 0.5:
            await leave_early(client.build_request("POST", path, json=body | leaving), rng.random())
            return "left early"
        until = rng.randrange(2000)
        async with client.stream("POST", path, json=body | leaving) as response:
            seen = 0
            async for data in response.aiter_bytes():
                seen += len(data)
                if seen > until:
                    return "left in between"
        return "done"
    response = await client.post(path, json=body)
    assert response.status_code == status, (response.status_code, response.text[:500])
    assert b'"error"' not in response.content or status == 400
    return "done" if status == 200 else "refused"


async def run_for(url: str, seconds: float, seed: int) -> Counter[str]:
    results: Counter[str] = Counter()
    end = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=4 * PATIENCE_S, trust_env=False) as client:

        async def worker(rng: random.Random) -> None:
            while time.monotonic() < end:
                results[await one(client, rng)] += 1

        await asyncio.gather(*(worker(random.Random(1000 * seed + i)) for i in range(AT_ONCE)))
    return results


# The default pool of a CPU takes five minutes to fill, and until then the memory in use grows.
POOLS = {
    "large pool": ["--no-overlap", "--num-pages", "4000"],
    "overlap, small pool": ["--overlap", "--num-pages", "600"],
}


@pytest.fixture(params=POOLS.values(), ids=POOLS)
def soaked(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with ServerProcess(*request.param, env={"MINISGL_CHECK": "0"}) as server:
        yield server
        assert "Traceback" not in server.log


def test_mixed_traffic(soaked: ServerProcess) -> None:
    total: Counter[str] = Counter()
    seen = []
    rounds = max(3, round(60 * MINUTES / ROUND_S))
    for i in range(rounds):
        total += asyncio.run(run_for(soaked.url, ROUND_S, i))
        require_no_leak(soaked)
        seen.append(resources(soaked))
        print(f"{i + 1} min: {total.total()} requests, descriptors and KB {seen[-1]}", flush=True)
    print(dict(total))
    assert total["left early"] + total["left in between"] > total.total() / 6
    descriptors = [d for d, _ in seen[1:]]
    assert max(descriptors) - min(descriptors) <= 4, seen
    # The prefix cache, the allocators and the caches of texts fill up at first.
    half = len(seen) // 2
    assert seen[-1][1] - seen[half][1] < 0.05 * seen[half][1], seen


def hostile(rng: random.Random) -> tuple[str, bytes, dict[str, str]]:
    """Path, body and headers."""
    headers = {"content-type": "application/json"}
    body: dict[str, Any] = {"prompt": "Hi", "max_tokens": 4}
    if rng.random() < 0.4:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    for _ in range(rng.randrange(1, 4)):
        body[rng.choice(FIELDS)] = rng.choice(VALUES)
    if rng.random() < 0.15:
        body["guided_json"] = _schema(rng, 4)
    if rng.random() < 0.1:
        body["guided_regex"] = "".join(rng.choices("ab.*+?()[]{}|\\9,^$", k=rng.randrange(1, 30)))
    data = json.dumps(body).encode()
    match rng.randrange(12):
        case 0:
            data = data[: rng.randrange(len(data))]
        case 1:
            data = bytes(rng.randrange(256) for _ in range(rng.randrange(200)))
        case 2:
            data = b"[" * rng.randrange(1, 50_000)
        case 3:
            headers["content-type"] = rng.choice(["text/plain", "", "application/json; charset=utf-16", "x" * 999])
        case 4:
            name = "".join(rng.choices(string.ascii_letters, k=8))
            headers[name] = "".join(rng.choices(string.printable.strip(), k=rng.randrange(2000)))
        case _:
            pass
    return rng.choice(PATHS), data, headers


def _schema(rng: random.Random, depth: int) -> Any:
    keywords: dict[str, Any] = {
        "type": rng.choice(["object", "array", "string", "integer", "number", "null", "boolean", "odd", 5, []]),
        "minimum": rng.choice(VALUES),
        "maxLength": rng.choice(VALUES),
        "multipleOf": rng.choice([0, 3, 0.1, 1000003, -1]),
        "pattern": rng.choice(["a+", "(a*)*b", "(", "x{5000}", "[^\\d]{3,}"]),
        "enum": rng.choice(VALUES),
        "$ref": rng.choice(["#", "#/$defs/a", "http://localhost:1/x"]),
        "uniqueItems": True,
        "minItems": rng.choice([0, 5, 10**9]),
    }
    chosen = {name: keywords[name] for name in rng.sample(sorted(keywords), rng.randrange(1, 4))}
    if depth and rng.random() < 0.7:
        inner = _schema(rng, depth - 1)
        chosen |= rng.choice(
            [{"properties": {"a": inner}}, {"items": inner}, {"anyOf": [inner, {}]}, {"$defs": {"a": inner}}]
        )
    return chosen


def test_5000_hostile_requests() -> None:
    """None has a 5xx but those that are overloaded or take too long for their own grammar; the server answers on."""
    statuses: Counter[int] = Counter()
    rngs = [random.Random(i) for i in range(5000)]
    with ServerProcess("--num-pages", "1024") as server:

        async def run() -> None:
            async with httpx.AsyncClient(base_url=server.url, timeout=4 * PATIENCE_S, trust_env=False) as client:

                async def worker() -> None:
                    while rngs:
                        path, data, headers = hostile(rngs.pop())
                        try:
                            response = await client.post(path, content=data, headers=headers)
                        except (httpx.LocalProtocolError, UnicodeEncodeError, ValueError):
                            statuses[0] += 1  # the client refuses to send such a header
                            continue
                        statuses[response.status_code] += 1
                        assert response.status_code < 500, (path, data[:1000], response.text[:500])

                await asyncio.gather(*(worker() for _ in range(16)))

        asyncio.run(run())
        print(dict(statuses))
        require_no_leak(server)
        assert "Traceback" not in server.log
        with server.client() as client:
            answer = client.post("/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 4})
            assert answer.status_code == 200


def test_20000_short_requests() -> None:
    """T19: memory grows by less than 1 KB a request, descriptors stay."""

    async def send(url: str, count: int) -> None:
        rng = random.Random(count)
        todo = list(range(count))
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:

            async def worker() -> None:
                while todo:
                    body = {"prompt": f"{todo.pop()} {rng.random()}", "max_tokens": 2}
                    assert (await client.post("/v1/completions", json=body)).status_code == 200

            await asyncio.gather(*(worker() for _ in range(32)))

    with ServerProcess("--num-pages", "1024", env={"MINISGL_CHECK": "0"}) as server:
        asyncio.run(send(server.url, 4000))
        require_no_leak(server)
        before = resources(server)
        asyncio.run(send(server.url, 20_000))
        require_no_leak(server)
        after = resources(server)
        print(f"descriptors and KB before {before}, after {after}")
        assert abs(after[0] - before[0]) <= 4
        assert after[1] - before[1] < 20_000
