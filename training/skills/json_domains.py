"""The things that JSON objects describe: their fields, and the clauses that tell the values."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from training.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLOURS,
    DAYS,
    FOODS,
    FRUITS,
    HOBBIES,
    JOBS,
    MONTHS,
    OBJECTS,
    a,
    any_name,
    any_word,
    pseudo_word,
)  # fmt: skip

Value = str | int | float | bool | list[str]
Field = tuple[tuple[str, ...], str, Callable[[Random], tuple[Value, str]]]
"""Possible names, JSON type, and a maker of a value with the clause that tells it ({s} stands for the subject)."""


def _text(values: Callable[[Random], str], *clauses: str) -> Callable[[Random], tuple[Value, str]]:
    def make_one(rng: Random) -> tuple[Value, str]:
        value = values(rng)
        return value, rng.choice(clauses).replace("{v}", value).replace("{a}", a(value))

    return make_one


def _int(low: int, high: int, *clauses: str) -> Callable[[Random], tuple[Value, str]]:
    def make_one(rng: Random) -> tuple[Value, str]:
        value = rng.randint(low, high)
        return value, rng.choice(clauses).replace("{v}", str(value))

    return make_one


def _bool(*pairs: tuple[str, str]) -> Callable[[Random], tuple[Value, str]]:
    def make_one(rng: Random) -> tuple[Value, str]:
        value, pair = rng.random() < 0.5, rng.choice(pairs)
        return value, pair[0] if value else pair[1]

    return make_one


def _many(values: list[str], *clauses: str) -> Callable[[Random], tuple[Value, str]]:
    def make_one(rng: Random) -> tuple[Value, str]:
        items = rng.sample(values, rng.randint(1, 4))
        listed = items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
        return items, rng.choice(clauses).replace("{v}", listed)

    return make_one


def _price(*clauses: str) -> Callable[[Random], tuple[Value, str]]:
    def make_one(rng: Random) -> tuple[Value, str]:
        value = rng.randint(1, 99) + rng.choice((0.5, 0.25, 0.75, 0.99, 0.95))
        return value, rng.choice(clauses).replace("{v}", str(value))

    return make_one


EVENTS = ("party", "concert", "meeting", "match", "dinner", "lesson", "workshop", "picnic", "festival", "exam")
DOMAINS: list[tuple[str, Callable[[Random], str], tuple[str, ...], list[Field]]] = [
    ("person", any_name, ("name", "first_name", "person", "user", "customer"), [
        (("age", "years", "age_in_years"), "integer", _int(1, 99, "{s} is {v} years old", "{s} is {v}",
        "{s} turned {v} this year")),
        (("city", "town", "home", "location"), "string", _text(lambda r: r.choice(CITIES), "{s} lives in {v}",
        "{s} is from {v}", "{s} comes from {v}")),
        (("job", "profession", "occupation"), "string", _text(lambda r: r.choice(JOBS), "{s} is {a}",
        "{s} works as {a}", "{s} has a job as {a}")),
        (("hobbies", "likes", "interests"), "array of strings", _many(HOBBIES, "{s} likes {v}", "{s} enjoys {v}",
        "the hobbies of {s} are {v}")),
        (("member", "is_member"), "boolean", _bool(("{s} is a member", "{s} is not a member"),
        ("{s} is a member of the club", "{s} is not a member of the club"))),
        (("married", "is_married"), "boolean", _bool(("{s} is married", "{s} is not married"))),
        (("pet", "animal"), "string", _text(lambda r: r.choice(ANIMALS), "{s} has {a}", "{s} owns {a}",
        "{s} has {a} as a pet")),
        (("children", "kids", "number_of_children"), "integer", _int(2, 6, "{s} has {v} children", "{s} has {v} kids")),
        (("favourite_colour", "favorite_color", "color", "colour"), "string",
        _text(lambda r: r.choice(COLOURS), "{s} loves the colour {v}", "the favourite colour of {s} is {v}")),
    ]),
    ("product", lambda r: f"the {r.choice(OBJECTS)}", ("product", "item", "name", "article"), [
        (("price", "cost"), "number", _price("{s} costs {v} dollars", "{s} costs {v} euros",
        "the price of {s} is {v}")),
        (("colour", "color"), "string", _text(lambda r: r.choice(COLOURS), "{s} is {v}", "{s} comes in {v}")),
        (("in_stock", "available"), "boolean", _bool(("{s} is in stock", "{s} is not in stock"),
        ("{s} is available", "{s} is not available"))),
        (("quantity", "count", "amount", "stock"), "integer", _int(2, 500, "there are {v} pieces of {s}",
        "we have {v} pieces of {s}")),
        (("weight", "weight_kg", "kilos"), "integer", _int(1, 60, "{s} weighs {v} kilograms", "{s} weighs {v} kg")),
        (("brand", "maker", "company"), "string", _text(lambda r: pseudo_word(r).capitalize(), "{s} is made by {v}",
        "{s} comes from the company {v}")),
        (("tags", "labels", "keywords"), "array of strings", _many(ADJECTIVES, "the tags of {s} are {v}",
        "{s} is tagged {v}")),
        (("id", "code", "number"), "integer", _int(1000, 99999, "{s} has the number {v}", "the id of {s} is {v}")),
    ]),
    ("event", lambda r: f"the {r.choice(EVENTS)}",
     ("event", "title", "name", "what"), [
        (("day", "weekday"), "string", _text(lambda r: r.choice(DAYS), "{s} is on {v}", "{s} takes place on {v}")),
        (("month",), "string", _text(lambda r: r.choice(MONTHS), "{s} is in {v}", "{s} takes place in {v}")),
        (("city", "place", "location"), "string", _text(lambda r: r.choice(CITIES), "{s} is held in {v}",
        "{s} happens in {v}")),
        (("guests", "people", "participants", "attendees"), "integer",
        _int(2, 300, "{v} people come to {s}", "there are {v} guests at {s}")),
        (("free", "is_free"), "boolean", _bool(("{s} is free", "{s} is not free"))),
        (("host", "organizer", "speaker"), "string", _text(any_name, "{s} is organised by {v}",
        "{v} is the host of {s}")),
        (("hour", "time", "start"), "integer", _int(1, 12, "{s} starts at {v} o'clock", "{s} begins at {v} o'clock")),
        (("food", "menu", "snacks"), "array of strings", _many(FOODS, "there will be {v} at {s}",
        "they serve {v} at {s}")),
    ]),
    ("animal", any_name, ("name", "pet", "pet_name"), [
        (("species", "animal", "kind", "type"), "string", _text(lambda r: r.choice(ANIMALS), "{s} is {a}",
        "{s} is our {v}")),
        (("age", "years"), "integer", _int(1, 30, "{s} is {v} years old", "{s} is {v}")),
        (("colour", "color", "fur"), "string", _text(lambda r: r.choice(COLOURS), "{s} is {v}",
        "the colour of {s} is {v}")),
        (("food", "eats", "diet"), "array of strings", _many(FRUITS, "{s} eats {v}", "{s} likes to eat {v}")),
        (("owner",), "string", _text(any_name, "{s} belongs to {v}", "the owner of {s} is {v}")),
        (("vaccinated", "healthy", "friendly", "tame"), "boolean", _bool(("{s} is {k}", "{s} is not {k}"))),
    ]),
    ("order", lambda r: f"order {r.randint(100, 9999)}", (), [
        (("customer", "buyer", "name"), "string", _text(any_name, "{s} was placed by {v}", "{v} made {s}")),
        (("item", "product"), "string", _text(lambda r: r.choice(OBJECTS), "{s} is for {a}", "{s} contains {a}")),
        (("quantity", "count"), "integer", _int(2, 99, "{s} has {v} pieces", "{s} counts {v} pieces")),
        (("paid", "is_paid"), "boolean", _bool(("{s} is paid", "{s} is not paid"))),
        (("shipped", "sent"), "boolean", _bool(("{s} has been sent", "{s} has not been sent"),
        ("{s} is shipped", "{s} is not shipped"))),
        (("city", "destination"), "string", _text(lambda r: r.choice(CITIES), "{s} goes to {v}", "{s} is sent to {v}")),
        (("total", "price", "sum"), "number", _price("the total of {s} is {v}", "{s} costs {v} dollars")),
        (("note", "comment"), "string", _text(any_word, "the note of {s} says {v}")),
    ]),
]  # fmt: skip
