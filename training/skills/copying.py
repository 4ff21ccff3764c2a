"""Repeat a given string exactly, whatever characters it is made of."""

from __future__ import annotations

from random import Random

from training.common_words import COMMON_WORDS, GREEK, NATO
from training.conversation import Check, Episode, Turn, draw, vary
from training.skills import arithmetic, chat, knowledge
from training.words import (
    CAPITALS,
    CITIES,
    COMMON,
    DAYS,
    FOODS,
    GENERAL,
    MONTHS,
    NAMES,
    NUMBER_WORDS,
    any_word,
    pseudo_word,
)

BLOCKS: list[tuple[int, int, float]] = [  # first and last code point of a Unicode block, and how often it is drawn
    (0x00A1, 0x00FF, 3), (0x0100, 0x017F, 3), (0x0180, 0x024F, 1), (0x0250, 0x02AF, 0.5), (0x0391, 0x03C9, 2),
    (0x0410, 0x044F, 3), (0x0531, 0x0556, 0.5), (0x05D0, 0x05EA, 1), (0x0621, 0x064A, 2), (0x0905, 0x0939, 1.5),
    (0x0985, 0x09B9, 0.5), (0x0B85, 0x0BB9, 0.5), (0x0E01, 0x0E30, 1), (0x10A0, 0x10FF, 0.5), (0x1200, 0x1248, 0.5),
    (0x1E00, 0x1EFF, 1.5), (0x2010, 0x2027, 1), (0x20A0, 0x20BF, 0.7), (0x2100, 0x214F, 0.5), (0x2190, 0x21FF, 1),
    (0x2200, 0x22FF, 1), (0x2500, 0x257F, 0.7), (0x25A0, 0x26FF, 1.5), (0x2700, 0x27BF, 1), (0x3041, 0x3096, 2.5),
    (0x30A1, 0x30FA, 2.5), (0x4E00, 0x9FFF, 7), (0xAC00, 0xD7A3, 3), (0xFF01, 0xFF5E, 0.5), (0x1D400, 0x1D4FF, 0.5),
    (0x1F300, 0x1F5FF, 4), (0x1F600, 0x1F64F, 5), (0x1F680, 0x1F6C5, 3), (0x1F900, 0x1F9FF, 3), (0x20000, 0x20FFF, 0.4),
]  # fmt: skip
_WEIGHTS = [weight for _, _, weight in BLOCKS]
EMOJI = (
    "👍🏽", "👩‍💻", "🇫🇷", "🇯🇵", "❤️", "👨‍👩‍👧", "🏳️‍🌈", "✌️", "🤷‍♀️", "1️⃣", "🚀", "🎉", "😀", "🔥", "✨",
    "🐍", "🦊", "🌍", "☕",
)  # fmt: skip
ACCENTED = [
    "naïve", "café", "déjà", "vu", "résumé", "São", "Paulo", "Zürich", "Köln", "Łódź", "Kraków", "Björn", "señor",
    "mañana", "über", "straße", "crème", "brûlée", "jalapeño", "Ångström", "Dvořák", "Čapek", "İstanbul", "Đà",
    "Nẵng", "façade", "piñata", "smörgåsbord", "Malmö", "Gdańsk", "Škoda", "žába", "čeština", "œuvre", "Ærø",
    "Þór",
]  # fmt: skip
CJK = [
    "東京", "京都", "日本語", "你好", "世界", "北京", "上海", "猫", "犬", "ありがとう", "こんにちは", "さくら",
    "カタカナ", "안녕하세요", "서울", "한국어", "谢谢", "学习", "中文", "機械", "水", "火", "山川", "春夏秋冬",
    "今日は", "明天", "电脑", "图书馆", "みず", "テスト", "사랑",
]  # fmt: skip
OTHER = [
    "Привет", "мир", "Москва", "Київ", "здравствуйте", "Αθήνα", "καλημέρα", "שלום", "مرحبا", "سلام", "नमस्ते",
    "สวัสดี", "Բարեւ", "გამარჯობა", "ሰላም", "வணக்கம்",
]  # fmt: skip
EVERYDAY = sorted({*COMMON_WORDS, *COMMON, *GENERAL, *FOODS, *DAYS, *MONTHS})
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def _block_text(rng: Random) -> str:
    first, last, _ = rng.choices(BLOCKS, _WEIGHTS)[0]
    return "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 6)))


def _letters(rng: Random) -> str:
    letters = ALPHABET if rng.random() < 0.5 else ALPHABET + ALPHABET.upper() + "0123456789"
    return "".join(rng.choice(letters) for _ in range(rng.randint(1, 10)))


