"""Small facts: days, months, opposites, colours, capitals, animals."""

from __future__ import annotations

from random import Random

from training.conversation import Check, Episode, Turn, draw, phrase
from training.facts import FACTS
from training.words import (
    ANIMAL_LEGS,
    ANIMAL_SOUNDS,
    ANIMAL_YOUNG,
    ANIMALS,
    CAPITALS,
    CITIES,
    COLOURS,
    DAYS,
    DRINKS,
    FOODS,
    FRUITS,
    JOBS,
    MONTHS,
    NAMES,
    NUMBER_WORDS,
    OPPOSITES,
    ORDINALS,
    SEASONS,
    THING_COLOURS,
    a,
)  # fmt: skip

Item = tuple[str, str, tuple[str, ...]]
"""Question, answer, and what the answer must hold."""

_NEXT = (
    "What {k} comes after {x}?", "Which {k} comes after {x}?", "Which {k} follows {x}?", "What comes after {x}?",
    "What is the {k} after {x}?", "After {x} comes which {k}?", "Name the {k} after {x}.",
    "What {k} is next after {x}?", "Tell me the {k} that comes after {x}.",
)  # fmt: skip
_PREVIOUS = (
    "What {k} comes before {x}?", "Which {k} comes before {x}?", "What comes before {x}?",
    "What is the {k} before {x}?", "Which {k} is before {x}?", "Name the {k} before {x}.",
    "Tell me the {k} that comes before {x}.",
)  # fmt: skip


def _calendar(rng: Random) -> Item:
    kind, ring = rng.choice((("day", DAYS), ("month", MONTHS), ("day", DAYS), ("month", MONTHS), ("season", SEASONS)))
    i, roll = rng.randrange(len(ring)), rng.random()
    x, after, before = ring[i], ring[(i + 1) % len(ring)], ring[i - 1]
    big = after[0].upper() + after[1:], before[0].upper() + before[1:], x[0].upper() + x[1:]
    if roll < 0.3:
        return phrase(rng, _NEXT, k=kind, x=x), f"{big[0]} comes after {x}.", (f"{after} comes after",)
    if roll < 0.6:
        return phrase(rng, _PREVIOUS, k=kind, x=x), f"{big[1]} comes before {x}.", (f"{before} comes before",)
    if roll < 0.7 and kind == "day":
        if rng.random() < 0.5:
            ask = phrase(
                rng,
                (
                    "Today is {x}. What day is tomorrow?",
                    "If today is {x}, what is tomorrow?",
                    "If today is {x}, which day is tomorrow?",
                ),
                x=x,
            )
            return ask, f"Tomorrow is {after}.", (f"tomorrow is {after}",)
        ask = phrase(
            rng,
            (
                "Today is {x}. What day was yesterday?",
                "If today is {x}, what was yesterday?",
                "If today is {x}, which day was yesterday?",
            ),
            x=x,
        )
        return ask, f"Yesterday was {before}.", (f"yesterday was {before}",)
    if roll < 0.85 and kind != "season":
        whole = "week" if kind == "day" else "year"
        ask = phrase(rng, ("What is the {o} {k} of the {w}?", "Which {k} is the {o} of the {w}?",
            "Name the {o} {k} of the {w}.",
                           "What's the {o} {k} in a {w}?"), o=ORDINALS[i], k=kind, w=whole)  # fmt: skip
        return ask, f"{x} is the {ORDINALS[i]} {kind} of the {whole}.", (f"{x} is the {ORDINALS[i]}",)
    if roll < 0.92:
        text = ", ".join(ring)
        text = text[0].upper() + text[1:] + "."
        ask = phrase(rng, ("What are the {k}s{w}?", "List the {k}s{w}.", "Name the {k}s{w}.",
            "Tell me all the {k}s{w}.", "Name all {k}s{w}.",
                           "Can you list the {k}s{w}?"), k=kind, w={"day": " of the week", "month": " of the year",
                           "season": ""}[kind])  # fmt: skip
        return ask, text, tuple(ring)
    number, thing, whole = rng.choice(((7, "days", "week"), (12, "months", "year"), (4, "seasons", "year"),
        (24, "hours", "day"),
                                       (60, "minutes", "hour"), (60, "seconds", "minute"), (365, "days", "year"),
                                       (52, "weeks", "year")))  # fmt: skip
    ask = phrase(
        rng,
        ("How many {t} are in a {w}?", "How many {t} does a {w} have?", "How many {t} are there in one {w}?"),
        t=thing,
        w=whole,
    )
    ask = ask.replace(" a hour", " an hour")
    return ask, f"There are {number} {thing} in {a(whole) if whole != 'hour' else 'an hour'}.", (str(number),)


