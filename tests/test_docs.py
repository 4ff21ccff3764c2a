"""The documentation agrees with the repository: links, the tree of files, and the table of figures."""

from __future__ import annotations

import importlib.util
import json
import re
import string
from pathlib import Path

import pytest

from tools import api_texts, flag_table
from tools.code_map import blocks

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "python").rglob("*.md")])
LINK = re.compile(r"\]\(([^()\s]+)\)")
DROPPED = set(string.punctuation) - set("-_")


def prose(page: Path) -> str:
    """Return the page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of the page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.M)
    return {"".join(c for c in h.lower() if c not in DROPPED).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{link} does not exist"
        assert not anchor or anchor in anchors(target), f"{link} has no such heading"


def test_the_table_of_figures_is_that_of_the_chart() -> None:
    spec = importlib.util.spec_from_file_location("chart", ROOT / "benchmark" / "chart.py")
    assert spec is not None
    assert spec.loader is not None
    chart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chart)
    page = (ROOT / "docs" / "performance.md").read_text()
    assert "\n".join(chart.table(json.loads(chart.FIGURES.read_text()))) in page, "print it: python benchmark/chart.py"


PATH = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|cpp|cu|h|md|json|html)|(?:[\w.-]+/)+)(?::[^`]*)?`")
NAMES = ("architecture", "rooms", "files", "tour", "names", "glossary", "extending", "adding_a_model")
NOTEBOOK = [str(page.relative_to(ROOT)) for page in PAGES if page.parent.name == "notebook"]
CODE_PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in NAMES), *NOTEBOOK]


@pytest.mark.parametrize("page", CODE_PAGES)
def test_named_files_exist(page: str) -> None:
    bases = (ROOT, ROOT / "tests", ROOT / "python" / "minisgl", ROOT / "python" / "minisgl" / "native" / "cpp")
    missing = {name for name in PATH.findall(prose(ROOT / page)) if not any((b / name).exists() for b in bases)}
    assert not missing


def test_names_stand_in_their_files() -> None:
    """A row of docs/names.md: | there | here | file | what differs |."""
    package = ROOT / "python" / "minisgl"
    missing = []
    for line in (ROOT / "docs" / "names.md").read_text().splitlines():
        there, here, files, *_ = [*line.strip("| ").split(" | "), "", "", ""]
        paths = re.findall(r"`([\w/]+\.py)`", files)
        text = "".join((package / path).read_text() for path in paths)
        names = re.findall(r"`([\w.]+)`", there if here == "the same" else here)
        missing += [name for name in names if paths and not all(part in text for part in name.split("."))]
    assert not missing


def test_troubleshooting_quotes_messages_of_the_code() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "python").rglob("*.py"))
    code = re.sub(r'"\n\s*f?"', "", sources)  # a message over two lines is one
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = page.partition("| you see | go to |")[2].partition("\n## ")[0]
    phrases = [
        part.strip() for quoted in re.findall(r'"([^"]+)"', table) for part in re.split(r"\.\.\.| N\b|\d+ s", quoted)
    ]
    assert len(phrases) > 12
    assert [phrase for phrase in phrases if phrase not in code] == []


def test_the_tables_of_flags_are_up_to_date() -> None:
    assert f"{flag_table.BEGIN}\n{flag_table.block()}\n{flag_table.END}" in flag_table.PAGE.read_text(), (
        "run `make rooms`"
    )


def test_the_texts_of_the_api_are_up_to_date() -> None:
    assert api_texts.TEXTS.read_text() == api_texts.rendered(), "run `make rooms`"


def test_the_maps_of_the_code_are_up_to_date() -> None:
    for page, (begin, text, end) in blocks().items():
        assert f"{begin}\n{text}\n{end}" in page.read_text(), f"{page.name}: run `make rooms`"


def test_the_tour_has_at_most_40_files_of_the_package() -> None:
    page = (ROOT / "docs" / "tour.md").read_text()
    files = re.findall(r"^(\d+)\. `([\w/]+\.py)`: ", page, flags=re.M)
    assert [int(number) for number, _ in files] == [*range(1, len(files) + 1)]
    assert len({name for _, name in files}) == len(files) <= 40
