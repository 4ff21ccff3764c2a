"""A bounded view of the radix tree for people: its most interesting nodes, for a tree of any size."""

from __future__ import annotations

import heapq
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from minisgl.kvcache.radix_manager import RadixTreeNode

MAX_NODES: Final = 160
MAX_CHILDREN: Final = 16  # of one node
MAX_LOOKS: Final = 2000  # examined children in all, which bounds the time


class OutlinedNode(NamedTuple):
    """A node, its parent's index in the outline (-1 below the root), and the number of children not shown."""

    node: RadixTreeNode
    parent: int
    hidden: int


def outline(root: RadixTreeNode) -> tuple[list[OutlinedNode], int]:
    """Return locked nodes, then the most recently used ones, parents first; and the root's number of hidden children.

    A parent is locked if a child is, and was used when a child was, so the best nodes are found from the root down.
    """
    found: list[tuple[RadixTreeNode, int]] = [(root, -1)]
    shown: dict[RadixTreeNode, int] = {root: 0}  # children
    best: list[tuple[tuple[bool, int], int, RadixTreeNode, int]] = []  # a heap; the serial number decides a tie
    serial = looks = 0
    for at, (node, _) in enumerate(found):
        children = list(islice(reversed(node.children.values()), max(0, MAX_LOOKS - looks)))  # newest first
        looks += len(children)
        for child in heapq.nlargest(MAX_CHILDREN, children, key=_interest):
            serial += 1
            is_locked, timestamp = _interest(child)
            heapq.heappush(best, ((not is_locked, -timestamp), serial, child, at))
        if len(found) > MAX_NODES:
            break
        if best:
            _, _, child, parent = heapq.heappop(best)
            found.append((child, parent))
            shown[child] = 0
            shown[found[parent][0]] += 1
    nodes = [OutlinedNode(node, parent - 1, len(node.children) - shown[node]) for node, parent in found]
    return nodes[1:], nodes[0].hidden


def _interest(node: RadixTreeNode) -> tuple[bool, int]:
    return node.ref_count > 0, node.timestamp
