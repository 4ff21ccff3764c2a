"""The kinds of tool that the tool skill offers: known ones, and ones invented on the spot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from training.words import CAPITALS, CITIES, COMMON, DAYS, FOODS, OBJECTS, any_name, any_word, pseudo_word


@dataclass(frozen=True)
class Family:
    """A kind of tool: its names, parameters (name choices and JSON type), requests, result and answer.

    Slots in ``asks`` and ``says`` are ``{p0}``, ``{p1}`` for the arguments and ``{r0}``,
    ``{r1}`` for the result's values.
    """

    names: tuple[str, ...]
    about: tuple[str, ...]
    params: tuple[tuple[tuple[str, ...], str, Callable[[Random], Any]], ...]
    asks: tuple[str, ...]
    results: tuple[tuple[tuple[str, ...], Callable[[Random], Any]], ...]
    says: str


def city(rng: Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.85 else pseudo_word(rng).capitalize()


def _int(low: int, high: int) -> Callable[[Random], int]:
    return lambda rng: rng.randint(low, high)


def words(rng: Random) -> str:
    return " ".join(rng.choice(COMMON) for _ in range(rng.randint(1, 4)))


def _clock(rng: Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"


def _expression(rng: Random) -> str:
    return f"{rng.randint(1, 9999)} {rng.choice('+-*/')} {rng.randint(1, 999)}"


def _one(*values: Any) -> Callable[[Random], Any]:
    return lambda rng: rng.choice(values)


_CITY = (("city", "location", "place", "town"), "string", city)
_NUMBER = _int(1, 9999)
FAMILIES: tuple[Family, ...] = (
    Family(("get_weather", "weather", "current_weather", "get_current_weather", "weather_lookup"),
           ("Get the current weather for a city", "Current weather", "Look up the weather in a place",
           "Returns the weather of a city"),
           (_CITY,),
           ("What is the weather in {p0}?", "How is the weather in {p0}?", "What's the weather like in {p0} today?",
           "Is it raining in {p0}?",
            "Tell me the weather in {p0}.", "Check the weather for {p0}.", "How warm is it in {p0}?", "weather {p0}",
            "Do I need an umbrella in {p0}?"),
           ((("condition", "weather", "sky"), _one("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear",
           "stormy")),
            (("temperature", "temp", "degrees", "temperature_c"), _int(-15, 40))),
           "The weather in {p0} is {r0} with {r1} degrees."),
    Family(("get_time", "current_time", "get_current_time", "clock"), ("Get the current time in a city",
    "Tells the local time"), (_CITY,),
           ("What time is it in {p0}?", "What is the time in {p0}?", "Tell me the time in {p0}.",
           "How late is it in {p0}?", "Current time in {p0}"),
           ((("time", "now", "local_time"), _clock),), "It is {r0} in {p0}."),
    Family(("calculate", "calculator", "evaluate", "compute"), ("Evaluate an arithmetic expression", "A calculator",
    "Compute the value of an expression"),
           ((("expression", "expr", "formula"), "string", _expression),),
           ("Calculate {p0}.", "What is {p0}?", "Compute {p0}", "Use the calculator: {p0}", "How much is {p0}?",
           "Evaluate {p0}"),
           ((("result", "value", "answer"), _int(-999, 99999)),), "The result is {r0}."),
    Family(("add", "add_numbers", "sum", "plus"), ("Add two numbers", "Returns the sum of two numbers"),
           ((("a", "x", "first"), "integer", _NUMBER), (("b", "y", "second"), "integer", _NUMBER)),
           ("Add {p0} and {p1}.", "What is {p0} plus {p1}?", "What is the sum of {p0} and {p1}?",
           "Please add {p0} and {p1}", "What is {p0} + {p1}?"),
           ((("result", "sum", "value"), _int(2, 19998)),), "The sum of {p0} and {p1} is {r0}."),
    Family(("multiply", "times", "product"), ("Multiply two numbers", "Returns the product of two numbers"),
           ((("a", "x", "first"), "integer", _NUMBER), (("b", "y", "second"), "integer", _NUMBER)),
           ("Multiply {p0} by {p1}.", "What is {p0} times {p1}?", "What is the product of {p0} and {p1}?",
           "What is {p0} * {p1}?"),
           ((("result", "product", "value"), _int(2, 99999)),), "{p0} times {p1} is {r0}."),
    Family(("search", "web_search", "search_web", "find"), ("Search the web", "Search for information",
    "Look something up on the internet"),
           ((("query", "q", "text", "keywords"), "string", words),),
           ("Search for {p0}.", "Search the web for {p0}.", "Look up {p0}.", "Find information about {p0}.",
           "Google {p0}", "search {p0}"),
           ((("title", "result", "top"), words),), "I found this: {r0}."),
    Family(("send_email", "send_message", "email", "write_email"), ("Send a message to a person", "Sends an email"),
           ((("to", "recipient", "person"), "string", any_name), (("message", "text", "body", "subject"), "string",
           words)),
           ("Send {p0} a message: {p1}", "Write to {p0}: {p1}", "Send an email to {p0} that says: {p1}",
           "Tell {p0} the following: {p1}",
            "Send a message to {p0} with the text {p1}"),
           ((("status", "state", "result"), _one("sent", "delivered", "queued", "failed")),),
           "The message to {p0} is {r0}."),
    Family(("set_timer", "timer", "start_timer", "create_timer"), ("Set a timer", "Start a timer of some minutes"),
           ((("minutes", "duration", "mins"), "integer", _int(1, 120)),),
           ("Set a timer for {p0} minutes.", "Start a timer of {p0} minutes.", "Timer for {p0} minutes please",
           "Wake me in {p0} minutes."),
           ((("status", "state"), _one("started", "set", "running")),), "The timer for {p0} minutes is {r0}."),
    Family(("convert_currency", "exchange", "currency"), ("Convert an amount of money into another currency",
    "Currency conversion"),
           ((("amount", "value"), "integer", _int(1, 5000)), (("from", "source", "from_currency"), "string",
           _one("EUR", "USD", "GBP", "JPY", "CHF")),
            (("to", "target", "to_currency"), "string", _one("SEK", "INR", "CNY", "PLN", "BRL"))),
           ("Convert {p0} {p1} to {p2}.", "How much is {p0} {p1} in {p2}?", "What are {p0} {p1} in {p2}?",
           "Change {p0} {p1} into {p2}"),
           ((("result", "amount", "converted"), _NUMBER),), "{p0} {p1} are {r0} {p2}."),
    Family(("translate", "translate_text", "translator"), ("Translate a text into a language", "Translation"),
           ((("text", "word", "phrase"), "string", words), (("language", "target", "to"), "string",
            _one("French", "German", "Spanish", "Italian", "Japanese", "Polish", "Dutch", "Swedish"))),
           ("Translate {p0} into {p1}.", "Translate {p0} to {p1}", "How do you say {p0} in {p1}?",
           "What is {p0} in {p1}?"),
           ((("translation", "result", "text"), pseudo_word),), "In {p1}, {p0} is {r0}."),
    Family(("get_stock_price", "stock_price", "get_price", "price"), ("Get the price of a stock", "Price of a share"),
           ((("symbol", "ticker", "name"), "string",
           lambda r: "".join(r.choice("ABCDEFGHIKLMNOPRSTUVXYZ") for _ in range(r.randint(3, 4)))),),
           ("What is the stock price of {p0}?", "How much is {p0} stock?", "Price of {p0}?", "Get the price of {p0}.",
           "What does a share of {p0} cost?"),
           ((("price", "value", "usd"), _int(1, 999)),), "The price of {p0} is {r0}."),
    Family(("play_music", "play", "play_song"), ("Play music", "Play a song"),
           ((("song", "title", "track", "artist"), "string", words),),
           ("Play {p0}.", "Play the song {p0}.", "I want to hear {p0}.", "Put on {p0}"),
           ((("status", "state"), _one("playing", "not found", "paused")),), "The song {p0} is {r0}."),
    Family(("turn_on_light", "switch_light", "set_light", "light"), ("Switch the light in a room on or off",
    "Control a light"),
           ((("room", "location", "where"), "string", _one("kitchen", "bedroom", "bathroom", "living room", "garage",
           "garden", "office")),
            (("state", "mode", "power"), "string", _one("on", "off"))),
           ("Turn the light in the {p0} {p1}.", "Switch {p1} the light in the {p0}.",
           "Light {p1} in the {p0}, please.", "Turn {p1} the {p0} light."),
           ((("status", "result"), _one("done", "ok", "failed")),), "The light in the {p0}: {r0}."),
    Family(("book_table", "reserve_table", "restaurant_booking"), ("Book a table in a restaurant", "Reserve a table"),
           ((("restaurant", "place"), "string", lambda r: pseudo_word(r).capitalize()),
           (("people", "guests", "persons"), "integer", _int(2, 12)),
            (("day", "date"), "string", _one(*DAYS))),
           ("Book a table at {p0} for {p1} people on {p2}.", "Reserve a table for {p1} at {p0} on {p2}.",
           "I need a table at {p0} for {p1} on {p2}"),
           ((("confirmation", "number", "booking_id"), _int(100, 99999)),),
           "Your table at {p0} is booked. The number is {r0}."),
    Family(("roll_dice", "dice", "random_number", "get_random_number"),
    ("Roll a die", "Draws a random number up to a limit"),
           ((("sides", "max", "limit"), "integer", _int(2, 100)),),
           ("Roll a die with {p0} sides.", "Give me a random number up to {p0}.", "Roll a {p0}-sided die.",
           "Random number from 1 to {p0}, please."),
           ((("result", "number", "value"), _int(1, 100)),), "The number is {r0}."),
    Family(("add_reminder", "create_reminder", "remind", "add_event", "create_event"),
    ("Add an entry to the calendar", "Create a reminder for a day"),
           ((("title", "text", "what"), "string", words), (("day", "date", "when"), "string", _one(*DAYS))),
           ("Remind me of {p0} on {p1}.", "Put {p0} into my calendar for {p1}.", "Create a reminder for {p1}: {p0}",
           "Add {p0} on {p1}"),
           ((("status", "result"), _one("created", "saved", "ok")),), "The reminder for {p1} is {r0}."),
    Family(("get_capital", "capital_of", "capital"), ("Get the capital of a country",),
    ((("country", "name"), "string", _one(*CAPITALS)),),
           ("What is the capital of {p0}?", "Which city is the capital of {p0}?", "Capital of {p0}?"),
           ((("capital", "city"), city),), "The capital of {p0} is {r0}."),
    Family(("add_to_list", "add_item", "shopping_list", "add_to_cart"), ("Add an item to the shopping list",),
           ((("item", "product"), "string", lambda r: r.choice((*FOODS, *OBJECTS))),
           (("quantity", "amount", "count"), "integer", _int(1, 40))),
           ("Add {p1} {p0} to my list.", "Put {p1} {p0} on the shopping list.", "I need {p1} {p0} on my list.",
           "Add {p0} to the list, {p1} pieces."),
           ((("items", "total", "size"), _int(1, 60)),), "Done. There are {r0} items on the list."),
    Family(("get_date", "today", "current_date", "get_today"), ("Get today's date", "The current date"), (),
           ("What is the date today?", "What day is it today?", "Which date is it?", "Tell me today's date.",
           "What is today's date?"),
           ((("date", "today", "day"),
           lambda r: f"{r.randint(2020, 2035)}-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}"),), "Today is {r0}."),
    Family(("get_distance", "distance", "route"), ("Distance of two cities",),
           ((("from", "origin", "start"), "string", city), (("to", "destination", "end"), "string", city)),
           ("How far is it from {p0} to {p1}?", "What is the distance from {p0} to {p1}?",
           "Distance from {p0} to {p1}?", "How do I get from {p0} to {p1}?"),
           ((("km", "distance", "kilometres"), _int(5, 9999)),), "It is {r0} km from {p0} to {p1}."),
)  # fmt: skip
_NOUNS = (
    "order", "user", "book", "ticket", "flight", "room", "product", "customer", "file", "job", "parcel", "train",
    "account", "recipe", "sensor", "robot",
)  # fmt: skip
_FACTS = (
    "status", "owner", "price", "size", "colour", "name", "date", "score", "level", "address", "age", "type",
    "weight", "title",
)  # fmt: skip


def invented(rng: Random) -> Family:
    """A tool that exists nowhere else, so that the list in the prompt has to be read."""
    noun = rng.choice(_NOUNS) if rng.random() < 0.6 else pseudo_word(rng)
    fact = rng.choice(_FACTS) if rng.random() < 0.7 else pseudo_word(rng)
    value: Callable[[Random], Any] = (
        _int(1, 99999) if rng.random() < 0.5 else (lambda r: r.choice((any_name(r), any_word(r), pseudo_word(r))))
    )
    kind = "integer" if isinstance(value(rng), int) else "string"
    param = rng.choice((f"{noun}_id", noun, "id", "name", "key", f"{noun}_name", pseudo_word(rng, 1)))
    verb = rng.choice(("get", "lookup", "find", "fetch", "read", "query", "check"))
    return Family(
        (f"{verb}_{noun}_{fact}", f"{noun}_{fact}", f"{verb}_{fact}_of_{noun}"),
        (f"Get the {fact} of a {noun}", f"Returns the {fact} for a {noun}"),
        (((param,), kind, value),),
        (f"What is the {fact} of {noun} {{p0}}?", f"Tell me the {fact} of {noun} {{p0}}.",
        f"Look up the {fact} of {noun} {{p0}}.",
         f"I need the {fact} of {noun} {{p0}}.", f"{fact} of {noun} {{p0}}?",
         f"Can you check the {fact} of {noun} {{p0}}?"),
        (((fact, "result", "value"), lambda r: r.choice((r.randint(1, 9999), any_word(r), pseudo_word(r)))),),
        f"The {fact} of {noun} {{p0}} is {{r0}}.",
    )  # fmt: skip
