"""What a person may see of the scheduler: a snapshot of bounded size, made on request in about a millisecond."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from minisgl.message import EngineView, NodeView, RequestView, ids_to_bytes

if TYPE_CHECKING:
    from minisgl.kvcache.radix_manager import RadixTreeNode
    from minisgl.scheduler.req import Req
    from minisgl.scheduler.rows import Rows
    from minisgl.scheduler.scheduler import Scheduler

MAX_REQUESTS: Final = 48
HEAD_TOKENS: Final = 32  # of an edge, which may have thousands


def engine_view(scheduler: Scheduler, uid: int) -> EngineView:
    """The answer to the `ViewMsg` of `uid`."""
    cache, rows = scheduler.cache, scheduler.rows
    tree, root_hidden = cache.prefix.outline()
    index = {outlined.node: i for i, outlined in enumerate(tree)}
    nodes = [
        NodeView(
            parent=parent,
            tokens=len(node.key),
            pages=node.length,
            ref_count=node.ref_count,
            idle_steps=scheduler.step_number - node.timestamp,
            hidden=hidden,
            head=ids_to_bytes(node.key[:HEAD_TOKENS]),
        )
        for node, parent, hidden in tree
    ]
    in_prefill, decoding = scheduler.prefill.chunked, scheduler.decode.running
    batch = [(req, True) for req in in_prefill] + [(req, False) for req in decoding]
    fenced = len(cache.unowned_pages()[1])
    free = cache.free_size + fenced
    locked, cached = cache.prefix.protected_size, cache.prefix.evictable_size
    return EngineView(
        uid=uid,
        step=scheduler.step_number,
        page_size=cache.page_size,
        pages_total=cache.num_pages,
        pages_free=free,
        pages_private=cache.num_pages - free - locked - cached,
        pages_locked=locked,
        pages_cached=cached,
        running=len(batch),
        waiting=len(scheduler.prefill.waiting),
        requests=[_request(req, is_prefill, rows, index) for req, is_prefill in batch[:MAX_REQUESTS]],
        nodes=nodes,
        nodes_total=cache.prefix.num_nodes,
        nodes_hidden=root_hidden,
    )


def _request(req: Req, is_prefill: bool, rows: Rows, index: dict[RadixTreeNode, int]) -> RequestView:
    return RequestView(
        uid=req.uid,
        is_prefill=is_prefill,
        prompt_tokens=req.prompt_len,
        prefix_tokens=req.prefix_hit,
        computed_tokens=int(rows.cached_len[req.row]),
        output_tokens=max(0, int(rows.confirmed_len[req.row]) - req.prompt_len),
        pages=len(req.pages),
        node=index.get(req.cache_handle.node, -1),
    )
