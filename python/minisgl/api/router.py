"""Chooses a replica for each request, and moves the requests of a lost replica. Uses no sockets and no clock."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from minisgl.core.message import Failure, Finished, PrefixesMsg, StatsMsg, TierView, UserMsg, UserReply, ids_from_bytes
from minisgl.core.plan import FinishReason
from minisgl.kvcache.prefixes import prefix_hashes, salt_digest

logger = logging.getLogger(__name__)

SILENT_S: Final = 3.0  # a replica without a heartbeat for this long gets requests only if all others are silent, too
MAX_DEATHS: Final = 2  # a request fails after so many of its replicas have died: it may be the cause
ANSWER_TOKENS: Final = 256.0  # the first estimate of an answer's length
DECAY: Final = 0.98  # of the estimate, with each answer
GAUGES: Final = ("running", "waiting", "pages_total", "pages_free", "pages_evictable", "pages_held")
NOT_SUMMED: Final = ("incarnation", "step", "page_size", "tiers")


@dataclass
class Routed:
    """An open request, the incarnation that serves it, and its output tokens so far.

    `queued` is the work until its first token, in prompt tokens to compute; 0 afterwards.
    """

    msg: UserMsg
    incarnation: int
    queued: int
    output: bytearray = field(default_factory=bytearray)
    deaths: int = 0
    is_aborted: bool = False


@dataclass
class Replica:
    """The router's view of one incarnation of replica number `index`."""

    incarnation: int
    index: int
    heard: float  # the time of the last heartbeat
    accepts_requests: bool = True
    queued: int = 0  # the sum over `requests`
    requests: dict[int, Routed] = field(default_factory=dict)  # by uid
    prefixes: dict[int, int] = field(default_factory=dict)  # hash of a cached prefix -> its location
    costs: list[float] = field(default_factory=list)  # by location: the cost of loading a page, in pages to compute
    page_size: int = 1 << 30  # unknown until its first `PrefixesMsg`
    stats: StatsMsg = field(default_factory=StatsMsg)

    def find(self, hashes: list[int]) -> tuple[int, float]:
        """Return how many of a prompt's pages are cached, and the cost of loading them, in pages to compute."""
        # If a prefix is cached (on the device), all shorter prefixes are cached (on the device), too.
        count = bisect_left(hashes, True, key=lambda h: h not in self.prefixes)
        on_device = bisect_left(hashes, True, hi=count, key=lambda h: self.prefixes[h] > 0)
        return count, sum(self.costs[self.prefixes[h]] for h in hashes[on_device:count])


