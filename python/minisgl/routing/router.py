"""Chooses a replica for each request, and moves the requests of a replica that is lost. No sockets, no clock."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from minisgl.core import FinishReason
from minisgl.message import Failure, Finished, PrefixesMsg, StatsMsg, TierView, UserMsg, UserReply, ids_from_bytes
from minisgl.routing.prefixes import prefix_hashes, salt_digest

logger = logging.getLogger(__name__)

SILENT_S: Final = 3.0  # without a heartbeat, after which a replica gets requests only if all others are silent, too
MAX_DEATHS: Final = 2  # of replicas under one request, which may be their cause
ANSWER_TOKENS: Final = 256.0  # of an answer, before any has ended
MEMORY: Final = 0.98  # how much of that estimate stays after an answer
GAUGES: Final = ("running", "waiting", "pages_total", "pages_free", "pages_evictable", "pages_held")
NOT_ADDED: Final = ("life", "step", "page_size", "tiers")


@dataclass
class Routed:
    """An open request, the replica that has it, and the tokens sent so far.

    `queued` is the work of the replica before the first token, in prompt tokens to compute.
    """

    msg: UserMsg
    life: int
    queued: int
    output: bytearray = field(default_factory=bytearray)
    deaths: int = 0
    is_aborted: bool = False


@dataclass
class Replica:
    """What is known of one life of replica number `index`."""

    life: int
    index: int
    heard: float  # when the last heartbeat came
    takes_requests: bool = True
    queued: int = 0  # the sum over `requests`
    requests: dict[int, Routed] = field(default_factory=dict)  # by uid
    prefixes: dict[int, int] = field(default_factory=dict)  # hash of what its cache has -> place
    costs: list[float] = field(default_factory=list)  # of a page in each place, in pages to compute
    page_size: int = 1 << 30  # until it tells
    stats: StatsMsg = field(default_factory=StatsMsg)

    def find(self, hashes: list[int]) -> tuple[int, float]:
        """Return how many of a prompt's prefixes are cached, and what it costs to load them, in pages to compute."""
        # All shorter prefixes of a cached one are cached, and those of one on the device are on the device.
        count = bisect_left(hashes, True, key=lambda h: h not in self.prefixes)
        on_device = bisect_left(hashes, True, hi=count, key=lambda h: self.prefixes[h] > 0)
        return count, sum(self.costs[self.prefixes[h]] for h in hashes[on_device:count])


