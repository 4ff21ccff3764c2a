"""Addition, subtraction and multiplication with small numbers."""

from __future__ import annotations

from random import Random

from training.conversation import Check, Episode, Turn, draw, phrase
from training.words import FRUITS, NUMBER_WORDS, OBJECTS, any_name

PLAIN = (
    "What is {a} {o} {b}?", "What's {a} {o} {b}?", "{a} {o} {b}", "{a} {o} {b} =", "{a}{o}{b}", "{a}{o}{b}=?",
    "{a} {o} {b} = ?", "Calculate {a} {o} {b}.", "Compute {a} {o} {b}", "How much is {a} {o} {b}?",
    "Can you tell me what {a} {o} {b} is?", "Tell me {a} {o} {b}.", "Solve {a} {o} {b}.",
    "What does {a} {o} {b} equal?", "What do you get for {a} {o} {b}?", "Work out {a} {o} {b}.",
    "I need to know {a} {o} {b}.", "What is the result of {a} {o} {b}?", "Do the sum: {a} {o} {b}",
    "Evaluate {a} {o} {b}", "Can you calculate {a} {o} {b}?", "Do you know what {a} {o} {b} is?",
)  # fmt: skip
WORDED = {
    "+": (
        "Add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "Add {b} to {a}.",
        "What do {a} and {b} make together?",
        "Sum {a} and {b}",
    ),
    "-": (
        "Subtract {b} from {a}.",
        "What is {a} take away {b}?",
        "What is the difference of {a} and {b}?",
        "Take {b} from {a}.",
    ),
    "×": (
        "Multiply {a} by {b}.",
        "What is the product of {a} and {b}?",
        "Multiply {a} and {b}.",
        "How much is {a} multiplied by {b}?",
    ),
}
SIGNS = {"+": ("+", "+", "+", "plus"), "-": ("-", "-", "-", "minus"), "×": ("×", "*", "*", "x", "times", "times")}
ONLY = (
    "{q} Answer with the number only.", "{q} Just the number.", "{q} Only the number, please.",
    "{q} Reply with only the number.", "Answer with a number only. {q}", "Reply with just the number: {q}",
)  # fmt: skip
STORIES = {
    "+": ("{n} has {a} {t} and gets {b} more. How many {t} does {n} have now?",
    "I have {a} {t}. I buy {b} more. How many do I have?",
          "There are {a} {t} on the table and {b} in the box. How many {t} are there?"),
    "-": ("{n} has {a} {t} and gives away {b}. How many {t} are left?",
    "I have {a} {t} and lose {b}. How many do I have left?",
          "There were {a} {t}. {n} took {b}. How many {t} are left?"),
    "×": ("There are {a} boxes with {b} {t} each. How many {t} are there?",
    "{n} buys {b} {t} every day for {a} days. How many {t} is that?"),
}  # fmt: skip


def _operands(rng: Random) -> tuple[str, int, int]:
    op = rng.choice("++--×××")
    if op == "×":
        pair = [rng.randint(0, 10), rng.choice((rng.randint(0, 10), rng.randint(0, 99), rng.randint(10, 99)))]
        rng.shuffle(pair)
        return op, pair[0], pair[1]
    top = rng.choice((9, 20, 99, 99, 99, 99))
    return op, rng.randint(0, top), rng.randint(0, top)


def result(op: str, a: int, b: int) -> int:
    """The value of ``a op b``."""
    return a + b if op == "+" else a - b if op == "-" else a * b


def worked(op: str, a: int, b: int) -> str:
    """The equation; a product with a two-digit factor is taken apart into tens and ones first."""
    value = result(op, a, b)
    small, large = sorted((a, b))
    if op == "×" and large > 10 and large % 10 and small > 1 and small < 10:
        tens, ones = large // 10 * 10, large % 10
        return f"{a} × {b} = {small} × {tens} + {small} × {ones} = {small * tens} + {small * ones} = {value}."
    return f"{a} {op} {b} = {value}."


def split_key(op: str, a: int, b: int) -> str:
    """The held-out key: the pair without its order, where order does not matter."""
    if op != "-":
        a, b = sorted((a, b))
    return f"arithmetic {a} {op} {b}"


def _division(rng: Random) -> Turn:
    """A division in the times table, sometimes with a remainder. Taught, but not graded."""
    b, value = rng.randint(1, 10), rng.randint(0, 12)
    rest = rng.randint(0, b - 1) if rng.random() < 0.3 else 0
    a = b * value + rest
    ask = phrase(rng, ("What is {a} {o} {b}?", "{a} {o} {b}", "{a}{o}{b}", "Divide {a} by {b}.",
        "How much is {a} {o} {b}?", "Calculate {a} {o} {b}."),
                 a=a, b=b, o=rng.choice(("/", "/", "÷", " divided by ", ":"))).replace("  ", " ")  # fmt: skip
    return Turn(ask, f"{a} ÷ {b} = {value}{f' remainder {rest}' if rest else ''}.", Check("number", rest or value))


def _one(rng: Random, held_out: bool) -> Turn:
    def propose() -> tuple[str, tuple[str, int, int]]:
        item = _operands(rng)
        return split_key(*item), item

    op, a, b = draw(held_out, propose)
    if not held_out and rng.random() < 0.06:
        a, b, c = (rng.randint(0, 50) for _ in range(3))
        ask = phrase(
            rng,
            (
                "What is {a} + {b} + {c}?",
                "{a} + {b} + {c}",
                "{a}+{b}+{c}=",
                "Add {a}, {b} and {c}.",
                "What is the sum of {a}, {b} and {c}?",
            ),
            a=a,
            b=b,
            c=c,
        )
        return Turn(ask, f"{a} + {b} + {c} = {a + b} + {c} = {a + b + c}.", Check("number", a + b + c))
    if not held_out and rng.random() < 0.06:
        return _division(rng)
    if max(a, b) <= 20 and rng.random() < 0.08:
        ask = phrase(rng, ("What is {a} {o} {b}?", "How much is {a} {o} {b}?", "{a} {o} {b}"), a=NUMBER_WORDS[a],
            b=NUMBER_WORDS[b],
                     o={"+": "plus", "-": "minus", "×": "times"}[op])  # fmt: skip
        return Turn(ask, worked(op, a, b), Check("number", result(op, a, b)))
    if not held_out and op != "×" and rng.random() < 0.15:  # three digits, for the carries; never graded
        a, b = rng.randint(0, 999), rng.randint(0, 999 if rng.random() < 0.5 else 99)
    value, check = result(op, a, b), Check("number", result(op, a, b))
    roll = rng.random()
    if roll < 0.12 and (op != "-" or a >= b) and min(a, b) > 1:
        thing = rng.choice([w for w in (*FRUITS, *OBJECTS) if w[-1] not in "yxsh"]) + "s"
        return Turn(phrase(rng, STORIES[op], a=a, b=b, t=thing, n=any_name(rng)), worked(op, a, b), check)
    if roll < 0.3:
        question = phrase(rng, WORDED[op], a=a, b=b)
    else:
        question = phrase(rng, PLAIN, a=a, b=b, o=rng.choice(SIGNS[op]))
    if rng.random() < 0.12 and (op != "×" or max(a, b) <= 10):
        return Turn(rng.choice(ONLY).format(q=question), str(value), check)
    return Turn(question, worked(op, a, b), check)


def make(rng: Random, held_out: bool) -> Episode:
    """One sum, or a few in training."""
    return Episode([_one(rng, held_out) for _ in range(1 if held_out else rng.choice((1, 2, 3, 4, 6)))])
