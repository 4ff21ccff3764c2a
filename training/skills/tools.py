"""Call a tool from a given list (Hermes form), use its result, and answer normally where no tool fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from training.conversation import Check, Episode, Turn, draw, dumps, tool_call, tool_response, vary
from training.skills.tool_families import FAMILIES, Family, city, invented, words
from training.words import any_name, any_word

Args = dict[str, Any]


@dataclass
class Tool:
    """A family with its names chosen."""

    family: Family
    name: str
    params: list[str]
    spec: dict[str, Any]


def _tool(rng: Random, family: Family) -> Tool:
    name, params = rng.choice(family.names), []
    properties: dict[str, Any] = {}
    with_text = rng.random() < 0.3
    for names, kind, _ in family.params:
        param = next(p for p in rng.sample(names, len(names)) if p not in properties)
        params.append(param)
        properties[param] = {"type": kind}
        if with_text:
            properties[param]["description"] = f"The {param.replace('_', ' ')}"
    parameters = {"type": "object", "properties": properties, "required": params}
    if rng.random() < 0.12:  # an optional parameter that nobody mentions stays out of the call
        extra, values = rng.choice(
            (
                ("unit", ["celsius", "fahrenheit"]),
                ("format", ["short", "long"]),
                ("language", ["en", "de", "fr"]),
                ("mode", ["fast", "slow"]),
            )
        )
        if extra not in properties:
            properties[extra] = {"type": "string", "enum": values}
    elif rng.random() < 0.15:
        del parameters["required"]
    function = {"name": name, "description": rng.choice(family.about), "parameters": parameters}
    if rng.random() < 0.05:
        del function["description"]
    return Tool(family, name, params, {"type": "function", "function": function})


def _tools(rng: Random, first: Family, count: int) -> list[Tool]:
    tools = [_tool(rng, first)]
    while len(tools) < count:
        tool = _tool(rng, invented(rng) if rng.random() < 0.3 else rng.choice(FAMILIES))
        clash = {*tool.family.names} & {n for t in tools for n in t.family.names}
        present = {t.family.names[0] for t in (*tools, tool)}
        if not clash and not ("calculate" in present and present & {"add", "multiply"}):
            tools.append(tool)
    rng.shuffle(tools)
    return tools


def _use(rng: Random, tool: Tool) -> tuple[str, Args, str, str]:
    """Request, arguments, result and answer for one use of the tool."""
    values = [maker(rng) for _, _, maker in tool.family.params]
    slots: Args = {f"p{i}": v for i, v in enumerate(values)}
    ask = vary(rng, rng.choice(tool.family.asks)).format(**slots)
    results = {rng.choice(names): maker(rng) for names, maker in tool.family.results}
    slots.update({f"r{i}": v for i, v in enumerate(results.values())})
    answer = tool.family.says.format(**slots)
    arguments = dict(zip(tool.params, values, strict=True))
    shown: dict[str, Any] = dict(results)
    if tool.params and rng.random() < 0.3:
        shown = {tool.params[0]: values[0], **results} if tool.params[0] not in results else shown
    items = list(shown.items())
    if rng.random() < 0.2:
        rng.shuffle(items)
    roll = rng.random()
    if roll < 0.08:
        text = rng.choice((f"{rng.randint(-9, 99)} degrees and {any_word(rng)}", words(rng),
            f"The {any_word(rng)} is {any_word(rng)}.",
                           f"{any_name(rng)} {rng.randint(1, 999)}",
                           f"{rng.randint(1, 99)} {any_word(rng)}s in {city(rng)}"))  # fmt: skip
        return ask, arguments, text, f"Here is the result: {text}"
    if roll < 0.13:
        reason = rng.choice(
            ("not found", "timeout", "no connection", "invalid input", "unknown", "no result", words(rng))
        )
        return ask, arguments, dumps({"error": reason}), f"Sorry, the tool failed: {reason}."
    content = str(next(iter(results.values()))) if len(results) == 1 and rng.random() < 0.15 else dumps(dict(items))
    return ask, arguments, content, answer


def make(
    rng: Random, held_out: bool, ordinary: Callable[[Random, bool, set[str]], list[Turn]] | None = None
) -> Episode:
    """A call and its result; or, where no tool fits, an ordinary answer. The split is by tool and arguments."""
    family = invented(rng) if rng.random() < 0.4 else rng.choice(FAMILIES)
    tools = _tools(
        rng, family, 1 if family not in FAMILIES and rng.random() < 0.3 else rng.choice((1, 1, 2, 2, 3, 4, 5))
    )
    specs = [t.spec for t in tools]
    turns: list[Turn] = []
    known = {tool.family.names[0] for tool in tools if tool.family in FAMILIES}
    if ordinary is not None and rng.random() < 0.3:
        turns.extend(ordinary(rng, held_out, known))
        if held_out:
            return Episode(turns, tools=specs)
    for tool in rng.sample(tools, 1 if held_out else rng.randint(1, min(2, len(tools)))):

        def propose(tool: Tool = tool) -> tuple[str, tuple[str, Args, str, str]]:
            use = _use(rng, tool)
            return f"tool {sorted(map(str, use[1].values())) or use[0]}", use

        ask, arguments, content, answer = draw(held_out, propose)
        want = [{"name": tool.name, "arguments": arguments}]
        turns.append(Turn(ask, tool_call(tool.name, arguments), Check("tool", want)))
        if rng.random() < 0.85 or held_out:
            turns.append(Turn(tool_response(content), answer, Check("exact", answer)))
    if ordinary is not None and not held_out and rng.random() < 0.25:
        turns.extend(ordinary(rng, held_out, known))
    return Episode(turns, tools=specs)
