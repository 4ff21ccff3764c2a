"""Find a fact in a long text: up to about 3,000 tokens of filler around one or more needles."""

from __future__ import annotations

from random import Random

from training.conversation import Check, Episode, Turn, draw, vary
from training.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLOURS,
    COMMON,
    FOODS,
    NAMES,
    NOUNS,
    OBJECTS,
    PLACES,
    VERBS,
    any_name,
    any_word,
    pseudo_word,
)

SENTENCES = (
    "The {p} was {j} in the morning.", "{n} went to the {p} with a {o}.", "A {j} {a} slept near the {p}.",
    "It rained all day in {c}.", "The {a} looked at the {k} {o} and walked on.",
    "{n} and {m} talked about the {w} for an hour.", "Nobody knew where the {o} was.",
    "There were {i} {o}s in the {p}.", "The {w} is a part of the {x}.", "In {c}, people like {f}.",
    "{n} likes to {v} and to {u}.", "The grass is green. The sky is blue. The sun is yellow.",
    "Here we go. There and back again.", "Time went by slowly.", "The {k} {o} stood beside the {l} {o}.",
    "Every evening the {a} came back to the {p}.", "Some {a}s are {j}, but others are not.",
    "{n} bought {f} for {m}.", "The road to {c} is long.", "A {w} without a {x} is like a {y} without a {z}.",
    "{n} painted the {o} {k}.", "On the hill stood a {j} {p}.", "The train to {c} left at {i} o'clock.",
    "{n} wrote a letter to {m}.", "Then the {a} began to {v}.", "Old {n} told a story about the {j} {a}.",
    "The {p} has {i} windows.", "We will {v} tomorrow.", "They {v} and {u} together.",
    "My {o} is older than your {o}.", "The number of {a}s in the {p} is {i}.", "The {w} and the {x} are {j}.",
    "It was a {j} day.",
)  # fmt: skip
REPEATED = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    "Nothing to see here.", "Lorem ipsum dolor.", "This is filler text.",
    "The quick brown fox jumps over the lazy dog.", "All work and no play.", "Blah blah blah.", "La la la.",
)  # fmt: skip
SUBJECTS = (
    "secret code of {x}", "secret number of {x}", "password of {x}", "password for {x}", "code for {x}", "key of {x}",
    "magic word of {x}", "secret word of {x}", "access code for {x}", "secret code of {x}", "ticket number of {x}",
    "phone number of {x}", "name of {x}",
)  # fmt: skip
BARE = (
    "secret code", "secret number", "magic number", "magic word", "password", "pass key", "passkey", "secret word",
    "needle", "code word", "access code", "special number", "key", "hidden word", "answer", "secret", "code",
)  # fmt: skip
TELL = (
    "The {s} is {v}.", "The {s} is {v}.", "The {s} is {v}.", "Remember: the {s} is {v}.",
    "The {s} is {v}. Remember it.", "Important: the {s} is {v}.", "Note that the {s} is {v}.",
    "By the way, the {s} is {v}.", "The {s}: {v}.",
)  # fmt: skip
ASK = (
    "What is the {s}?", "What is the {s}?", "What's the {s}?", "What is the {s} in the text?",
    "Which {s} does the text give?", "Find the {s}.", "Tell me the {s}.", "Can you find the {s}?",
    "What is the {s} mentioned in the text?", "What was the {s}?", "According to the text, what is the {s}?",
    "Question: What is the {s}?", "Give me the {s}.", "the {s}?",
)  # fmt: skip
BEFORE = (
    "{q} Read this text:\n\n{t}", "{q}\n\n{t}", "Read the following text and answer the question: {q}\n\n{t}",
    "{q} Text: {t}", "Find the answer in the text below. {q}\n{t}", "Question: {q}\nText:\n{t}", "{q}\n{t}",
)  # fmt: skip
AFTER = (
    "{t}\n\n{q}", "{t}\n{q}", "{t} {q}", "Read this text:\n\n{t}\n\n{q}", "Text: {t}\n\nQuestion: {q}",
    "Here is a long text.\n{t}\n\n{q}", "There is an important fact hidden in this text.\n{t}\n{q}",
    "Remember this text:\n{t}\n\nNow answer: {q}",
)  # fmt: skip
BOTH = ("{q}\n\n{t}\n\n{q}", "Read the text to answer: {q}\n{t}\nNow: {q}")
FIRST = (
    "Read this text and remember it:\n\n{t}", "I will ask you about this text:\n{t}", "{t}",
    "Here is a text:\n{t}\n\nAre you ready?",
)  # fmt: skip
READY = ("I have read it. What would you like to know?", "Thank you. I have read the text. What is your question?")


