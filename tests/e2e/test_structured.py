"""Structured output through the official client and raw HTTP, against a real server with the built-in model."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import jsonschema
import openai
import pytest

from e2e.harness import ServerProcess, eventually, require_no_leak, stopped
from e2e.test_choices import post_events

MODEL = "minisgl-demo"
USER: Any = [{"role": "user", "content": "Who is Anna?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
COMMON: Any = {"model": MODEL, "messages": USER}


def is_person(text: str) -> bool:
    return jsonschema.Draft202012Validator(PERSON).is_valid(json.loads(text))


def test_response_format_is_followed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**COMMON, response_format=FORMAT, temperature=1.2, seed=1, n=4)
    assert [c.finish_reason for c in answer.choices] == ["stop"] * 4
    assert all(is_person(c.message.content or "") for c in answer.choices)
    asked: Any = [{"role": "user", "content": "Extract name and age as JSON: Tom is 9 years old."}]
    free = client.chat.completions.create(
        model=MODEL, messages=asked, response_format={"type": "json_object"}, temperature=0
    )
    assert json.loads(free.choices[0].message.content or "") == {"name": "Tom", "age": 9}


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "guided_json": ({"guided_json": PERSON}, ""),
    "guided_json as text": ({"guided_json": json.dumps(PERSON)}, ""),
    "json_schema": ({"json_schema": json.dumps(PERSON)}, ""),
    "structured_outputs": ({"structured_outputs": {"json": PERSON}}, ""),
    "guided_regex": ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
    "regex": ({"regex": "x{1,5}y"}, "x{1,5}y"),
    "guided_choice": ({"guided_choice": ["red", "grün\n"]}, "red|grün\n"),
    "guided_grammar": ({"guided_grammar": 'start: "<" /[a-z]{1,5}/ ">"'}, "<[a-z]{1,5}>"),
    "Lark": ({"guided_grammar": '?start: "yes" | "no"'}, "yes|no"),
    "GBNF": ({"structured_outputs": {"grammar": 'root ::= "yes"\n  | "no"'}}, "yes|no"),
    "ebnf": ({"ebnf": 'root ::= item{2}\nitem ::= [ab] "-"'}, "([ab]-){2}"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_in_every_api(http: httpx.Client, name: str) -> None:
    fields, pattern = FIELDS[name]

    def check(text: str) -> None:
        assert re.fullmatch(pattern, text) if pattern else is_person(text), text

    chat = http.post("/v1/chat/completions", json={"messages": USER, **fields}).json()
    check(chat["choices"][0]["message"]["content"])
    whole = http.post("/v1/completions", json={"prompt": "Hello", "seed": 3, **fields}).json()["choices"][0]
    check(whole["text"])
    assert whole["finish_reason"] == "stop"
    events = post_events(http, "/v1/completions", {"prompt": "Hello", "seed": 3, **fields})
    assert "".join(e["choices"][0]["text"] for e in events) == whole["text"]
    check(http.post("/generate", json={"text": "Hello", "sampling_params": fields}).json()["text"])


SET: Any = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
REFUSED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": USER,
        "response_format": {"type": "json_schema", "json_schema": {"schema": SET}},
    },
    "/v1/completions": {"prompt": ["a", "b"], "n": 2, "guided_json": SET},
    "/v1/responses": {"input": "hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": SET}}},
    "/v1/messages": {
        "messages": USER,
        "max_tokens": 5,
        "output_config": {"format": {"type": "json_schema", "schema": SET}},
    },
    "/generate": {"text": "hi", "sampling_params": {"json_schema": json.dumps(SET)}},
}


@pytest.mark.parametrize("path", REFUSED)
@pytest.mark.parametrize("stream", [True, False])
def test_refusals_come_before_a_stream_begins(http: httpx.Client, path: str, stream: bool) -> None:
    answer = http.post(path, json={"model": MODEL, "stream": stream, **REFUSED[path]})
    assert answer.status_code == 400 and answer.headers["content-type"] == "application/json"
    assert "uniqueItems at #/properties/a is not supported" in answer.json()["error"]["message"]


def test_grammar_with_other_sampling_fields(http: httpx.Client) -> None:
    """Other parameters keep their meaning, as far as the grammar leaves them one."""

    def ask(**fields: Any) -> dict[str, Any]:
        answer = http.post("/v1/completions", json={"prompt": "Hello", "temperature": 0, **fields}).json()
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    digits = {"regex": "[0-9]{1,40}"}
    assert (cut := ask(**digits, max_tokens=5))["finish_reason"] == "length" and len(cut["text"]) == 5
    assert len(ask(**digits, min_tokens=30)["text"]) >= 30
    assert len(ask(**digits, ignore_eos=True)["text"]) == 40
    assert len(ask(regex="[0-9]{4}", min_tokens=9)["text"]) == 4  # what must end, ends
    assert ask(**digits, stop=["7"], logit_bias={"29": 50}, min_tokens=2)["stop_reason"] == "7"
    assert ask(**digits, logit_bias={"24": 100}, max_tokens=3)["text"] == "222"
    scored = ask(regex="[0-9]{4}", logprobs=2)["logprobs"]
    assert len(scored["tokens"]) == 4 and all(len(t) in (2, 3) for t in scored["top_logprobs"])


def trial_pid(server: ServerProcess) -> int:
    """Return the process that tries grammars, which lives from the first of them on."""
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "regex": "a"}).raise_for_status()
    (scheduler,) = (str(pid) for name, pid in server.info()["processes"].items() if "scheduler" in name)
    (found,) = (
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/stat")
        if path.read_text().rpartition(")")[2].split()[1] == scheduler
    )
    return int(found)


def test_heavy_grammar_does_not_stall_streams(server: ServerProcess, http: httpx.Client) -> None:
    """However long its trial takes, others are answered."""
    heavy: dict[str, Any] = {
        "type": "object",
        "properties": {f"p{i}": {"pattern": "^(a|b){1,50}$"} for i in range(2000)},
    }
    heavy["title"] = uuid4().hex  # not tried before
    slow = {"prompt": "x", "max_tokens": 3, "guided_json": heavy}
    with ThreadPoolExecutor(1) as pool:
        with stopped(trial_pid(server)):
            answer = pool.submit(http.post, "/v1/completions", json=slow)
            assert eventually(lambda: server.metrics()["num_requests_waiting"] == 1)
            body = {"prompt": "Once upon a time", "ignore_eos": True, "max_tokens": 200}
            assert post_events(http, "/v1/completions", body)[-1]["choices"][0]["finish_reason"] == "length"
            assert not answer.done()
        assert answer.result().status_code in (200, 400)


def test_nothing_leaks(server: ServerProcess) -> None:
    require_no_leak(server)
    assert "Traceback" not in server.log
