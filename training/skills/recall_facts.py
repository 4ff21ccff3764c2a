"""The facts that a user may tell, how they are told, and how they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from training.conversation import draw, phrase
from training.words import (
    ANIMALS,
    CITIES,
    COLOURS,
    DAYS,
    DRINKS,
    FOODS,
    FRUITS,
    HOBBIES,
    JOBS,
    MONTHS,
    OBJECTS,
    SEASONS,
    a,
    any_name,
    any_word,
    pseudo_word,
)  # fmt: skip

Fact = tuple[str, str, str, str, str]
"""What the user tells, the acknowledgment, the question, the answer, and the value looked for."""


def _digits(rng: Random) -> str:
    return str(rng.choice((rng.randint(1, 99), rng.randint(100, 9999), rng.randint(10_000, 9_999_999))))


def _city(rng: Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.8 else pseudo_word(rng).capitalize()


# kind: (how it is told, acknowledgments, how it is asked, the answer)
SIMPLE: dict[str, tuple[Callable[[Random], str], tuple[str, ...], tuple[str, ...], tuple[str, ...], str]] = {
    "name": (any_name,
             ("My name is {v}.", "I am {v}.", "I'm {v}.", "Hi, I'm {v}!", "Hello, my name is {v}.", "Call me {v}.",
             "You can call me {v}.",
              "Hi! My name is {v}.", "Hello! I am {v}.", "People call me {v}.", "The name's {v}.",
              "My name is {v}, nice to meet you."),
             ("Nice to meet you, {v}!", "Hello {v}! Nice to meet you.", "Hi {v}! How can I help you?",
              "Nice to meet you, {v}! How can I help you?"),
             ("What is my name?", "What's my name?", "Who am I?", "Do you remember my name?",
             "Can you tell me my name?", "Tell me my name.",
              "What did I say my name was?", "Do you know who I am?", "Do you remember who I am?",
              "And what is my name?", "So what is my name?", "How am I called?", "Do you know my name?",
              "What was my name again?", "Say my name."),
             "Your name is {v}."),
    "lives": (_city,
              ("I live in {v}.", "I come from {v}.", "I am from {v}.", "My home is in {v}.", "I'm living in {v} now.",
              "My city is {v}."),
              ("{v} sounds like a nice place!", "I will remember that you live in {v}."),
              ("Where do I live?", "Which city do I live in?", "What city am I from?", "Where am I from?",
              "In which city is my home?",
               "Do you remember where I live?", "What is my city?"),
              "You live in {v}."),
    "job": (lambda r: a(r.choice(JOBS)),
            ("I am {v}.", "I work as {v}.", "My job is {v}.", "I'm {v} by profession.", "For a living, I work as {v}."),
            ("Being {v} sounds interesting!", "I will remember that you are {v}."),
            ("What is my job?", "What do I do for a living?", "What do I work as?", "Do you remember my job?",
            "What's my profession?"),
            "You are {v}."),
    "hobby": (lambda r: r.choice(HOBBIES),
              ("My hobby is {v}.", "I enjoy {v}.", "In my free time, my hobby is {v}.", "I love {v}.",
              "My favourite hobby is {v}."),
              ("{V} sounds like fun!", "I will remember that you like {v}."),
              ("What is my hobby?", "What do I enjoy?", "What do I like to do in my free time?",
              "Do you remember my hobby?"),
              "Your hobby is {v}."),
    "age": (lambda r: str(r.randint(3, 99)),
            ("I am {v} years old.", "I'm {v} years old.", "My age is {v}.", "I just turned {v}."),
            ("Thank you for telling me. You are {v} years old.", "I will remember that you are {v}."),
            ("How old am I?", "What is my age?", "Do you remember how old I am?", "What's my age?"),
            "You are {v} years old."),
}  # fmt: skip

THINGS: list[tuple[tuple[str, ...], Callable[[Random], str]]] = [  # "my <thing> is <value>"
    (("favourite colour", "favorite color", "favourite color", "favorite colour"), lambda r: r.choice(COLOURS)),
    (("favourite food", "favorite food", "favourite meal"), lambda r: r.choice(FOODS)),
    (("favourite drink", "favorite drink"), lambda r: r.choice(DRINKS)),
    (("favourite fruit", "favorite fruit"), lambda r: r.choice(FRUITS)),
    (("favourite animal", "favorite animal"), lambda r: r.choice(ANIMALS)),
    (("favourite season", "favorite season"), lambda r: r.choice(SEASONS)),
    (("favourite day", "favorite day", "day off"), lambda r: r.choice(DAYS)),
    (("favourite month", "birthday month", "favorite month"), lambda r: r.choice(MONTHS)),
    (("lucky number", "favourite number", "favorite number", "number", "room number", "house number", "ticket number",
    "locker number",
      "order number", "phone number", "code", "PIN", "secret number", "account number", "seat"), _digits),
    (("secret word", "password", "magic word", "code word", "favourite word", "favorite word", "safe word"), any_word),
    (("dog's name", "cat's name", "friend's name", "brother's name", "sister's name", "mother's name", "father's name",
    "teacher's name",
      "best friend's name", "neighbour's name", "boss's name", "daughter's name", "son's name", "parrot's name",
      "horse's name",
      "best friend", "neighbour", "teacher", "doctor"), any_name),
    (("car's colour", "bicycle's color", "car's color", "door's colour", "hat's colour", "eye colour", "hair color"),
     lambda r: r.choice(COLOURS)),
    (("hometown", "favourite city", "favorite city", "birthplace", "destination"), _city),
    (("username", "login", "nickname", "team's name", "project's name", "boat's name"), lambda r: pseudo_word(r)),
]  # fmt: skip
_TELL = (
    "My {k} is {v}.", "My {k} is {v}.", "Remember that my {k} is {v}.", "Please remember: my {k} is {v}.",
    "By the way, my {k} is {v}.", "Just so you know, my {k} is {v}.", "I want you to remember that my {k} is {v}.",
    "Note that my {k} is {v}.",
)  # fmt: skip
_ACK = ("I will remember that your {k} is {v}.", "Good to know! Your {k} is {v}.", "Noted: your {k} is {v}.")
ASK = (
    "And what is my {k}?", "What is my {k}?", "What's my {k}?", "Do you remember my {k}?", "Can you tell me my {k}?",
    "Tell me my {k}.", "What was my {k} again?", "Do you know my {k}?", "What did I say my {k} was?",
    "Which {k} did I mention?", "Remind me of my {k}.",
)  # fmt: skip


def _pet(rng: Random) -> tuple[str, Fact]:
    """A pet with its kind and name; the question is for either."""
    animal, name = rng.choice(ANIMALS), any_name(rng)
    tell = phrase(rng, ("I have {x} called {n}.", "I have {x} named {n}.", "My {y} is called {n}.",
        "My {y}'s name is {n}.", "Can you remember that my {y} is called {n}?", "Remember that my {y} is called {n}.",
        "I own {x}. "
                        "Its name is {n}.", "My pet is {x} called {n}."), x=a(animal), y=animal, n=name)  # fmt: skip
    if rng.random() < 0.35:
        age, they = rng.randint(1, 20), rng.choice(("he", "she", "it"))
        tell = tell.rstrip(".!? ") + f" and {they} is {age} years old."
        if rng.random() < 0.6:
            ask = phrase(
                rng,
                (
                    "How old is my {y}?",
                    "How old is {n}?",
                    "What is the age of my {y}?",
                    "What age is {n}?",
                    "How old is my pet?",
                ),
                y=animal,
                n=name,
            )
            return f"pet {name} {animal}", (
                tell,
                f"I will remember your {animal} {name}.",
                ask,
                f"{name} is {age} years old.",
                str(age),
            )
    ack = rng.choice(("{n} is a nice name for {x}!", "I will remember your {y} {n}.")).format(
        n=name, x=a(animal), y=animal
    )
    if rng.random() < 0.5:
        ask = phrase(rng, ("What is my {y} called?", "What is my {y}'s name?", "What's the name of my {y}?",
            "What is my pet called?",
                           "What is the name of my pet?", "Do you remember the name of my {y}?",
                           "How is my {y} called?"), y=animal)  # fmt: skip
        what = animal if animal in ask.lower() else "pet"
        return f"pet {name} {animal}", (tell, ack, ask, f"Your {what} is called {name}.", name)
    ask = phrase(
        rng,
        ("What kind of pet do I have?", "What animal is {n}?", "Which animal do I have?", "What pet do I have?"),
        n=name,
    )
    return f"pet {name} {animal}", (tell, ack, ask, f"You have {a(animal)} called {name}.", animal)


def _count(rng: Random) -> tuple[str, Fact]:
    thing, number = rng.choice((rng.choice(ANIMALS), rng.choice(OBJECTS))), rng.randint(2, 30)
    plural = {
        "sheep": "sheep",
        "goose": "geese",
        "mouse": "mice",
        "wolf": "wolves",
        "puppy": "puppies",
        "pony": "ponies",
    }.get(thing, thing + "s")
    plural = (
        plural.replace("foxs", "foxes").replace("lynxs", "lynxes").replace("boxs", "boxes").replace("brushs", "brushes")
    )
    tell = phrase(
        rng,
        ("I have {v} {k}.", "I own {v} {k}.", "There are {v} {k} in my house.", "I bought {v} {k} today."),
        v=number,
        k=plural,
    )
    ask = phrase(
        rng,
        ("How many {k} do I have?", "How many {k} did I say I have?", "Do you remember how many {k} I have?"),
        k=plural,
    )
    return f"count {thing} {number}", (
        tell,
        f"{number} {plural}, I will remember that.",
        ask,
        f"You have {number} {plural}.",
        str(number),
    )


def _plain(rng: Random) -> tuple[str, Fact]:
    """ "Remember the number 7341.": something to keep that is nobody's."""
    kind = rng.choice(("number", "number", "word", "word", "code", "name", "colour", "city", "animal", "sentence"))
    value = {"number": _digits, "word": any_word, "code": _digits, "name": any_name,
        "colour": lambda r: r.choice(COLOURS), "city": _city,
             "animal": lambda r: r.choice(ANIMALS),
             "sentence": lambda r: f"the {any_word(r)} is {any_word(r)}"}[kind](rng)  # fmt: skip
    tell = phrase(rng, ("Remember the {k} {v}.", "Please remember the {k} {v}.", "Remember this {k}: {v}",
        "Keep this {k} in mind: {v}",
                        "The {k} is {v}. Remember it.", "I want you to remember the {k} {v}.",
                        "Memorize the {k} {v}."), k=kind, v=value)  # fmt: skip
    ask = phrase(rng, ("What {k} did I ask you to remember?", "Which {k} should you remember?", "What was the {k}?",
        "What is the {k} I told you?",
                       "What was the {k} again?", "Do you remember the {k}?",
                       "Tell me the {k} that I asked you to remember.", "What is the {k}?"), k=kind)  # fmt: skip
    return f"plain {value}", (tell, f"I will remember the {kind} {value}.", ask, f"The {kind} is {value}.", value)


