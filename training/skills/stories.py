"""Short stories about a given animal and name, put together from a plot, a place, a wish, a trouble and an end."""

from __future__ import annotations

from random import Random

from training.conversation import Check, Episode, Turn, draw, phrase
from training.words import ADJECTIVES, ANIMALS, COLOURS, HEROES, NAMES, a, any_name, any_word

OPENINGS = (
    "Once upon a time, there was {ja} named {n}. {n} lived in {p}.",
    "Once upon a time, {ja} called {n} lived in {p}.", "In {p} there lived {ja} named {n}.",
    "{n} was {ja} who lived in {p}.", "Once there was {ja} called {n}, who lived in {p}.",
    "Far away, in {p}, lived {ja}. Its name was {n}.", "One day, {ja} named {n} woke up early in {p}.",
    "There once was {ja} named {n}. Its home was {p}.", "Long ago, {ja} by the name of {n} lived in {p}.",
)  # fmt: skip
PLACES = (
    "a green forest", "a quiet village", "an old mill by the river", "a cottage on a hill",
    "a garden full of flowers", "a cave by the sea", "a small house under a big oak tree",
    "a barn at the edge of the fields", "a valley between two mountains", "a lighthouse on an island", "a busy city",
    "a tower with a round window", "a warm nest of leaves", "an orchard full of apples", "a boat on a calm lake",
    "a meadow near the woods", "a library with many books", "a bakery that smelled of bread",
)  # fmt: skip
HABITS = (
    "Every morning, {n} ran to the river and counted the stones.", "{n} loved to look at the stars at night.",
    "{n} liked nothing more than warm rain.", "All the neighbours knew {n}, because {n} always had time for them.",
    "{n} had {ka} scarf and wore it every day.", "{n} could sing very well.", "{n} had never seen the sea.",
    "{n} collected feathers, buttons and old keys.", "Most of all, {n} loved apple pie.",
    "{n} wanted to learn to dance.", "In the evening, {n} told the moon about the day.",
    "{n} was not very big, but very {j2}.", "{n} had one big dream: to see the whole world.", "",
)  # fmt: skip
TROUBLES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("One day, {n} found {ka} key in the grass. \"Whose key is this?\" thought {n}.",
     ("{n} asked everyone on the road, and at last {m} the {b} said, \"It is mine! Thank you!\"",
      "With {m} the {b}, {n} tried it in every door until a small gate opened.",
      "It belonged to {m} the {b}, who had looked for it all day."),
     "Behind the door there was a table with cake, and they ate it together."),
    ("One night, a great storm came, and the wind took the roof away.",
     ("{m} the {b} heard the noise and came to help.",
     "\"Do not be afraid,\" said {m} the {b}. \"We will build a new one.\"",
      "{n} called all the friends, and {m} the {b} brought wood and nails."),
     "They worked for three days, and the new roof was better than the old one."),
    ("One morning, {n} got lost in the fog.",
     ("Then a voice said, \"Follow me!\" It was {m} the {b}.",
     "{n} sat down and waited. Soon {m} the {b} came along with {ka} lamp.",
      "{n} sang a song, and {m} the {b} heard it from far away."),
     "Together they found the way home before dark."),
    ("One day, {n} met {m} the {b}, who was crying. \"I have lost my ball,\" said {m}.",
     ("\"I will help you,\" said {n}, and they looked under every bush.",
     "{n} climbed the highest tree and saw something {k} by the river.",
      "They searched the whole day, and {n} did not give up."),
     "In the end they found it, and {m} laughed again."),
    ("In winter there was nothing left to eat, and {n} was very hungry.",
     ("{m} the {b} opened the door and said, \"Come in, there is soup.\"", "{n} knocked at the door of {m} the {b}.",
      "Then {n} saw a light in the window of {m} the {b}."),
     "They shared the soup and told each other stories until spring."),
    ("One day, {n} wanted to cross the river, but the bridge was broken.",
     ("{m} the {b} knew how to build a raft.", "\"I can carry you,\" said {m} the {b}.",
     "{n} and {m} the {b} put stone after stone into the water."),
     "When the sun went down, they stood on the other side and were very proud."),
    ("There was to be a race in the village, and everybody said that {n} was too slow.",
     ("But {m} the {b} said, \"I believe in you,\" and they trained every day.",
     "{n} ran anyway, and {m} the {b} cheered at every corner.",
      "On the way, {m} the {b} fell down, and {n} stopped to help."),
     "{n} did not win, but came home with a new friend, and that was better than a prize."),
    ("One evening, a star fell into the grass near {n}. \"I want to go home,\" it said softly.",
     ("{n} asked {m} the {b} for a long ladder.", "{n} and {m} the {b} carried it up the highest hill.",
     "{m} the {b} had a kite that could fly very high."),
     "The star flew back into the sky, and every night it winked at them."),
    ("One day, {n} baked a cake for the summer party, but in the night somebody ate it.",
     ("The crumbs led to the house of {m} the {b}.",
     "{m} the {b} turned red and said, \"I am sorry. I was so hungry.\"",
      "{n} was angry at first, but {m} the {b} looked very sad."),
     "So they baked a new cake together, and it was even bigger."),
    ("One day, {n} heard a strange noise from the well. Somebody was down there!",
     ("It was {m} the {b}, who had fallen in.", "\"Help!\" called {m} the {b}.",
     "{n} threw down a rope, and {m} the {b} held on to it."),
     "{n} pulled with all might, and soon {m} was safe and dry."),
    ("{n} was afraid of the dark and never went out at night.",
     ("One night {m} the {b} came and said, \"Let me show you the fireflies.\"",
     "\"The dark is only the day asleep,\" said {m} the {b}.",
      "{m} the {b} gave {n} a little {k} lantern."),
     "From then on, {n} loved the night and its quiet sounds."),
    ("One spring, {n} planted a seed and waited for many days, but nothing grew.",
     ("\"You must give it water and time,\" said {m} the {b}.", "{m} the {b} brought a can of water every morning.",
      "{n} wanted to give up, but {m} the {b} said, \"Wait one more day.\""),
     "At last a {k} flower opened, the most beautiful in the whole land."),
)  # fmt: skip
ENDINGS = (
    "From that day on, {n} and {m} were best friends.", "And {n} slept well that night.", "{n} went home happy.",
    "And they lived happily ever after.", 'That evening, {n} smiled and said, "What a wonderful day!"',
    "Since then, they meet every day. The end.", "And if you listen well, you can still hear them laugh.",
    "{n} learned that it is good to have a friend.", "So {n} learned that even a small {a} can do great things.",
    "And so the day ended well for {n} the {a}.", "Everyone was glad, and {n} most of all.",
    "{n} never forgot that day.",
)  # fmt: skip
ASK = (
    "Write a story about {x} named {n}.", "Tell me a story about {x} named {n}.",
    "Write a short story about {x} called {n}.", "Tell me a story about {n} the {y}.",
    "Can you tell me a story about {x} named {n}?", "A story about {n} the {y}, please.",
    "Write a story about {n}, {x}.", "Tell a story about {x} called {n}.",
    "Make up a story about {x} whose name is {n}.", "I would like a story about {x} named {n}.",
    "Please write a short story about {n} the {y}.", "Tell me a bedtime story about {x} named {n}.",
    "Write a fairy tale about {x} named {n}.", "story about {x} named {n}",
    "Write me a story with {x} called {n} in it.", "Write a tale about {n} the {y}.",
    "Could you write a little story about {x} named {n}?", "Write a story. The hero is {x} named {n}.",
)  # fmt: skip
ASK_ANIMAL = (
    "Write a story about {x}.", "Tell me a story about {x}.", "A story about {x}, please.",
    "Can you tell me a story about {x}?", "Write a short story about {x}.",
)  # fmt: skip
ASK_TWO = (
    "Tell me a story about {x} and {z}.", "Write a story about {x} and {z}.", "A story about {x} and {z}, please.",
    "Write a story about {x} who meets {z}.", "Tell me a story with {x} and {z}.",
)  # fmt: skip
ASK_NAME = (
    "Write a story about {n}.", "Tell me a story about {n}.", "Tell me a story with {n} in it.",
    "Write a short story about someone called {n}.",
)  # fmt: skip
ASK_ANY = (
    "Tell me a story.", "Write a story.", "Write a short story.", "Can you tell me a story?",
    "Tell me a bedtime story.", "I want to hear a story.", "Tell me another story.", "Write me a fairy tale.",
    "A story, please!", "Do you know a story?", "Make up a story.", "Another story please.",
)  # fmt: skip