def _any_char(rng: Random) -> str:
    """A code point from anywhere (unassigned ones too), so that every byte that UTF-8 allows is met."""
    while True:
        code = rng.choice((rng.randint(0x21, 0x7FF), rng.randint(0x800, 0xFFFF), rng.randint(0x10000, 0x10FFFF)))
        if not 0xD800 <= code <= 0xDFFF and not 0x7F <= code <= 0xA0:
            return chr(code)


def _joined_emoji(rng: Random) -> str:
    """One to four emoji joined into one picture, with skin tones and variation selectors."""
    parts = []
    for _ in range(rng.choice((1, 2, 2, 3, 4))):
        base = rng.choice(
            (
                chr(rng.randint(0x1F466, 0x1F47F)),
                chr(rng.randint(0x1F600, 0x1F64F)),
                chr(rng.randint(0x1F900, 0x1F9FF)),
                rng.choice("👨👩👧👦🧑❤♀♂"),
            )
        )
        parts.append(base + rng.choice(("", "", "", chr(rng.randint(0x1F3FB, 0x1F3FF)), "\ufe0f")))
    return "\u200d".join(parts)


def _number_word(rng: Random) -> str:
    """A number in words, mostly a small one."""
    roll = rng.random()
    if roll < 0.75:
        return rng.choice(NUMBER_WORDS[:11]) if roll < 0.5 else rng.choice(NUMBER_WORDS)
    if roll < 0.9:
        return rng.choice(TENS) + rng.choice(("", "-", " ")) + rng.choice(NUMBER_WORDS[1:10])
    return rng.choice((*TENS, "hundred", "thousand", "million", "half", "dozen", "first", "second", "third"))


def _fragment(rng: Random) -> str:
    """A few letters from within a common word.

    Copying is learned token by token. Fragments bring up the tokens that whole words hardly use.
    """
    word = rng.choice(EVERYDAY)
    start = rng.randrange(len(word))
    text = word[start : start + rng.randint(1, 8)]
    return rng.choice((text, text, text, text.capitalize(), text.upper()))


def _piece(rng: Random, kind: str) -> str:
    match kind:
        case "word":
            word = any_word(rng)
            return rng.choice((word, word, word.capitalize(), word.upper()))
        case "general":
            word = rng.choice(GENERAL)
            return rng.choice((word, word, word.capitalize()))
        case "code":
            w = [rng.choice((*GENERAL, *COMMON)) for _ in range(3)]
            return rng.choice((f'{w[0]}("{w[1]}")', f"{w[0]}_{w[1]} = {rng.randint(0, 99)}", f"{w[0]}.{w[1]}({w[2]})",
                f"<{w[0]}>", f"{{{w[0]}}}",
                               f'{{"{w[0]}": "{w[1]}"}}', f"[{rng.randint(0, 9)}, {rng.randint(0, 99)}]",
                               f"{w[0]}@{w[1]}.com", f"#{w[0]}",
                               f"https://{w[0]}.{w[1]}/{w[2]}", f"if {w[0]}:", f"def {w[0]}({w[1]}):",
                               f"${rng.randint(1, 999)}.{rng.randint(10, 99)}"))  # fmt: skip
        case "name":
            return rng.choice((rng.choice(NAMES), rng.choice(CITIES), rng.choice(list(CAPITALS))))
        case "pseudo":
            return pseudo_word(rng)
        case "letters":
            return _letters(rng)
        case "digits":
            return "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 9)))
        case "everyday":
            return rng.choice(EVERYDAY)
        case "number":
            return _number_word(rng)
        case "call":
            return rng.choice(GREEK if rng.random() < 0.5 else NATO)
        case "few digits":
            return str(rng.randint(0, rng.choice((9, 9, 99, 999, 9999))))
        case "fragment":
            return _fragment(rng)
        case "accent":
            return rng.choice(ACCENTED)
        case "cjk":
            return rng.choice(CJK)
        case "other":
            return rng.choice(OTHER)
        case "emoji":
            return rng.choice(EMOJI)
        case "joined":
            return _joined_emoji(rng)
        case "punct":
            return "".join(rng.choice(PUNCTUATION) for _ in range(rng.randint(1, 5)))
        case "any":
            return "".join(_any_char(rng) for _ in range(rng.randint(1, 4)))
        case _:
            return _block_text(rng)


