"""Try every flag of vLLM's, SGLang's and mini-sglang's help, and write what happens into docs/coming_from.md.

    python tools/flag_table.py          print the tables
    python tools/flag_table.py --write  rewrite them in the page

docs/flags.json has the flags by the groups of each engine's help.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

from minisgl.settings.foreign import foreign, sentence_for
from minisgl.settings.options import ServerArgs, options_of, spellings_of

ROOT = Path(__file__).resolve().parents[1]
FLAGS = ROOT / "docs" / "flags.json"
PAGE = ROOT / "docs" / "coming_from.md"
BEGIN, END = "<!-- flags: `make rooms` -->", "<!-- end of flags -->"
WORKS, ANYWAY, NAMED, UNKNOWN = "works", "no effect", "error with advice", "unknown"
OTHERS = {"config", "shell_mode"}  # flags of `minisgl serve` that are not options


def flags() -> dict[str, list[str]]:
    """Return the flags of each engine, each once, without -x that stands for --xyz."""
    engines = json.loads(FLAGS.read_text(encoding="utf-8"))
    return {engine: list(dict.fromkeys(" ".join(groups.values()).split())) for engine, groups in engines.items()}


def outcome(flag: str) -> str:
    """Return what `minisgl serve` does with a flag."""
    words = flag.lstrip("-").replace("-", "_")
    if words in spellings_of(ServerArgs) or words in OTHERS:
        return WORKS
    return ANYWAY if words in foreign().redundant else NAMED if sentence_for(words) else UNKNOWN


def counts() -> list[str]:
    """Return the table of counts."""
    lines = [f"| engine | flags | {WORKS} | {ANYWAY} | {NAMED} | {UNKNOWN} |", "|---|--:|--:|--:|--:|--:|"]
    for engine, names in flags().items():
        found = [outcome(flag) for flag in names]
        cells = [len(found), *(found.count(kind) for kind in (WORKS, ANYWAY, NAMED, UNKNOWN))]
        lines.append(f"| {engine} | {' | '.join(map(str, cells))} |")
    return lines


def works() -> list[str]:
    """Return the table of flags that work under another name than ours."""
    ours = defaultdict(list)
    for name in dict.fromkeys(flag for names in flags().values() for flag in names):
        option = spellings_of(ServerArgs).get(name.lstrip("-").replace("-", "_"))
        if option is not None and name != option.flags[0]:
            ours[option.flags[0]].append(f"`{name}`")
    return [
        "| their flag | ours |",
        "|---|---|",
        *(f"| {', '.join(names)} | `{flag}` |" for flag, names in ours.items()),
    ]


def values() -> list[str]:
    """Return the table of other engines' words for our values."""
    lines = ["| option | their value = ours |", "|---|---|"]
    for option in options_of(ServerArgs).values():
        shown = [f"`{word}` = `{value}`" for word, value in option.words.items() if value is not None]
        lines += [f"| `{option.flags[0]}` | {', '.join(shown)} |"] if shown else []
    return lines


def sentences() -> list[str]:
    """Return the table of flags that are an error with advice."""
    tried = list(dict.fromkeys(flag for names in flags().values() for flag in names))
    by_sentence = defaultdict(list)
    for flag in tried:
        if outcome(flag) == NAMED:
            by_sentence[sentence_for(flag.lstrip("-").replace("-", "_"))].append(f"`{flag}`")
    order = [sentence for sentence in dict.fromkeys(foreign().sentences.values()) if sentence in by_sentence]
    lines = ["| flags | the error says |", "|---|---|"]
    for sentence in order:
        names = by_sentence[sentence]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        lines.append(f"| {', '.join(names[:8])}{more} | {sentence.replace('|', '/')} |")
    return lines


def block() -> str:
    """Return the tables of the page."""
    anyway = (
        f"`--{name.replace('_', '-')}" + ("" if v == ["true"] else f" {'|'.join(v)}") + "`"
        for name, v in foreign().redundant.items()
    )
    unknown = (f"`{flag}`" for names in flags().values() for flag in names if outcome(flag) == UNKNOWN)
    parts = [
        "\n".join(counts()),
        "## Flags with another name",
        "\n".join(works()),
        "Some values also have other names:",
        "\n".join(values()),
        "## Flags without effect",
        "With these values they ask for what minisgl always does. Other values are an error.\n\n" + ", ".join(anyway),
        "## Flags without an equivalent",
        "\n".join(sentences()),
        "## Unknown flags",
        "These are an error, like a misspelt flag.\n\n" + ", ".join(dict.fromkeys(unknown)),
    ]
    return "\n\n".join(parts)


def main() -> None:
    if "--write" not in sys.argv:
        print(block())
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{block()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