def fact(rng: Random, held_out: bool) -> tuple[str, Fact]:
    """A kind of fact and its wordings. The split is by kind and value."""

    def propose() -> tuple[str, tuple[str, Fact]]:
        roll = rng.random()
        if roll < 0.14:
            key, item = _pet(rng)
            return key, ("pet", item)
        if roll < 0.27 and roll >= 0.2:
            key, item = _plain(rng)
            return key, (f"plain {item[4]}", item)
        if roll < 0.2:
            key, item = _count(rng)
            return key, (f"count {item[2]}", item)
        if roll < 0.55:
            kind = rng.choice(("name", "name", "name", *SIMPLE))
            source, tell, ack, ask, answer = SIMPLE[kind]
            value = source(rng)
            big = value[0].upper() + value[1:]
            told, known = phrase(rng, tell, v=value), rng.choice(ack).format(v=value, V=big)
            short = value.split(" ", 1)[1] if kind == "job" else value
            return f"{kind} {value}", (kind, (told, known, phrase(rng, ask), answer.format(v=value), short))
        kinds, source = rng.choice(THINGS)
        kind, value = rng.choice(kinds), source(rng)
        told, known = phrase(rng, _TELL, k=kind, v=value), rng.choice(_ACK).format(k=kind, v=value)
        return f"{kind} {value}", (kind, (told, known, phrase(rng, ASK, k=kind), f"Your {kind} is {value}.", value))

    return draw(held_out, propose)
