"""Tells a router which prefixes are cached, and where: by hash, at first all of them and then the changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.kvcache.prefixes import continued_hashes

if TYPE_CHECKING:
    from minisgl.kvcache.tree import Node


class RouterFeed:
    """The changes since the last `pop`, by the hash of each prefix. Costs nothing before `start`."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._changes: dict[int, int] | None = None  # hash -> location; None before `start`

    def start(self, nodes: list[Node]) -> None:
        """Begin with all `nodes`, parents first, as the changes."""
        self._changes = {}
        for node in nodes:
            self.report(node, node.location)

    def report(self, node: Node, location: int) -> None:
        """Report that `location` is now the first location of `node`; -1 for none. A hidden node has none already."""
        if self._changes is None or node.is_hidden:
            return
        if not len(node.hashes):
            parent = node.parent
            assert parent is not None
            before = int(parent.hashes[-1]) if parent.depth else int.from_bytes(node.salt[:8])
            node.hashes = continued_hashes(node.key, self._page_size, before, parent.depth * self._page_size)
        self._changes.update(dict.fromkeys(node.hashes.tolist(), location))

    def pop(self) -> dict[int, int]:
        """Return the changes since the last call; none before `start`."""
        if not self._changes:
            return {}
        changes, self._changes = self._changes, {}
        return changes
