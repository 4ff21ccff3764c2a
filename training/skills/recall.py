"""Recall a fact that the user told in an earlier turn (or that the system prompt holds)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from training.conversation import Check, Episode, Turn, draw, phrase
from training.skills.recall_facts import ASK, SIMPLE, THINGS, Fact, fact


def _missing(rng: Random) -> Turn:
    """A question about something that was never told."""
    if rng.random() < 0.4:
        kind, thing = rng.choice((("name", "your name"), ("lives", "where you live"), ("job", "your job"),
            ("age", "your age"),
                                  ("hobby", "your hobby")))  # fmt: skip
        return Turn(
            phrase(rng, SIMPLE[kind][3]),
            f"I do not know. You have not told me {thing} yet.",
            Check("contains", ("not told me",)),
        )
    kind = rng.choice(rng.choice(THINGS)[0])
    return Turn(
        phrase(rng, ASK, k=kind),
        f"I do not know. You have not told me your {kind} yet.",
        Check("contains", ("not told me",)),
    )


def _joined(rng: Random, first: str, second: str) -> str:
    """Two told facts in one message."""
    if rng.random() < 0.5:
        return f"{first} {second}"
    starts_with_i = second.startswith(("I ", "I'"))
    return f"{first.rstrip('.!')} and {second if starts_with_i else second[0].lower() + second[1:]}"


def make(
    rng: Random,
    held_out: bool,
    distract: Callable[[Random], list[Turn]] | None = None,
    question: Callable[[Random], Turn] | None = None,
) -> Episode:
    """One to four facts, told in some order, then asked for.

    ``distract`` gives turns to stand between them; ``question`` one to be asked in the same message as a fact.
    """
    if rng.random() < 0.05:
        return Episode([draw(held_out, lambda: (lambda turn: (f"missing {turn.user}", turn))(_missing(rng)))])
    facts: dict[str, Fact] = {}
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        kind, item = fact(rng, held_out)
        if not any(set(kind.split()) & set(other.split()) - {"favourite", "favorite", "number"} for other in facts):
            facts[kind] = item
    told = list(facts.values())
    turns: list[Turn] = []
    system = None
    if len(told) > 1 and rng.random() < 0.2:  # two facts in one message
        first, second = told[0], told[1]
        turns.append(Turn(_joined(rng, first[0], second[0]), first[1]))
        rest = told[2:]
    else:
        rest = told
        if len(told) > 1 and rng.random() < 0.08:
            system = rng.choice(("", "You are a helpful assistant. ", "Facts about the user: ")) + told[0][0]
            rest = told[1:]
        elif rng.random() < 0.06 and "name" in facts:
            system = rng.choice(
                (
                    "The user's name is {v}.",
                    "You are talking to {v}.",
                    "You are a helpful assistant. The user is called {v}.",
                )
            )
            system = system.format(v=facts["name"][4])
            rest = [item for kind, item in facts.items() if kind != "name"]
    for item in rest:
        if question is not None and rng.random() < 0.12:  # a fact and a question in one message
            ask = question(rng)
            turns.append(Turn(f"{item[0]} {ask.user}", f"{item[1].split('! ')[0].rstrip('!.')}. {ask.answer}"))
        else:
            turns.append(Turn(item[0], item[1]))
        if distract is not None and rng.random() < 0.4:
            turns.extend(distract(rng))
    turns = [Turn(t.user, t.answer) for t in turns]
    if distract is not None:
        for _ in range(rng.choice((0, 1, 1, 2, 2, 3))):
            turns.extend(Turn(t.user, t.answer) for t in distract(rng))
    rng.shuffle(told)
    for item in told[: 1 if held_out else rng.choice((1, 2, 4))]:
        ask = item[2]
        if rng.random() < 0.04:
            ask += rng.choice((" Answer with one word.", " Just the answer."))
            turns.append(Turn(ask, item[4], Check("contains", (item[4],))))
        else:
            turns.append(Turn(ask, item[3], Check("contains", (item[4],))))
    return Episode(turns, system=system)
