"""instructor: objects out of answers, by tool calls, JSON mode, JSON Schema and JSON in Markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import instructor
import openai
from checks import BASE, MODEL, PERSON, check, refused, run, user
from pydantic import BaseModel

COMMON: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 150, "max_retries": 0}


class Person(BaseModel):
    name: str
    age: int


def client(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=BASE, api_key="none", max_retries=0), mode=mode)


def extracts(mode: instructor.Mode) -> Callable[[], None]:
    def function() -> None:
        person, completion = client(mode).create_with_completion(messages=user(PERSON), response_model=Person, **COMMON)
        assert isinstance(person, Person)
        assert completion.usage.completion_tokens > 0

    function.__name__ = f"mode_{mode.value}"
    return function


for each in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
    check(extracts(each))


@check
def values_are_right() -> None:
    person = client(instructor.Mode.JSON_SCHEMA).create(messages=user(PERSON), response_model=Person, **COMMON)
    assert (person.name, person.age) == ("Tom", 9)


@check
def partial_objects_streamed() -> None:
    seen = list(
        client(instructor.Mode.JSON_SCHEMA).create_partial(messages=user(PERSON), response_model=Person, **COMMON)
    )
    assert len(seen) > 1 and seen[-1].age is not None


@check
def partial_objects_streamed_from_tools() -> None:
    """All fields of a partial object are optional, and the built-in model fills in one of them."""
    messages = user("My name is Tom and I am 9 years old.")
    seen = list(client(instructor.Mode.TOOLS).create_partial(messages=messages, response_model=Person, **COMMON))
    assert seen and seen[-1].name == "Tom"


@check
async def asynchronous() -> None:
    many = instructor.from_openai(
        openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0), mode=instructor.Mode.TOOLS
    )
    assert isinstance(await many.create(messages=user(PERSON), response_model=Person, **COMMON), Person)


@check
def errors_have_their_types() -> None:
    bad = COMMON | {"model": "other"}
    call = lambda: client(instructor.Mode.TOOLS).create(messages=user(PERSON), response_model=Person, **bad)  # noqa: E731
    assert "not served here" in str(refused(Exception, call))  # instructor wraps what the client raises


run("instructor")
