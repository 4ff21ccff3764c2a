"""Write the texts of docs/api.md into the package, for /openapi.json and /docs: what each endpoint and field does.

python tools/api_texts.py --write
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
TEXTS = ROOT / "python" / "minisgl" / "api" / "texts.json"
ROW = re.compile(r"^\| (`.*?) \| (.*) \| .* \|$")
CODE = re.compile(r"`([^`]*)`")
EXAMPLE = re.compile(r"^# ([A-Z]+ /\S+)\n((?:[^#\n].*\n)+)", re.M)  # a comment and the commands below it
LINK = re.compile(r", see \[below\]\([^)]*\)|\[([^]]*)\]\([^)]*\)")


def texts() -> dict[str, str]:
    """Return the middle column of the tables by "GET /path" or "Type.field", and commands by "curl GET /path"."""
    found = {}
    kind = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            kind = next(iter(CODE.findall(line)), "")
        elif (row := ROW.match(line)) is not None:
            names = [name if not kind else f"{kind}.{name}" for name in CODE.findall(row[1])]
            found |= dict.fromkeys(names, LINK.sub(lambda link: link[1] or "", row[2]))
    examples = PAGE.read_text(encoding="utf-8").partition("\n## Examples\n")[2].split("```")[1]
    return found | {f"curl {key}": text.rstrip() for key, text in EXAMPLE.findall(examples)}


def rendered() -> str:
    """Return the file."""
    return json.dumps(texts(), indent=0, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv:
        TEXTS.write_text(rendered(), encoding="utf-8")
    else:
        print(rendered())