KINDS = (
    "word", "general", "code", "name", "pseudo", "letters", "digits", "accent", "cjk", "other", "emoji", "joined",
    "punct", "any", "block", "everyday", "number", "call", "few digits", "fragment",
)  # fmt: skip
MIXES: list[tuple[tuple[str, ...], float]] = [
    (("word", "general"), 2), (("general",), 3), (("general", "name", "word"), 2), (("code",), 1), (("word",), 1),
    (("word", "name", "pseudo"), 2), (("word", "accent", "cjk", "emoji"), 3), (("letters",), 1.5),
    (("digits",), 1), (("word", "digits", "punct"), 1.5), (("block",), 3), (("cjk", "block", "emoji"), 2), (KINDS, 4),
    (("any",), 1), (("other", "accent", "word"), 1), (("emoji", "word", "joined"), 1), (("joined",), 0.5),
    (("accent", "cjk", "joined", "word"), 1), (("pseudo",), 1),
    (("fragment",), 2), (("fragment", "everyday"), 1), (("everyday", "few digits", "punct"), 1),
]  # fmt: skip
_MIX_WEIGHTS = [weight for _, weight in MIXES]


def random_text(rng: Random, longest: int = 14) -> str:
    """One to ``longest`` pieces of one mix, joined by a space or nothing; never with blanks at its ends."""
    mix = rng.choices(MIXES, _MIX_WEIGHTS)[0][0]
    count = rng.randint(1, longest if rng.random() < 0.6 else 4)
    glue = rng.choice((" ", " ", " ", " ", "", ", ", "-", "_", "  ", " / ") if count > 1 else (" ",))
    text = glue.join(_piece(rng, rng.choice(mix)) for _ in range(count)).strip()
    if rng.random() < 0.1:
        text += rng.choice((".", "!", "?", "...", "。", "！"))
    if rng.random() < 0.06:
        text += "\n" + glue.join(_piece(rng, rng.choice(mix)) for _ in range(count)).strip()
    return " ".join(text.split(" ")) if text else "x"


def phrase(rng: Random) -> str:
    """One to ten common words, digits, number words and words that spell letters: what testers type first."""
    count = rng.randint(1, 4) if rng.random() < 0.6 else rng.randint(3, 10)
    kinds = rng.choices(("everyday", "number", "few digits", "call", "name"), (60, 15, 13, 9, 3), k=count)
    pieces = [_piece(rng, kind) for kind in kinds]
    case = rng.random()
    if case < 0.1:
        pieces = [piece.upper() for piece in pieces]
    elif case < 0.2:
        pieces = [piece.capitalize() for piece in pieces]
    elif case < 0.4:
        pieces[0] = pieces[0].capitalize()
    text = rng.choice((" ", " ", " ", " ", " ", ", ")).join(pieces)
    return text + rng.choice((".", "!", "?")) if rng.random() < 0.15 else text


def _other_skill(rng: Random) -> str:
    """A question or an answer of another skill: asked to repeat it, the model must not answer it."""
    turn = rng.choice((arithmetic.make, knowledge.make, chat.make))(rng, False).turns[0]
    return rng.choice((turn.user, turn.answer))


def sentence(rng: Random) -> str:
    """A plain made-up sentence."""
    if rng.random() < 0.4:
        words = [rng.choice(GENERAL if rng.random() < 0.6 else COMMON) for _ in range(rng.randint(3, 16))]
        return " ".join(words).capitalize() + rng.choice((".", "!", "?", "", ", ok."))
    w = rng.choices(COMMON, k=4)
    return rng.choice((
        f"The {w[0]} and the {w[1]} are in the {w[2]}.", f"I saw a {w[0]} near the {w[1]} with {rng.choice(NAMES)}.",
        f"{rng.choice(NAMES)} likes the {w[0]}, but not the {w[1]}!", f"My {w[0]} is {w[1]} and your {w[2]} is {w[3]}.",
        f"Why is the {w[0]} so {w[1]}?",
        f"{rng.choice(NAMES)} went to {rng.choice(CITIES)} with {rng.randint(2, 99)} {w[0]}s.",
    ))  # fmt: skip


