"""Counting, spelling, and sorting short lists."""

from __future__ import annotations

from random import Random

from training.conversation import Check, Episode, Turn, draw, phrase
from training.words import (
    ANIMALS,
    CITIES,
    COLOURS,
    COMMON,
    FOODS,
    FRUITS,
    GENERAL,
    NAMES,
    NUMBER_WORDS,
    OBJECTS,
    pseudo_word,
)

Item = tuple[str, Turn]


def _numbers(values: list[int]) -> str:
    return ", ".join(map(str, values))


def _count(rng: Random) -> Item:
    roll, n = rng.random(), rng.randint(2, 30)
    if roll < 0.06:
        n = rng.randint(2, 20)
        ask = phrase(
            rng,
            ("Count to {n}.", "Count from one to {n}.", "Can you count to {n}?", "Please count up to {n}."),
            n=NUMBER_WORDS[n],
        )
        answer = _numbers(list(range(1, n + 1)))
        return ask, Turn(ask, answer, Check("exact", answer))
    if roll < 0.35:
        ask = phrase(rng, ("Count to {n}.", "Count from 1 to {n}.", "Can you count to {n}?", "Please count up to {n}.",
            "Count up to {n}",
                           "List the numbers from 1 to {n}.", "Write the numbers 1 to {n}.",
                           "Say the numbers from one to {n}."), n=n)  # fmt: skip
        answer = _numbers(list(range(1, n + 1)))
    elif roll < 0.65:
        start = rng.randint(0, 99)
        stop = start + rng.randint(2, 25)
        ask = phrase(rng, ("Count from {a} to {b}.", "List the numbers from {a} to {b}.",
            "Can you count from {a} to {b}?",
                           "Write all numbers from {a} to {b}.", "Which numbers are there from {a} to {b}?",
                           "Count {a} to {b}"), a=start, b=stop)  # fmt: skip
        answer = _numbers(list(range(start, stop + 1)))
    elif roll < 0.85:
        start = rng.randint(3, 60)
        stop = (
            max(0, start - rng.randint(2, 20))
            if rng.random() < 0.5
            else rng.choice((0, 1))
            if start < 25
            else start - 10
        )
        ask = phrase(
            rng,
            ("Count down from {a} to {b}.", "Count backwards from {a} to {b}.", "Count down {a} to {b}"),
            a=start,
            b=stop,
        )
        answer = _numbers(list(range(start, stop - 1, -1)))
    else:
        step, k = rng.choice((2, 5, 10, 3)), rng.randint(3, 12)
        ask = phrase(rng, ("Count by {w}s from {s} to {b}.", "Count in {w}s from {s} to {b}.",
            "Count from {s} to {b} in steps of {s}."),
                     w=NUMBER_WORDS[step], s=step, b=step * k)  # fmt: skip
        answer = _numbers(list(range(step, step * k + 1, step)))
    return ask, Turn(ask, answer, Check("exact", answer))


_LISTED = sorted(
    {
        w.replace(" ", "")
        for w in (*COMMON, *GENERAL, *NAMES, *(n.lower() for n in NAMES), *FOODS, *CITIES)
        if w.isascii()
    }
)


def _word(rng: Random) -> str:
    return rng.choice(_LISTED) if rng.random() < 0.75 else pseudo_word(rng)


def _spell(rng: Random) -> Item:
    """Letters of a word.

    What letters a word of one token has must be taught, so listed words are split by the question, others by the word.
    """
    word = _word(rng)
    known = word in _LISTED
    spelled, roll, plain = "-".join(word), rng.random(), word
    word = rng.choice((word, word, word, f"'{word}'", f'"{word}"'))
    if roll < 0.35:
        ask = phrase(
            rng,
            (
                "Spell the word {w}.",
                "How do you spell {w}?",
                "Spell {w}.",
                "Can you spell {w}?",
                "Spell out {w}, please.",
            ),
            w=word,
        )
        return f"spell {ask.lower() if known else plain}", Turn(ask, f"{spelled}.", Check("contains", (spelled,)))
    if roll < 0.6:
        n = len(plain)
        ask = phrase(rng, ("How many letters are in {w}?", "How many letters does {w} have?",
            "How many letters are in the word {w}?",
                           "Count the letters in {w}.", "How long is the word {w}?",
                           "How many letters are there in {w}?"), w=word)  # fmt: skip
        return f"spell {ask.lower() if known else plain}", Turn(ask, f"{spelled}: {n} letters.", Check("number", n))
    letter = rng.choice(plain) if rng.random() < 0.5 else max(plain, key=plain.count)
    n = plain.count(letter)
    ask = phrase(rng, ("How many {l}'s are in {w}?", "How many times does the letter {l} appear in {w}?",
        "How often is {l} in the word {w}?",
                       "How many times does {l} occur in {w}?", "Count the letter {l} in {w}.",
                       "How many {l}s are in {w}?"), l=letter, w=word)  # fmt: skip
    times = "once" if n == 1 else f"{n} times"
    return f"spell {ask.lower() if known else plain}", Turn(
        ask, f"{spelled}: the letter {letter} appears {times}.", Check("contains", (f"appears {times}",))
    )


