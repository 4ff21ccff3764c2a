"""Answer as a JSON object for a schema that the prompt describes, with values from a sentence in the prompt."""

from __future__ import annotations

from random import Random
from typing import Any

from training.conversation import Check, Episode, Turn, draw, dumps
from training.skills import arithmetic
from training.skills.json_domains import DOMAINS, Value
from training.words import any_word, pseudo_word

_PLAIN = {
    "string": "string",
    "integer": "integer",
    "boolean": "boolean",
    "number": "number",
    "array of strings": "array of strings",
}
_SHORT = {
    "string": "str",
    "integer": "int",
    "boolean": "bool",
    "number": "float",
    "array of strings": "list of strings",
}


def _describe(rng: Random, fields: list[tuple[str, str]]) -> str:
    roll = rng.random()
    if roll < 0.12:
        parts = [f'"{k}" ({rng.choice((_PLAIN, _SHORT))[t]})' for k, t in fields]
        return rng.choice(("the fields ", "the keys ")) + (
            parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
        )
    if roll < 0.18:
        names = [k for k, _ in fields]
        return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
    if roll < 0.3:
        return "the fields " + ", ".join(f"{k} ({_PLAIN[t]})" for k, t in fields)
    if roll < 0.45:
        return "these fields:\n" + "\n".join(f"- {k}: {_PLAIN[t]}" for k, t in fields)
    if roll < 0.6:
        names = rng.choice((_PLAIN, _SHORT))
        return "this schema: {" + ", ".join(f'"{k}": {names[t]}' for k, t in fields) + "}"
    if roll < 0.7:
        return "this form: " + dumps({k: ["string"] if t.startswith("array") else t for k, t in fields})
    if roll < 0.85:
        names = [f'"{k}"' if rng.random() < 0.3 else k for k, _ in fields]
        return "the keys " + (names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1])
    schema: dict[str, Any] = {"type": "object", "properties": {
        k: {"type": "array", "items": {"type": "string"}} if t.startswith("array") else {"type": t} for k, t in fields
    }}  # fmt: skip
    if rng.random() < 0.6:
        schema["required"] = [k for k, _ in fields]
    return "this JSON schema: " + dumps(schema)


REQUESTS = (
    "Extract {d} as JSON: {t}", "Extract {d} as a JSON object.\n\n{t}", "{t}\n\nExtract {d} as JSON.",
    "Give me a JSON object with {d} for: {t}", "{t} Give me a JSON object with {d}", "JSON with {d}: {t}",
    "Return a JSON object with {d}. {t}", "Answer as a JSON object with {d}: {t}",
    "Make a JSON object with {d} from: {t}", "Respond in JSON with {d}.\n\n{t}",
    "Answer as a JSON object with {d}.\nText: {t}", "Extract the data as a JSON object with {d}.\n\n{t}",
    "{t}\n\nWrite this as JSON with {d}.", "Read this: {t}\nReturn a JSON object with {d}.",
    "Give me JSON with {d}. Text: {t}", "{t} Answer in JSON with {d}", "Turn this into JSON with {d}: {t}",
    "Please extract a JSON object with {d} from this text: {t}", "Return only JSON with {d}.\n{t}",
    "{t}\nReply with a JSON object that has {d}", "Fill a JSON object with {d} from the text below.\n\n{t}",
    "Convert to JSON with {d}\n\n{t}", "Text: {t}\nTask: answer with a JSON object with {d}",
)  # fmt: skip


def make(rng: Random, held_out: bool) -> Episode:
    """One object to fill in. The split is by the object."""

    def propose() -> tuple[str, Turn]:
        _, subject_of, subject_keys, fields = rng.choice(DOMAINS)
        subject = subject_of(rng)
        chosen = rng.sample(fields, rng.randint(1, min(5, len(fields))))
        free = rng.random() < 0.2  # keys that no other example has
        entries: list[tuple[str, str, Value]] = []
        clauses: list[str] = []
        if subject_keys and (rng.random() < 0.8 or len(chosen) == 1):
            entries.append((rng.choice(subject_keys), "string", subject.removeprefix("the ")))
        for keys, kind, maker in chosen:
            key = rng.choice(keys)
            if free:
                key = rng.choice((any_word(rng), pseudo_word(rng), rng.choice(keys)))
            elif rng.random() < 0.06 and key not in ("vaccinated", "healthy", "friendly", "tame"):
                key = f"{key}_{rng.choice(('1', 'value', 'info', 'field', 'x'))}" if rng.random() < 0.5 else key.upper()
            value, clause = maker(rng)
            if any(key == other for other, _, _ in entries):
                continue
            if free and kind in ("string", "integer", "number"):
                forms = (
                    f"the {key} of {{s}} is {value}",
                    f"{{s}} has the {key} {value}",
                    f"the {key} is {value}",
                    f"its {key} is {value}",
                )
                clause = rng.choice(forms if clauses else forms[:2])  # the first one names the subject
            elif free:
                continue
            clauses.append(clause.replace("{k}", key))
            if rng.random() < 0.88 or not entries:  # the rest is told, but not asked for
                entries.append((key, kind, value))
        if not entries:
            entries.append((rng.choice(("name", "subject")), "string", subject.removeprefix("the ")))
        rng.shuffle(clauses)
        if rng.random() < 0.6:
            rng.shuffle(entries)
        text, i = "", 0
        while i < len(clauses):
            take = clauses[i : i + rng.choice((1, 1, 2))]
            if len(take) == 2 and all(c.startswith("{s} ") for c in take) and rng.random() < 0.3:
                who = "who" if subject[0].isupper() else "which"
                take = [f"{{s}}, {who} {take[0][4:]}, {take[1][4:]}"]
                i += 1
            joined = " and ".join(c.replace("{s}", subject) if j == 0 or not c.startswith("{s}") else c.replace("{s} ",
                "", 1).replace("{s}", subject)
                                  for j, c in enumerate(take))  # fmt: skip
            text += (" " if text else "") + joined[0].upper() + joined[1:] + "."
            i += len(take)
        if not text:
            text = f"{subject[0].upper()}{subject[1:]} is here."
        data = {k: v for k, _, v in entries}
        described = _describe(rng, [(k, t) for k, t, _ in entries])
        request = rng.choice(REQUESTS)
        ask = request.replace("{d}", described).replace("{t}", text).rstrip()
        if ask.endswith(described) and rng.random() < 0.7:
            ask += "."
        return f"json {dumps(data)}", Turn(ask, dumps(data), Check("json", data))

    if not held_out and rng.random() < 0.05:  # a small sum, answered as an object
        turn = arithmetic.make(rng, False).turns[0]
        if (
            turn.check is not None
            and isinstance(turn.check.want, int)
            and "÷" not in turn.answer
            and "remainder" not in turn.answer
        ):
            key = rng.choice(("answer", "result", "value", "sum", any_word(rng)))
            form = rng.choice(
                (
                    'Reply in JSON: {{"{k}": integer}}.',
                    'Answer as JSON with the key "{k}".',
                    "Answer with a JSON object with the field {k} (integer).",
                )
            )
            data = {key: turn.check.want}
            return Episode(
                [Turn(f"{form.format(k=key)} {turn.user.split(' Answer')[0]}", dumps(data), Check("json", data))]
            )
    return Episode([draw(held_out, propose) for _ in range(1 if held_out else rng.choice((1, 1, 2)))])