def _opposite(rng: Random) -> Item:
    pair = rng.choice(OPPOSITES)
    x, y = pair if rng.random() < 0.5 else pair[::-1]
    taken = {other for p in OPPOSITES if x in p for other in p if other != x}
    if len(taken) > 1:  # such as light and young, which have two
        y = sorted(taken)[0]
    ask = phrase(rng, ("What is the opposite of {x}?", "What's the opposite of {x}?", "Opposite of {x}",
        "Name the opposite of {x}.",
                       "Give me the opposite of {x}.", "What is the opposite of the word {x}?",
                       "What is the contrary of {x}?",
                       "Which word is the opposite of {x}?", "Tell me the opposite of {x}.", "opposite: {x}",
                       "What is the antonym of {x}?",
                       'What is the opposite of "{x}"?', "Do you know the opposite of {x}?"), x=x)  # fmt: skip
    return ask, f"The opposite of {x} is {y}.", (f"{x} is {y}",)


def _colour(rng: Random) -> Item:
    thing, colour = rng.choice(list(THING_COLOURS.items()))
    ask = phrase(rng, ("What colour is {x}?", "What color is {x}?", "Which colour is {x}?",
        "What is the colour of {x}?", "What is the color of {x}?",
                       "Which color does {x} have?", "What colour does {x} have?", "Tell me the colour of {x}.",
                       "Tell me the color of {x}.",
                       "Can you tell me what color {x} is?", "What's the colour of {x}?", "What's the color of {x}?"),
                       x=thing)  # fmt: skip
    return ask, f"{thing[0].upper()}{thing[1:]} is {colour}.", (f"is {colour}",)


def _capital(rng: Random) -> Item:
    country, city = rng.choice(list(CAPITALS.items()))
    if rng.random() < 0.2:
        ask = phrase(
            rng,
            (
                "{c} is the capital of which country?",
                "Which country has {c} as its capital?",
                "Of which country is {c} the capital?",
            ),
            c=city,
        )
        if city == "London":
            country = "the United Kingdom"
        return ask, f"{city} is the capital of {country}.", (country,)
    ask = phrase(rng, ("What is the capital of {x}?", "What's the capital of {x}?", "Capital of {x}?",
        "Which city is the capital of {x}?",
                       "Name the capital of {x}.", "Tell me the capital of {x}.", "What is the capital city of {x}?",
                       "Do you know the capital of {x}?",
                       "The capital of {x} is", "Can you tell me the capital of {x}?",
                       "What city is the capital of {x}?"), x=country)  # fmt: skip
    return ask, f"The capital of {country} is {city}.", (city,)


