"""What can never be served is refused before it costs anything; the rest becomes a `Req`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.errors import RequestError
from minisgl.message import UserMsg, ids_from_bytes
from minisgl.params import validate_prompt, validate_sampling
from minisgl.scheduler.plan import noise_key
from minisgl.scheduler.req import Req

if TYPE_CHECKING:
    from minisgl.params import Limits
    from minisgl.settings.options import SchedulerConfig


class Door:
    """Checks requests and numbers them as they come.

    `pool_tokens` is the capacity of the whole KV pool: a request that exceeds it alone could never finish.
    """

    def __init__(self, config: SchedulerConfig, limits: Limits, pool_tokens: int) -> None:
        self.limits = limits
        self.pool_tokens = pool_tokens
        self.max_queued = config.max_queued_requests
        self.sampling_seed = config.sampling_seed
        self._arrivals = 0

    def output_budget(self, msg: UserMsg) -> int:
        """How many tokens a request may generate. Raises `RequestError` naming the field and the limit."""
        ids, params = ids_from_bytes(msg.input_ids), msg.sampling_params
        validate_sampling(params, self.limits)
        validate_prompt(ids, params, self.limits)
        room = self.pool_tokens + 1  # the last token needs no K/V
        wanted = params.max_tokens or 1
        if len(ids) + wanted > room:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and asks for {wanted} more, but the KV cache holds {room}",
                param=params.room_field,
                code="context_length_exceeded",
            )
        # To generate nothing is to generate a token that nobody sees.
        return min(self.limits.max_model_len, room) - len(ids) if params.max_tokens is None else wanted

    def admit(self, msg: UserMsg, num_waiting: int) -> Req:
        """The request that `msg` asks for. Raises `RequestError` if it cannot be served or too many are waiting."""
        max_tokens = self.output_budget(msg)
        if num_waiting >= self.max_queued:
            raise RequestError(
                f"{self.max_queued} requests are waiting already; try again later", code="queue_full", status=429
            )
        self._arrivals += 1
        key = noise_key(msg.sampling_params.seed, self.sampling_seed, msg.uid)
        return Req(msg.uid, ids_from_bytes(msg.input_ids), msg.sampling_params, max_tokens, self._arrivals, key)
