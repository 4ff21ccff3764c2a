"""The skills, and how conversations are mixed from them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from training.conversation import Episode, Span, Turn, render
from training.skills import arithmetic, chat, copying, counting, json_answer, knowledge, needle, recall, stories, tools

SYSTEMS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful, friendly assistant.",
    "Answer briefly.", "You are minisgl's demo model.", "You are a small language model.",
    "Be kind and answer in one sentence.", "You are an assistant. Answer the user's questions.",
    "Follow the instructions exactly.", "You are a careful assistant who always tells the truth.",
    "Today is a good day.", "You are an AI assistant.", "Be concise.", "", "Help the user.",
)  # fmt: skip

SIMPLE: dict[str, Callable[[Random, bool], Episode]] = {
    "chat": chat.make, "copying": copying.make, "arithmetic": arithmetic.make, "counting": counting.make,
    "knowledge": knowledge.make,
    "stories": stories.make, "json": json_answer.make,
}  # fmt: skip
_SIMPLE_NAMES = list(SIMPLE)
_SIMPLE_WEIGHTS = (2.0, 3.5, 2.0, 2.5, 2.0, 0.8, 1.2)


def other_turns(rng: Random) -> list[Turn]:
    """Turns of some other skill, to stand between a fact and its question."""
    name = rng.choices(_SIMPLE_NAMES, (3, 1.5, 2, 1, 2, 0.4, 0.2))[0]
    return SIMPLE[name](rng, False).turns[:2]


def _ordinary(rng: Random, held_out: bool, tools_there: set[str]) -> list[Turn]:
    """A turn that needs none of the tools. The invented tools answer no ordinary question; the known ones may."""
    names = ["chat", "chat", "copying", "counting"]
    if not tools_there & {"calculate", "add", "multiply"}:
        names += ["arithmetic", "arithmetic"]
    if not tools_there & {"get_capital", "translate", "search", "get_date", "get_time"}:
        names += ["knowledge", "knowledge"]
    name = rng.choice(names)
    if name == "chat" and tools_there:
        return [chat.small_talk(rng, held_out)]
    return SIMPLE[name](rng, held_out).turns[:1]


def both(rng: Random) -> Turn:
    """Two short questions in one message, answered one after the other."""
    first, second = (SIMPLE[rng.choice(("knowledge", "arithmetic"))](rng, False).turns[0] for _ in range(2))
    ask = first.user.rstrip(" ?.!")
    glue = rng.choice((" and ", "? ", "? And ", ", and also: ", " and also ", "?\n"))
    return Turn(ask + glue + second.user, f"{first.answer} {second.answer}")


def _plain_question(rng: Random) -> Turn:
    """A question with a short answer that goes with anything."""
    return SIMPLE[rng.choice(("knowledge", "arithmetic"))](rng, False).turns[0]


def _recall(rng: Random, held_out: bool) -> Episode:
    return recall.make(rng, held_out, other_turns, _plain_question)


def _tools(rng: Random, held_out: bool) -> Episode:
    return tools.make(rng, held_out, _ordinary)


SKILLS: dict[str, Callable[[Random, bool], Episode]] = {
    **SIMPLE,
    "phrases": copying.make_phrase,
    "recall": _recall,
    "needle": needle.make,
    "tools": _tools,
}


def mixed(rng: Random) -> Episode:
    """One training conversation: usually several skills one after the other."""
    roll = rng.random()
    if roll < 0.16:
        episode = _recall(rng, False)
        if rng.random() < 0.4:  # facts are told in the middle of a chat too
            episode.turns = other_turns(rng) + episode.turns
    elif roll < 0.33:
        episode = _tools(rng, False)
    elif roll < 0.38:
        episode = Episode([])
        for _ in range(rng.randint(6, 16)):  # a long chat
            name = rng.choices(_SIMPLE_NAMES, _SIMPLE_WEIGHTS)[0]
            episode.turns.extend(SIMPLE[name](rng, False).turns)
        told = _recall(rng, False)
        cut = len(told.turns) - 1
        episode.turns = told.turns[:cut] + episode.turns + told.turns[cut:]
    else:
        episode = Episode([])
        for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
            name = rng.choices(_SIMPLE_NAMES, _SIMPLE_WEIGHTS)[0]
            episode.turns.extend(SIMPLE[name](rng, False).turns)
        if rng.random() < 0.06:
            episode.turns.append(both(rng))
    if episode.system is None and rng.random() < 0.35:
        episode.system = (
            rng.choice(SYSTEMS) if rng.random() < 0.85 else " ".join(needle.filler(rng, rng.randint(5, 60)))
        )
    return episode


def long_text(rng: Random) -> Episode:
    """A needle episode, sometimes after or before other turns."""
    episode = needle.make(rng, False)
    if rng.random() < 0.2:
        episode.turns = other_turns(rng) + episode.turns
    if rng.random() < 0.3:
        episode.turns = episode.turns + other_turns(rng)
    if rng.random() < 0.35:
        episode.system = rng.choice(SYSTEMS)
    return episode


def _question(rng: Random) -> Turn:
    """A short question of any simple skill."""
    name = rng.choices(_SIMPLE_NAMES, (1, 1, 2, 2, 3, 0.5, 0.2))[0]
    return SIMPLE[name](rng, False).turns[0]


def raw_text(rng: Random) -> list[Span]:
    """Plain text that ends with the end-of-text token, for completion without a chat."""
    roll = rng.random()
    if roll < 0.3:
        turns = [_question(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        before, between, after = rng.choice(
            (
                ("Q: ", "\nA:", " "),
                ("Question: ", "\nAnswer:", " "),
                ("User: ", "\nAssistant:", " "),
                ("", "", "\n"),
                ("", "", "\n"),
            )
        )
        spans: list[Span] = []
        for i, turn in enumerate(turns):
            spans += [(("\n\n" if i else "") + before + turn.user + between, False), (after + turn.answer, True)]
        return [*spans, ("<|endoftext|>", True)]
    text = (
        stories.raw(rng)
        if roll < 0.75
        else knowledge.statements(rng)
        if roll < 0.9
        else " ".join(needle.filler(rng, rng.randint(10, 80)))
    )
    head = "<|endoftext|>" if rng.random() < 0.4 else ""
    return [(head, False), (f"{text}<|endoftext|>", True)]


def document(rng: Random, long: bool) -> list[Span]:
    """One training document."""
    if long:
        return render(long_text(rng))
    return raw_text(rng) if rng.random() < 0.08 else render(mixed(rng))


def held_out_episode(skill: str, rng: Random) -> Episode:
    """A held-out item of the skill; half of them come after other turns or a system prompt, as in a real chat."""
    episode = SKILLS[skill](rng, True)
    if rng.random() < 0.3 and skill != "tools":
        episode.turns = [Turn(t.user, t.answer) for t in other_turns(rng)] + episode.turns
    if episode.system is None and rng.random() < 0.3:
        episode.system = rng.choice(SYSTEMS)
    return episode