def _animal(rng: Random) -> Item:
    roll = rng.random()
    if roll < 0.4:
        x, sound = rng.choice(list(ANIMAL_SOUNDS.items()))
        ask = phrase(rng, ("What does {y} say?", "What sound does {y} make?", "Which sound does {y} make?",
            "What noise does {y} make?",
                           "How does {y} go?"), y=a(x))  # fmt: skip
        return ask, f"{a(x).capitalize()} says {sound}.", (sound,)
    if roll < 0.7:
        x, legs = rng.choice(list(ANIMAL_LEGS.items()))
        ask = phrase(
            rng,
            ("How many legs does {y} have?", "How many legs has {y}?", "What number of legs does {y} have?"),
            y=a(x),
        )
        return ask, f"{a(x).capitalize()} has {legs or 'no'} legs.", (str(legs or "no"),)
    x, young = rng.choice(list(ANIMAL_YOUNG.items()))
    ask = phrase(
        rng,
        (
            "What is a young {x} called?",
            "What do you call a baby {x}?",
            "What is a baby {x} called?",
            "What is the name for a young {x}?",
        ),
        x=x,
    )
    return ask, f"A young {x} is called {a(young)}.", (young,)


def _number_word(rng: Random) -> Item:
    n = rng.randint(0, 20)
    if rng.random() < 0.5:
        ask = phrase(
            rng, ("Write {n} as a word.", "Write the number {n} in words.", "How do you write {n} in words?"), n=n
        )
        return ask, f"{n} is written {NUMBER_WORDS[n]}.", (NUMBER_WORDS[n],)
    ask = phrase(rng, ("Write {w} as a number.", "Which number is {w}?", "Write {w} in digits."), w=NUMBER_WORDS[n])
    return ask, f"{NUMBER_WORDS[n].capitalize()} is {n}.", (str(n),)


def _members(rng: Random) -> Item:
    kind, plural, words = rng.choice(CATEGORIES)
    count = rng.choice((1, 1, 2, 3, 3, 4, 5))
    items = rng.sample(words, count)
    if count == 1:
        ask = phrase(
            rng,
            (
                "Name {x}.",
                "Tell me {x}.",
                "Give me {x}.",
                "Can you name {x}?",
                "Name one {k}.",
                "Give me an example of {x}.",
            ),
            x=a(kind),
            k=kind,
        )
        return (
            ask,
            f"{(items[0] if kind in BARE else a(items[0])).capitalize()}.",
            (),
        )
    ask = phrase(rng, ("List {n} {k}.", "Name {n} {k}.", "Give me {n} {k}.", "Tell me {n} {k}.",
        "Can you list {n} {k}?", "Write down {n} {k}."),
                 n=rng.choice((count, NUMBER_WORDS[count])), k=plural)  # fmt: skip
    return ask, ", ".join(items), ()


def _fact(rng: Random) -> Item:
    asked, answer = rng.choice(FACTS)
    return phrase(rng, asked), answer, (answer.rstrip("!."),)


BARE = ("colour", "color", "city", "name", "drink", "food")  # named without an article
CATEGORIES = (
    ("animal", "animals", ANIMALS), ("colour", "colours", COLOURS), ("color", "colors", COLOURS),
    ("fruit", "fruits", FRUITS), ("city", "cities", CITIES),
    ("name", "names", NAMES), ("drink", "drinks", DRINKS), ("food", "foods", FOODS), ("job", "jobs", JOBS),
)  # fmt: skip
MAKERS = (_members, _fact, _calendar, _opposite, _colour, _capital, _animal, _number_word)


def statements(rng: Random) -> str:
    """A few facts as plain sentences, for raw completion."""
    makers = (_calendar, _opposite, _colour, _capital, _animal, _fact)
    items = [rng.choices(makers, (3, 4, 4, 5, 2, 3))[0](rng)[1] for _ in range(rng.randint(1, 5))]
    return " ".join(dict.fromkeys(items))


def make(rng: Random, held_out: bool) -> Episode:
    """One question, or a few in training.

    The split is by the question's wording: the facts themselves are few, and all are taught.
    """

    def propose() -> tuple[str, Turn]:
        ask, answer, want = rng.choices(MAKERS, (0 if held_out else 1.5, 3, 4, 4, 3, 4, 2, 0.7))[0](rng)
        return f"knowledge {ask.lower().rstrip(' ?.!')}", Turn(ask, answer, Check("contains", want))

    return Episode([draw(held_out, propose) for _ in range(1 if held_out else rng.choice((1, 2, 3, 5)))])