class Router:
    """Sends each request to the replica where it costs least.

    The cost of a request on a replica is the prompt tokens queued there, its own tokens that are not cached there, and
    one token of work for each token of its answer and each request that runs there. The length of the answer is
    estimated from earlier answers. The cached prefixes are known exactly: each replica reports changes after each step.
    A page in a tier counts as the part of a page that the replica computes in the time of loading it.
    """

    def __init__(self) -> None:
        self.replicas: dict[int, Replica] = {}  # by incarnation, without lost ones
        self.deaths = 0
        self.moved = 0  # requests moved to another incarnation
        self.cached = 0  # prompt tokens that the chosen replica had cached
        self._requests: dict[int, Routed] = {}
        self._lost: dict[int, tuple[bool, dict[int, Routed]]] = {}  # incarnation -> whether it died, its requests
        self._past = StatsMsg()  # the counters of lost incarnations
        self._answer_tokens = ANSWER_TOKENS

    # -- incarnations

    def open(self, incarnation: int, index: int, now: float) -> None:
        """Add an `incarnation` of replica number `index`, which then gets requests."""
        self.replicas[incarnation] = Replica(incarnation, index, now)

    def remove(self, incarnation: int, has_died: bool) -> None:
        """Remove `incarnation`, and keep its requests for `move`."""
        replica = self.replicas.pop(incarnation)
        self.deaths += has_died
        self._lost[incarnation] = has_died, replica.requests
        tiers = [msgspec.structs.replace(tier, pages_total=0, pages_held=0) for tier in replica.stats.tiers]
        counters = msgspec.structs.replace(replica.stats, tiers=tiers, **dict.fromkeys(GAUGES, 0))
        self._past = _sum([self._past, counters])

    def move(self, incarnation: int, now: float) -> tuple[list[tuple[int, UserMsg]], list[Finished]]:
        """Return the requests of a lost `incarnation` with their new ones, and the final replies of those that end."""
        has_died, requests = self._lost.pop(incarnation, (False, {}))
        moved: list[tuple[int, UserMsg]] = []
        ended: list[Finished] = []
        for uid, routed in requests.items():
            del self._requests[uid]
            if routed.is_aborted:
                ended.append(Finished(uid=uid, reason=FinishReason.ABORT))
                continue
            routed.deaths += has_died
            message = "no replica is left to serve this request; try again later"
            if routed.deaths >= MAX_DEATHS:
                message = f"{MAX_DEATHS} replicas have died while they served this request; it may be the cause"
            elif (target := self._assign(routed, now)) is not None:
                moved.append((target, msgspec.structs.replace(routed.msg, output_ids=bytes(routed.output))))
                self.moved += 1
                continue
            failure = Failure(message=message, code="replica_failed", status=503)
            ended.append(Finished(uid=uid, reason=FinishReason.ERROR, has_text=False, failure=failure))
        return moved, ended

    # -- requests

    def route(self, msg: UserMsg, now: float) -> int | None:
        """Choose the incarnation that serves a new request and return it; None if there is no replica."""
        return self._assign(Routed(msg, -1, 0), now)

    def abort(self, uid: int) -> Sequence[int]:
        """Return the incarnations that may serve `uid`: all, if a stop string has ended its answer here already."""
        routed = self._requests.get(uid)
        if routed is None:
            return list(self.replicas)
        routed.is_aborted = True
        return [routed.incarnation] if routed.incarnation in self.replicas else []

    def note_reply(self, reply: UserReply) -> None:
        """Record the new tokens of a request, and remove it at its end."""
        routed = self._requests.get(reply.uid)
        if routed is None:
            return
        replica = self.replicas.get(routed.incarnation)
        if replica is not None:
            replica.queued -= routed.queued
            routed.queued = 0
        routed.output += reply.output_ids
        if reply.finish_reason is None:
            return
        del self._requests[reply.uid]
        requests = self._lost[routed.incarnation][1] if replica is None else replica.requests
        del requests[reply.uid]
        if reply.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._answer_tokens += (1 - DECAY) * (reply.completion_tokens - self._answer_tokens)

    def _assign(self, routed: Routed, now: float) -> int | None:
        """Assign a request to the replica where it costs least, and return its incarnation."""
        msg = routed.msg
        ids = ids_from_bytes(msg.input_ids + bytes(routed.output))
        candidates = [r for r in self.replicas.values() if r.accepts_requests] or list(self.replicas.values())
        if not candidates:
            return None
        reusable = ids[:0] if msg.sampling_params.wants_prompt_logprobs and not routed.output else ids[:-1]
        page_size = min(r.page_size for r in candidates)
        hashes = prefix_hashes(reusable, page_size, salt_digest(msg.sampling_params.salt)).tolist()
        found = {r.incarnation: r.find(hashes) for r in candidates}
        todo = {i: len(ids) - round(page_size * (count - cost)) for i, (count, cost) in found.items()}
        answer = min(self._answer_tokens, msg.sampling_params.max_tokens or self._answer_tokens)

        def cost(replica: Replica) -> tuple[bool, float, int, int]:
            work = replica.queued + todo[replica.incarnation] + answer * len(replica.requests)
            return now - replica.heard > SILENT_S, work, len(replica.requests), replica.index

        best = min(candidates, key=cost)
        routed.incarnation, routed.queued = best.incarnation, todo[best.incarnation]
        best.queued += routed.queued
        best.requests[msg.uid] = self._requests[msg.uid] = routed
        self.cached += page_size * found[best.incarnation][0]
        return best.incarnation

    # -- messages from replicas

    def note_prefixes(self, msg: PrefixesMsg) -> None:
        """Apply the changes of a replica's cache."""
        if (replica := self.replicas.get(msg.incarnation)) is not None:
            replica.page_size, replica.costs = msg.page_size, msg.costs
            hashes, locations = np.frombuffer(msg.hashes, np.uint64), np.frombuffer(msg.locations, np.int8)
            replica.prefixes.update(zip(hashes.tolist(), locations.tolist(), strict=True))
            for gone in hashes[locations < 0].tolist():
                del replica.prefixes[gone]

    def note_stats(self, msg: StatsMsg, now: float) -> None:
        """Record a heartbeat."""
        if (replica := self.replicas.get(msg.incarnation)) is not None:
            replica.heard, replica.stats = now, msg

    @property
    def stats(self) -> StatsMsg:
        """The sum over all replicas; its counters include lost incarnations."""
        return _sum([self._past, *(r.stats for r in self.replicas.values())])


def _sum(stats: Sequence[StatsMsg]) -> StatsMsg:
    added = {f: sum(getattr(s, f) for s in stats) for f in StatsMsg.__struct_fields__ if f not in NOT_SUMMED}
    tiers: dict[str, TierView] = {}
    for tier in (tier for s in stats for tier in s.tiers):
        sums = {
            f: getattr(tier, f) + getattr(tiers.get(tier.name), f, 0) for f in tier.__struct_fields__ if f != "name"
        }
        tiers[tier.name] = TierView(name=tier.name, **sums)
    return msgspec.structs.replace(stats[-1], tiers=list(tiers.values()), **added)
