"""`n`: several answers to one prompt. Each is a request of its own inside; the prefix cache shares the prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec

from minisgl.api.protocol import SamplingFields
from minisgl.errors import RequestError
from minisgl.message import TokenizeMsg

MAX_CHOICES: Final = 128  # of one prompt
MAX_GENERATIONS: Final = 1024  # of one request: prompts times choices


def num_choices(fields: SamplingFields) -> int:
    """How many answers to each prompt are asked for; raises `RequestError` (400) that names the field."""
    n = 1 if fields.n is None else fields.n
    if not 1 <= n <= MAX_CHOICES:
        raise RequestError(f"n must be 1 to {MAX_CHOICES}", param="n")
    if fields.best_of is not None and fields.best_of != n:
        raise RequestError("best_of is only supported equal to n", param="best_of", code="unsupported_value")
    return n


def with_choices(messages: Sequence[TokenizeMsg], n: int) -> list[TokenizeMsg]:
    """`n` requests for each message, those of one prompt in a row; raises `RequestError` when that is too many."""
    if len(messages) * n > MAX_GENERATIONS:
        raise RequestError(f"n={n} for {len(messages)} prompts is more than {MAX_GENERATIONS} choices", param="n")
    return [_choice(message, i) for message in messages for i in range(n)]


def _choice(message: TokenizeMsg, index: int) -> TokenizeMsg:
    params = message.sampling_params
    if params.seed is None or index == 0:
        return message
    params = msgspec.structs.replace(params, seed=choice_seed(params.seed, index))
    return msgspec.structs.replace(message, sampling_params=params)


def choice_seed(seed: int, index: int) -> int:
    """The seed, signed 64 bits, of choice `index` of a request with `seed`; that of choice 0 is `seed` itself.

    A hash, because with `seed + index` the choices of neighbouring seeds would be the same ones.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
