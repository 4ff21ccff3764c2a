"""Log-probabilities through the official client and raw HTTP, against a real server with the built-in model."""

from __future__ import annotations

import itertools
import math
from typing import Any

import httpx
import openai
import pytest

from e2e.harness import ServerProcess, require_no_leak
from e2e.test_choices import post_events

MODEL = "minisgl-demo"
USER: Any = [{"role": "user", "content": "Repeat exactly: grün 🙂"}]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, temperature=0, logprobs=True, top_logprobs=3, max_tokens=40
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None and answer.usage is not None
    tokens = choice.logprobs.content
    assert len(tokens) == answer.usage.completion_tokens  # the one that ends it is among them
    data = bytes(b for t in tokens[:-1] for b in t.bytes or [])
    assert data.decode() == choice.message.content
    for t in tokens:
        assert len(t.top_logprobs) == 3
        assert t.logprob == t.top_logprobs[0].logprob and t.token == t.top_logprobs[0].token  # greedy
        assert all(a.logprob >= b.logprob for a, b in zip(t.top_logprobs, t.top_logprobs[1:], strict=False))
        assert sum(math.exp(x.logprob) for x in t.top_logprobs) <= 1.0001
        assert t.token.startswith("bytes:") or t.token.encode() == bytes(t.bytes or [])


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]])
def test_streamed_chat_equals_the_body(client: openai.OpenAI, tools: Any) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 4, "logprobs": True, "top_logprobs": 1, "n": 2}
    fields |= {"max_tokens": 25, **({"tools": tools} if tools else {})}
    whole = client.chat.completions.create(model=MODEL, messages=USER, **fields)
    seen: list[list[Any]] = [[], []]
    for chunk in client.chat.completions.create(model=MODEL, messages=USER, stream=True, **fields):
        (choice,) = chunk.choices
        if choice.logprobs is not None:
            seen[choice.index] += choice.logprobs.content or []
    for choice, tokens in zip(whole.choices, seen, strict=True):
        assert choice.logprobs is not None
        assert [t.bytes for t in tokens] == [t.bytes for t in choice.logprobs.content or []]
        # Steps of another size round differently.
        assert [t.logprob for t in tokens] == pytest.approx(
            [t.logprob for t in choice.logprobs.content or []], abs=1e-3
        )


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_loglikelihood_of_evaluations(http: httpx.Client, max_tokens: int) -> None:
    """The sum over the tokens after the context, and whether each is the likeliest, as lm-eval reads them."""
    tokenize = {"model": MODEL, "prompt": "Once upon a time, there was a little"}
    ids = http.post("/tokenize", json=tokenize).json()["tokens"]
    body = {"prompt": [ids, ids[:3]], "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 2 * max_tokens
    for choice, prompt in zip(answer["choices"], (ids, ids[:3]), strict=True):
        got = choice["logprobs"]
        assert {len(got[k]) for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {
            len(prompt) + max_tokens
        }
        assert got["token_logprobs"][0] is None and got["top_logprobs"][0] is None
        assert "".join(got["tokens"]) == choice["text"]
        assert [choice["text"][o:].startswith(t) for o, t in zip(got["text_offset"], got["tokens"], strict=True)]
        for token, logprob, top in list(zip(got["tokens"], got["token_logprobs"], got["top_logprobs"], strict=True))[
            1:
        ]:
            assert top[token] == logprob <= max(top.values()) <= 0
            assert len(top) == (1 if logprob == max(top.values()) else 2)
        assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("text", ["Grüße 🙂", "日本🙂🙂x", "👩‍👩 y", "x\ufffdy"])
def test_offsets_cut_the_text_into_its_tokens(http: httpx.Client, text: str) -> None:
    """For prompts that end anywhere, also within a character, which the model then completes or not."""
    ids = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    bias = {str(http.post("/tokenize", json={"prompt": "7", "add_special_tokens": False}).json()["tokens"][-1]): 100}
    for end, fields in itertools.product(range(1, len(ids) + 1), ({"max_tokens": 0}, {"logit_bias": bias}, {})):
        body = {"prompt": ids[:end], "echo": True, "logprobs": 0, "max_tokens": 2, "temperature": 0} | fields
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
        got = choice["logprobs"]
        cuts = itertools.pairwise([*got["text_offset"], len(choice["text"])])
        parts = [choice["text"][start:stop] for start, stop in cuts]
        assert "".join(parts) == choice["text"]
        whole = [(t, part) for t, part in zip(got["tokens"], parts, strict=True) if not t.startswith("bytes:")]
        assert all(token == part for token, part in whole)
        if fields:
            shown = http.post("/detokenize", json={"tokens": ids[:end]}).json()["prompt"]
            assert choice["text"] == shown + "77" * ("logit_bias" in fields)


def test_streamed_completion_equals_the_body(http: httpx.Client) -> None:
    body = {"prompt": ["Once upon", "The"], "n": 2, "echo": True, "logprobs": 2, "max_tokens": 6, "seed": 1}
    whole = http.post("/v1/completions", json=body).json()["choices"]
    texts, offsets, tokens = [""] * 4, [[] for _ in range(4)], [[] for _ in range(4)]  # type: ignore[var-annotated]
    for event in post_events(http, "/v1/completions", body):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        tokens[choice["index"]] += choice["logprobs"]["tokens"]
        offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    assert texts == [c["text"] for c in whole]
    assert tokens == [c["logprobs"]["tokens"] for c in whole]
    assert offsets == [c["logprobs"]["text_offset"] for c in whole]
    assert [t[:4] for t in texts] == ["Once", "Once", *[t[:4] for t in texts[2:]]]
    assert all(t.startswith("The") for t in texts[2:])


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        ("/v1/chat/completions", {"logprobs": 3}, "logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/completions", {"logprobs": 21}, "logprobs"),
        ("/v1/completions", {"logprobs": -1}, "logprobs"),
        ("/v1/completions", {"logprobs": True}, "logprobs"),
        ("/v1/completions", {"logprobs": 2**70}, "logprobs"),
        ("/v1/completions", {"max_tokens": -3}, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("/generate", {"sampling_params": {"logprobs": 1}}, "sampling_params.logprobs"),
        ("/generate", {"top_logprobs_num": 21}, "top_logprobs_num"),
        ("/generate", {"logprob_start_len": -2}, "logprob_start_len"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, path: str, extra: dict[str, Any], param: str) -> None:
    prompt = {"messages": USER} if "chat" in path else {"prompt": "x"}
    response = http.post(path, json=prompt | extra)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_nothing_leaks(server: ServerProcess) -> None:
    require_no_leak(server)
    assert "Traceback" not in server.log
