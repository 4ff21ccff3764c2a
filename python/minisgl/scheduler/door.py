"""What can never be served is refused before it costs anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.message import UserMsg, ids_from_bytes
from minisgl.params import validate_prompt, validate_sampling
from minisgl.utils.errors import RequestError

if TYPE_CHECKING:
    from minisgl.params import Limits


def output_budget(msg: UserMsg, limits: Limits, pool_tokens: int) -> int:
    """How many tokens a request may generate.

    `pool_tokens` is the capacity of the whole KV pool: a request that exceeds it alone could never finish. Raises
    `RequestError` naming the field and the limit.
    """
    ids, params = ids_from_bytes(msg.input_ids), msg.sampling_params
    validate_sampling(params, limits)
    validate_prompt(ids, params, limits)
    room = pool_tokens + 1  # the last token needs no K/V
    wanted = params.max_tokens or 1
    if len(ids) + wanted > room:
        raise RequestError(
            f"the prompt has {len(ids)} tokens and asks for {wanted} more, but the KV cache holds {room}",
            param="prompt" if params.max_tokens is None else "max_tokens",
            code="context_length_exceeded",
        )
    return params.max_tokens or min(limits.max_model_len, room) - len(ids)