def _value(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.5:
        return str(rng.randint(1_000_000, 9_999_999))
    if roll < 0.65:
        return str(rng.randint(10, 999_999))
    if roll < 0.72:
        return "-".join(rng.choice((any_word(rng), str(rng.randint(1, 99)))) for _ in range(rng.randint(2, 3)))
    return rng.choice((any_word(rng), pseudo_word(rng), any_word(rng).upper(), pseudo_word(rng).capitalize()))


def _owner(rng: Random) -> str:
    return rng.choice((f"the {rng.choice(PLACES)}", f"the {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)}",
        rng.choice(CITIES), any_name(rng),
                       f"the {rng.choice(COLOURS)} {rng.choice(OBJECTS)}", f"the {pseudo_word(rng)}"))  # fmt: skip


def _sentence(rng: Random) -> str:
    pick = rng.choice
    return pick(SENTENCES).format(
        p=pick(PLACES), j=pick(ADJECTIVES), n=pick(NAMES), m=pick(NAMES), o=pick(OBJECTS), a=pick(ANIMALS),
        k=pick(COLOURS), l=pick(COLOURS),
        w=pick(NOUNS), x=pick(NOUNS), y=pick(NOUNS), z=pick(NOUNS), c=pick(CITIES), f=pick(FOODS), v=pick(VERBS),
        u=pick(VERBS),
        i=rng.randint(2, 60),
    )  # fmt: skip


def filler(rng: Random, words: int) -> list[str]:
    """About ``words`` words of sentences: prose, one sentence over and over, or random words."""
    style, out, count = rng.random(), [], 0
    if 0.42 <= style < 0.48:  # these take more tokens a word
        words = words // 4
    loop = (
        [_sentence(rng) for _ in range(rng.randint(2, 12))]
        if style < 0.25
        else [rng.choice(REPEATED)]
        if style < 0.35
        else []
    )
    while count < words:
        if loop:
            text = loop[len(out) % len(loop)]
        elif style < 0.42:
            text = " ".join(rng.choices(COMMON, k=rng.randint(4, 12))).capitalize() + "."
        elif style < 0.45:
            text = " ".join(pseudo_word(rng) for _ in range(rng.randint(3, 7))).capitalize() + "."
        elif style < 0.48:
            text = f"Line {len(out) + 1}: {any_word(rng)} {rng.randint(0, 9999)}."
        else:
            text = _sentence(rng)
        out.append(text)
        count += text.count(" ") + 1
    return out


def make(rng: Random, held_out: bool, longest: int = 2300) -> Episode:
    """A text of at most about ``longest`` words (3,000 tokens) with needles, and questions for them."""
    words = rng.choice(
        (rng.randint(10, 150), rng.randint(100, 600), rng.randint(500, longest), rng.randint(longest // 2, longest))
    )
    count = rng.choice((1, 1, 1, 2, 3, 5)) if held_out else rng.choice((1, 1, 2, 3, 5, 8))
    bare = rng.choice(BARE) if rng.random() < 0.35 else None
    needles: dict[str, str] = {}
    while len(needles) < count:
        subject = bare if bare and not needles else rng.choice(SUBJECTS).format(x=_owner(rng))
        value = draw(held_out, lambda: (lambda v: (f"needle {v}", v))(_value(rng)))
        needles.setdefault(subject, value)
    text = filler(rng, words)
    kept = list(needles.items())
    for subject, value in kept:
        text.insert(rng.randint(0, len(text)), rng.choice(TELL).format(s=subject, v=value))
    body = rng.choice((" ", " ", " ", "\n")).join(text)
    rng.shuffle(kept)
    kept = kept[: 1 if held_out else 6]
    turns = []
    for i, (subject, value) in enumerate(kept):
        ask = vary(rng, rng.choice(ASK)).format(s=subject)
        answer, roll = f"The {subject} is {value}.", rng.random()
        if roll < 0.06:
            ask, answer = (
                ask + rng.choice((" Answer with the value only.", " Just the value.", " Reply with the value only.")),
                value,
            )
        if i == 0:
            where = rng.random()
            if where < 0.12:
                turns.append(Turn(rng.choice(FIRST).format(t=body), rng.choice(READY)))
            else:
                ask = rng.choice(AFTER if where < 0.65 else BEFORE if where < 0.92 else BOTH).format(q=ask, t=body)
        turns.append(Turn(ask, answer, Check("contains", (value,))))
    return Episode(turns)