class Router:
    """Places requests where they begin first.

    A request waits for the prompt tokens queued before it and for its own that are not cached there. Each request that
    runs beside it costs about one token of work for each token of its answer, whose length is estimated from the
    answers so far. What a replica has cached is known, not estimated: each tells its changes after each step. What it
    has in a tier costs as many tokens of work as could be computed while it is loaded, by the costs that it measured.
    """

    def __init__(self) -> None:
        self.replicas: dict[int, Replica] = {}  # by life, of those that live
        self.deaths = 0
        self.moved = 0  # requests that have gone on in another life
        self.cached = 0  # prompt tokens found in the cache of the chosen replica
        self._requests: dict[int, Routed] = {}
        self._lost: dict[int, tuple[bool, dict[int, Routed]]] = {}  # life -> whether it died, its requests
        self._past = StatsMsg()  # counters of the lives that are over
        self._answer_tokens = ANSWER_TOKENS

    # -- lives

    def open(self, life: int, index: int, now: float) -> None:
        """Begin to send requests to a `life` of replica number `index`."""
        self.replicas[life] = Replica(life, index, now)

    def lose(self, life: int, has_died: bool) -> bool:
        """Take no account of `life` any more; its requests wait for `move`. Return whether it was alive."""
        replica = self.replicas.pop(life, None)
        if replica is None:
            return False
        self.deaths += has_died
        self._lost[life] = has_died, replica.requests
        tiers = [msgspec.structs.replace(tier, pages_total=0, pages_held=0) for tier in replica.stats.tiers]
        gone = msgspec.structs.replace(replica.stats, tiers=tiers, **dict.fromkeys(GAUGES, 0))
        self._past = _sum([self._past, gone])
        return True

    def move(self, life: int, now: float) -> tuple[list[tuple[int, UserMsg]], list[Finished]]:
        """Return where the requests of the lost `life` go on, and the ends of those that do not."""
        has_died, requests = self._lost.pop(life, (False, {}))
        moved: list[tuple[int, UserMsg]] = []
        ended: list[Finished] = []
        for uid, routed in requests.items():
            del self._requests[uid]
            if routed.is_aborted:
                ended.append(Finished(uid=uid, reason=FinishReason.ABORT))
                continue
            routed.deaths += has_died
            message = "no replica is left"
            if routed.deaths >= MAX_DEATHS:
                message = f"{MAX_DEATHS} replicas have died under this request"
            elif (target := self._place(routed, now)) is not None:
                moved.append((target, msgspec.structs.replace(routed.msg, output_ids=bytes(routed.output))))
                self.moved += 1
                continue
            failure = Failure(message=message, code="replica_failed", status=503)
            ended.append(Finished(uid=uid, reason=FinishReason.ERROR, has_text=False, failure=failure))
        return moved, ended

    # -- requests

    def route(self, msg: UserMsg, now: float) -> int | None:
        """Return the life that gets the request; None if there is none."""
        return self._place(Routed(msg, -1, 0), now)

    def abort(self, uid: int) -> Sequence[int]:
        """Return the lives that may work on `uid`: any, if its answer has ended here by a stop string."""
        routed = self._requests.get(uid)
        if routed is None:
            return list(self.replicas)
        routed.is_aborted = True
        return [routed.life] if routed.life in self.replicas else []

    def note_reply(self, reply: UserReply) -> None:
        """Keep the new tokens of a request, and forget it at its end."""
        routed = self._requests.get(reply.uid)
        if routed is None:
            return
        replica = self.replicas.get(routed.life)
        if replica is not None:
            replica.queued -= routed.queued
            routed.queued = 0
        routed.output += reply.output_ids
        if reply.finish_reason is None:
            return
        del self._requests[reply.uid]
        requests = self._lost[routed.life][1] if replica is None else replica.requests
        del requests[reply.uid]
        if reply.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._answer_tokens += (1 - MEMORY) * (reply.completion_tokens - self._answer_tokens)

    def _place(self, routed: Routed, now: float) -> int | None:
        """Give a request to the replica where it costs least."""
        msg = routed.msg
        ids = ids_from_bytes(msg.input_ids + bytes(routed.output))
        candidates = [r for r in self.replicas.values() if r.takes_requests] or list(self.replicas.values())
        if not candidates:
            return None
        usable = ids[:0] if msg.sampling_params.wants_prompt_logprobs and not routed.output else ids[:-1]
        page_size = min(r.page_size for r in candidates)
        hashes = prefix_hashes(usable, page_size, salt_digest(msg.sampling_params.cache_salt)).tolist()
        found = {r.life: r.find(hashes) for r in candidates}
        todo = {life: len(ids) - round(page_size * (count - cost)) for life, (count, cost) in found.items()}
        answer = min(self._answer_tokens, msg.sampling_params.max_tokens or self._answer_tokens)

        def cost(replica: Replica) -> tuple[bool, float, int, int]:
            work = replica.queued + todo[replica.life] + answer * len(replica.requests)
            return now - replica.heard > SILENT_S, work, len(replica.requests), replica.index

        best = min(candidates, key=cost)
        routed.life, routed.queued = best.life, todo[best.life]
        best.queued += routed.queued
        best.requests[msg.uid] = self._requests[msg.uid] = routed
        self.cached += page_size * found[best.life][0]
        return best.life

    # -- what replicas tell

    def note_prefixes(self, msg: PrefixesMsg) -> None:
        """Apply the changes of a replica's cache."""
        if (replica := self.replicas.get(msg.life)) is not None:
            replica.page_size, replica.costs = msg.page_size, msg.costs
            hashes, places = np.frombuffer(msg.hashes, np.uint64), np.frombuffer(msg.places, np.int8)
            replica.prefixes.update(zip(hashes.tolist(), places.tolist(), strict=True))
            for gone in hashes[places < 0].tolist():
                del replica.prefixes[gone]

    def note_stats(self, msg: StatsMsg, now: float) -> None:
        """Keep a heartbeat."""
        if (replica := self.replicas.get(msg.life)) is not None:
            replica.heard, replica.stats = now, msg

    @property
    def stats(self) -> StatsMsg:
        """The sum over all replicas; counters include lives that are over."""
        return _sum([self._past, *(r.stats for r in self.replicas.values())])


def _sum(stats: Sequence[StatsMsg]) -> StatsMsg:
    added = {f: sum(getattr(s, f) for s in stats) for f in StatsMsg.__struct_fields__ if f not in NOT_ADDED}
    tiers: dict[str, TierView] = {}
    for tier in (tier for s in stats for tier in s.tiers):
        sums = {
            f: getattr(tier, f) + getattr(tiers.get(tier.name), f, 0) for f in tier.__struct_fields__ if f != "name"
        }
        tiers[tier.name] = TierView(name=tier.name, **sums)
    return msgspec.structs.replace(stats[-1], tiers=list(tiers.values()), **added)