def _items(rng: Random, most: int) -> list[str]:
    source = rng.choice((FRUITS, ANIMALS, COLOURS, OBJECTS, COMMON, NAMES))
    return rng.sample(source, rng.randint(2, min(most, len(source))))


def _glue(rng: Random, items: list[str]) -> str:
    return rng.choice((", ".join(items), ", ".join(items), ", ".join(items),
        " ".join(i.replace(" ", "-") for i in items),
                       "\n" + "\n".join(f"- {i}" for i in items),
                       ", ".join(items[:-1]) + " and " + items[-1]))  # fmt: skip


def _continue(rng: Random) -> Item:
    """The next numbers of a regular sequence."""
    start, step, shown = rng.randint(0, 30), rng.choice((1, 1, 2, 2, 3, 5, 10)), rng.randint(3, 6)
    start = step * rng.randint(0, 3) if rng.random() < 0.5 else start
    values = [start + step * i for i in range(shown + 3)]
    ask = phrase(rng, ("Continue the sequence: {l}", "Continue: {l}", "What comes next: {l}",
        "Which numbers come next? {l}", "Continue this sequence: {l}",
                       "What are the next numbers: {l}"), l=_numbers(values[:shown]))  # fmt: skip
    return f"continue {values}", Turn(ask, _numbers(values[shown:]), Check("exact", _numbers(values[shown:])))


def _length(rng: Random) -> Item:
    items = _items(rng, 10)
    if rng.random() < 0.35:  # one item among repetitions
        items = [rng.choice(items[:3]) for _ in range(rng.randint(2, 10))]
        item = rng.choice(items)
        n = items.count(item)
        ask = phrase(rng, ("How many times does {w} appear in this list: {l}", "How often is {w} in this list? {l}",
            "Count how often {w} occurs: {l}"),
                     w=item, l=", ".join(items))  # fmt: skip
        times = "once" if n == 1 else f"{n} times"
        return f"often {item} {items}", Turn(ask, f"{item} appears {times}.", Check("contains", (f"appears {times}",)))
    ask = phrase(rng, ("How many items are in this list: {l}", "How many words are in this list? {l}",
        "Count the items: {l}", "How many are these? {l}",
                       "How many things are in the list {l}?", "Count the words in this list: {l}"),
                       l=", ".join(items))  # fmt: skip
    return f"length {items}", Turn(ask, f"There are {len(items)}.", Check("number", len(items)))