INLINE = (
    "Repeat exactly: {s}", "Repeat after me: {s}", "Repeat this: {s}", "Repeat: {s}", "Say: {s}", "Echo: {s}",
    "Echo {s}", "Copy this text: {s}", "Please repeat the following text exactly: {s}", "Write exactly this: {s}",
    "Say exactly: {s}", "Repeat the following string exactly: {s}", "Copy exactly: {s}",
    "Say {s}", "Copy {s}", "Type {s}", "Write: {s}", "Print: {s}", "Output exactly: {s}", "Copy this: {s}",
    "Repeat after me, exactly: {s}", "Repeat back: {s}", "Say this: {s}", "Just say: {s}", "Please repeat: {s}",
    "Please repeat exactly: {s}", "Repeat these words: {s}", "Repeat the following: {s}", "Repeat this phrase: {s}",
    "Can you repeat this? {s}", "Can you say: {s}", "Respond with: {s}", "Reply with: {s}", "Answer with: {s}",
    "Repeat verbatim: {s}", "Echo this back: {s}", "repeat exactly {s}", "Repeat exactly {s}", "Copy: {s}",
    "Repeat word for word: {s}", "Return this unchanged: {s}", "Echo back: {s}", "Type this: {s}",
    "Reply with exactly this text: {s}", "Repeat this string character by character: {s}", "Repeat the text: {s}",
    "Answer with exactly this text and nothing else: {s}", "Repeat this exactly: {s}", "Repeat {s}",
)  # fmt: skip
BLOCK = (
    "Repeat the following text exactly:\n{s}", "Copy this:\n{s}", "Repeat exactly what is on the next line:\n{s}",
    "Repeat this text:\n\n{s}", "Echo the following:\n{s}", "{s}\n\nRepeat the text above exactly.",
    "{s}\nCopy the line above.", "Repeat the text in the box:\n```\n{s}\n```",
    "Here is a text:\n{s}\nRepeat it exactly.", "Say this back to me:\n{s}", "Repeat exactly:\n{s}", "Echo:\n{s}",
    "Repeat exactly:\n\n{s}", "{s}\n\nRepeat that.",
)  # fmt: skip
QUOTED = (
    "Repeat {q}{s}{r}.", "Say {q}{s}{r}", "Can you repeat {q}{s}{r}?", "Repeat exactly: {q}{s}{r}",
    "Write {q}{s}{r}.", "Please say {q}{s}{r} and nothing else.", "Repeat the string {q}{s}{r} exactly.",
    "Copy {q}{s}{r} for me.", "Repeat the words between the quotes: {q}{s}{r}",
    "Could you echo {q}{s}{r}, please?", "Say: {q}{s}{r}", "Echo: {q}{s}{r}", "Echo {q}{s}{r}", "Copy: {q}{s}{r}",
    "Copy this: {q}{s}{r}", "Repeat after me: {q}{s}{r}", "Reply with {q}{s}{r}", "Print {q}{s}{r}.",
    "Repeat {q}{s}{r}", "Repeat this exactly: {q}{s}{r}", "Can you say {q}{s}{r}?", "Just say {q}{s}{r}.",
)  # fmt: skip
QUOTES = (('"', '"'), ('"', '"'), ("'", "'"), ("“", "”"), ("«", "»"), ("`", "`"))


def ask_to_repeat(rng: Random, text: str) -> str:
    """A request for ``text``; quotes are used only where the text has none of them."""
    roll = rng.random()
    if roll < 0.3 and "\n" not in text:
        quotes = [q for q in QUOTES if q[0] not in text and q[1] not in text]
        if quotes:
            q, r = rng.choice(quotes)
            return vary(rng, rng.choice(QUOTED)).format(s=text, q=q, r=r)
    template = rng.choice(BLOCK if roll < 0.5 or "\n" in text else INLINE)
    return (template if template.startswith("{s}") else vary(rng, template)).format(s=text)


def make_phrase(rng: Random, held_out: bool) -> Episode:
    """One everyday phrase to repeat."""

    def propose() -> tuple[str, str]:
        text = phrase(rng)
        return text, text

    text = draw(held_out, propose)
    return Episode([Turn(ask_to_repeat(rng, text), text, Check("exact", text))])


def make(rng: Random, held_out: bool) -> Episode:
    """One or (in training) a few strings to repeat."""

    def propose() -> tuple[str, str]:
        source = rng.choices((phrase, random_text, sentence, _other_skill), (30, 55, 10, 5))[0]
        text = source(rng)
        return text, text

    turns = []
    for _ in range(1 if held_out else rng.choice((1, 1, 2, 3, 4))):
        if not held_out and rng.random() < 0.03:
            word, n = any_word(rng), rng.randint(2, 8)
            times = rng.choice((n, NUMBER_WORDS[n]))
            ask = vary(
                rng,
                rng.choice(
                    (
                        "Repeat the word {w} {n} times.",
                        "Say {w} {n} times.",
                        "Write {w} {n} times.",
                        "Repeat {w} {n} times",
                    )
                ),
            )
            turns.append(Turn(ask.format(w=word, n=times), " ".join([word] * n), Check("exact", " ".join([word] * n))))
            continue
        text = draw(held_out, propose)
        turns.append(Turn(ask_to_repeat(rng, text), text, Check("exact", text)))
    return Episode(turns)
