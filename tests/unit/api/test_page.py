"""The page at `/`: its markup and its script."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import minisgl.api

PAGE = (Path(minisgl.api.__file__).parent / "page.html").read_text(encoding="utf-8")


class Tags(HTMLParser):
    """Every start tag with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_page_fetches_nothing_and_never_makes_markup_of_text() -> None:
    parser = Tags()
    parser.feed(PAGE)
    for tag, attributes in parser.tags:
        assert "style" not in attributes, tag
        assert not any(name.startswith("on") for name in attributes), tag
        assert (attributes.get("href") or "data:").startswith("data:")
        assert "src" not in attributes
    script = PAGE.partition("<script>")[2]
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "cookie",
        "http:",
    ):
        assert word not in script, word


def test_every_control_has_a_name() -> None:
    parser = Tags()
    parser.feed(PAGE)
    ids = [a["id"] for _, a in parser.tags if "id" in a]
    assert len(ids) == len(set(ids))
    labels = re.findall(r"<label.*?</label>", PAGE)
    for tag, attributes in parser.tags:
        if tag in ("input", "textarea"):
            assert "aria-label" in attributes or any(f'id="{attributes["id"]}"' in label for label in labels)