def story(rng: Random, animal: str, name: str, other: str | None = None) -> str:
    """A story of 60 to 200 tokens, with a friend of the kind ``other``."""
    other = other or rng.choice([x for x in ANIMALS if x != animal])
    friend = rng.choice([x for x in NAMES if x != name])
    trouble, turns, outcome = rng.choice(TROUBLES)
    adjective, colour = rng.choice(ADJECTIVES), rng.choice(COLOURS)
    parts = [rng.choice(OPENINGS), rng.choice(HABITS), trouble, rng.choice(turns), outcome, rng.choice(ENDINGS)]
    if rng.random() < 0.25:
        parts.insert(2, rng.choice(HABITS))
    text = (
        "\n\n".join([" ".join(p for p in parts[:2] if p), " ".join(p for p in parts[2:] if p)])
        if rng.random() < 0.2
        else " ".join(p for p in parts if p)
    )
    return text.format(
        ja=a(f"{adjective} {animal}"),
        n=name,
        p=rng.choice(PLACES),
        ka=a(colour),
        k=colour,
        j2=rng.choice(ADJECTIVES),
        m=friend,
        b=other,
        a=animal,
    )


def raw(rng: Random) -> str:
    """A story as plain text, for completion without a chat."""
    return story(rng, rng.choice(ANIMALS), any_name(rng))


def make(rng: Random, held_out: bool) -> Episode:
    """One story. The split is by the pair of animal and name."""

    def propose() -> tuple[str, tuple[str, str]]:
        animal, name = rng.choice(ANIMALS), any_name(rng)
        if not held_out and rng.random() < 0.2:
            animal = rng.choice(HEROES) if rng.random() < 0.6 else any_word(rng)
        return f"story {animal} {name}", (animal, name)

    animal, name = draw(held_out, propose)
    roll = 0.0 if held_out else rng.random()
    if roll < 0.75:
        ask, want = phrase(rng, ASK, x=a(animal), y=animal, n=name), (name, animal)
    elif roll < 0.8:
        other = rng.choice((*ANIMALS, *HEROES))
        ask = phrase(rng, ASK_TWO, x=a(animal), z=a(other))
        return Episode([Turn(ask, story(rng, animal, name, other), Check("story", (animal, other)))])
    elif roll < 0.85:
        ask, want = phrase(rng, ASK_ANIMAL, x=a(animal)), (animal, animal)
    elif roll < 0.92:
        ask, want = phrase(rng, ASK_NAME, n=name), (name, name)
    else:
        ask, want = phrase(rng, ASK_ANY), ("", "")
    return Episode([Turn(ask, story(rng, animal, name), Check("story", want))])
