"""A bounded view of the radix tree for people: locked and recently used nodes, from a tree of any size."""

from __future__ import annotations

import heapq
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from minisgl.kvcache.tree import Node

MAX_NODES: Final = 160
MAX_CHILDREN: Final = 16  # shown per node
MAX_LOOKS: Final = 2000  # children examined in total, which bounds the time


class OutlinedNode(NamedTuple):
    """A node, its parent's index in the outline (-1 for the root), and the number of its children not shown."""

    node: Node
    parent: int
    hidden: int


def outline(root: Node) -> tuple[list[OutlinedNode], int]:
    """Return locked nodes, then the most recently used ones; and the number of the root's children not shown.

    Parents come before their children. A parent is locked if a child is, and used when a child is, so a search from
    the root down finds the best nodes.
    """
    found: list[tuple[Node, int]] = [(root, -1)]
    shown: dict[Node, int] = {root: 0}  # node -> number of its children that are shown
    best: list[tuple[tuple[bool, int], int, Node, int]] = []  # a heap; the serial number breaks ties
    serial = looks = 0
    for index, (node, _) in enumerate(found):
        children = list(islice(reversed(node.children.values()), max(0, MAX_LOOKS - looks)))  # newest first
        looks += len(children)
        for child in heapq.nlargest(MAX_CHILDREN, children, key=_interest):
            serial += 1
            is_locked, timestamp = _interest(child)
            heapq.heappush(best, ((not is_locked, -timestamp), serial, child, index))
        if len(found) > MAX_NODES:
            break
        if best:
            _, _, child, parent = heapq.heappop(best)
            found.append((child, parent))
            shown[child] = 0
            shown[found[parent][0]] += 1
    nodes = [OutlinedNode(node, parent - 1, len(node.children) - shown[node]) for node, parent in found]
    return nodes[1:], nodes[0].hidden


def _interest(node: Node) -> tuple[bool, int]:
    return node.ref_count > 0, node.timestamp