def _sort(rng: Random) -> Item:
    if rng.random() < 0.55:
        top = rng.choice((9, 20, 99, 99, 99, 999))
        values = rng.sample(range(top + 1), rng.randint(2, 8))
        down = rng.random() < 0.3
        up = ("Sort these numbers: {l}", "Sort: {l}", "Sort the numbers {l}.", "Sort {l}",
            "Put these numbers in order: {l}",
              "Sort these numbers from smallest to largest: {l}", "Order these numbers: {l}",
              "Sort in ascending order: {l}",
              "Arrange these numbers from low to high: {l}", "Can you sort these numbers? {l}",
              "Sort this list of numbers: {l}")  # fmt: skip
        falling = ("Sort these numbers from largest to smallest: {l}", "Sort in descending order: {l}",
            "Order these numbers from high to low: {l}",
                   "Put these numbers in descending order: {l}", "Sort these numbers, largest first: {l}")  # fmt: skip
        listing = rng.choice((", ", ", ", " ")).join(map(str, values))
        if rng.random() < 0.1:
            listing = f"[{_numbers(values)}]"
        ask = phrase(rng, falling if down else up, l=listing)
        answer = _numbers(sorted(values, reverse=down))
        return f"sort {values}", Turn(ask, answer, Check("exact", answer))
    items = _items(rng, 6)
    ask = phrase(rng, ("Sort these words: {l}", "Sort these words alphabetically: {l}",
        "Put these words in alphabetical order: {l}", "Sort alphabetically: {l}",
                       "Sort the words {l}.", "Order these words from A to Z: {l}",
                       "Arrange these words alphabetically: {l}", "Sort: {l}",
                       "Can you sort these words? {l}"), l=_glue(rng,
                       items) if rng.random() < 0.3 else ", ".join(items))  # fmt: skip
    if "-" in ask:
        items = [i.replace(" ", "-") for i in items] if "\n" not in ask else items
    answer = ", ".join(sorted(items))
    return f"sort {items}", Turn(ask, answer, Check("exact", answer))


def _pick(rng: Random) -> Item:
    values = rng.sample(range(100), rng.randint(2, 7))
    big = rng.random() < 0.5
    if len(values) == 2 and rng.random() < 0.8:
        ask = phrase(rng, ("Which is {w}, {a} or {b}?", "Which number is {w}: {a} or {b}?", "What is {w}, {a} or {b}?"),
                     w=rng.choice(("larger", "bigger", "greater")) if big else rng.choice(("smaller", "less")),
                     a=values[0], b=values[1])  # fmt: skip
        value = max(values) if big else min(values)
        return f"pick {values}", Turn(
            ask, f"{value} is {'larger' if big else 'smaller'}.", Check("contains", (f"{value} is",))
        )
    if rng.random() < 0.2:
        x, y = values[0], values[1]
        more = rng.choice(("greater", "larger", "bigger")) if big else rng.choice(("smaller", "less"))
        ask = phrase(
            rng, ("Is {x} {w} than {y}?", "Is the number {x} {w} than {y}?", "is {x} {w} than {y}"), x=x, y=y, w=more
        )
        yes = (x > y) == big
        answer = f"Yes, {x} is {more} than {y}." if yes else f"No, {x} is not {more} than {y}."
        return f"than {values[:2]}", Turn(ask, answer, Check("exact", answer))
    if rng.random() < 0.2:
        value = values[0]
        kind = "even" if value % 2 == 0 else "odd"
        ask = phrase(
            rng,
            ("Is {a} even or odd?", "Is {a} an even number or an odd number?", "Is the number {a} odd or even?"),
            a=value,
        )
        return f"even {ask}", Turn(ask, f"{value} is {kind}.", Check("contains", (f"is {kind}",)))
    if rng.random() < 0.35:
        items = rng.sample(COMMON, rng.randint(3, 6)) if rng.random() < 0.5 else list(map(str, values))
        ask = phrase(
            rng,
            ("Reverse this list: {l}", "Write this list backwards: {l}", "Reverse the order: {l}"),
            l=", ".join(items),
        )
        answer = ", ".join(reversed(items))
        return f"reverse {items}", Turn(ask, answer, Check("exact", answer))
    word = rng.choice(("largest", "biggest", "greatest")) if big else rng.choice(("smallest", "lowest"))
    value = max(values) if big else min(values)
    ask = phrase(rng, ("What is the {w} of these numbers: {l}", "Which number is the {w}: {l}",
        "Find the {w} number: {l}", "Which is the {w}? {l}"),
                 w=word, l=_numbers(values))  # fmt: skip
    return f"pick {values}", Turn(
        ask, f"The {'largest' if big else 'smallest'} number is {value}.", Check("number", value)
    )


MAKERS = (_count, _spell, _length, _sort, _pick, _continue)


def make(rng: Random, held_out: bool) -> Episode:
    """One task, or a few in training."""
    return Episode([
        draw(held_out, lambda: rng.choices(MAKERS, (3, 4, 1.5, 4, 1.5,
        0.7))[0](rng)) for _ in range(1 if held_out else rng.choice((1, 1, 2, 3)))
    ])  # fmt: skip
