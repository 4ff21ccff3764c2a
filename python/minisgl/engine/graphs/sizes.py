"""Which steps are captured as CUDA graphs."""

from __future__ import annotations

from typing import Final, NamedTuple

from minisgl.core.layout import MAX_DRAFT_TOKENS
from minisgl.core.plan import TILE_TOKENS, StepShape

# Closely spaced where a padded row costs much of a step, widely where it costs little.
DECODE_SIZES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64, *range(80, 129, 16), *range(160, 257, 32))
LARGE_DECODE_SIZES: Final = (*range(320, 513, 64), *range(640, 4097, 128))
# From 256 on, every whole tile of a GEMM. Padding then costs little: the scheduler fills tiles where it can
# (`scheduler/budget.py`), and a GEMM takes as long for half a tile as for a whole one.
TOKEN_SIZES: Final = (32, 48, 64, 96, 128, 192, *range(2 * TILE_TOKENS, 11 * TILE_TOKENS + 1, TILE_TOKENS))
LARGE_SIZES: Final = (*range(1536, 4097, 256), *range(4608, 8193, 512))  # for models with small layers
# Of steps with drafts and without prompts.
DRAFT_SIZES: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 448, 512)
LARGE_DRAFT_SIZES: Final = (640, 768, 1024, MAX_DRAFT_TOKENS)
LAUNCH_FLOPS: Final = 3.6e11  # of an H200 in 0.6 ms; a host takes 0.4 to 0.8 ms to launch a layer op by op
# Of tokens to sample; the largest possible number is added.
TAIL_SIZES: Final = (8, 16, 32, 64, 128, 192, 256, 320, 512, 768, 1024)
MAX_CHUNKS: Final = 64
MAX_DRAFTED: Final = 512  # tokens of the sequences with DRAFTS in a step with prompts, besides one for each sequence


class Size(NamedTuple):
    """The size of a captured step, to which smaller ones are padded."""

    tokens: int
    samples: int  # with prompts fewer than the tokens: else the model would not select hidden states
    shape: StepShape
    has_adapters: bool = False  # may have; such steps take longer

    @property
    def sequences(self) -> int:
        return self.shape.decodes + self.shape.chunks

    @property
    def is_plain(self) -> bool:
        """Whether each sequence has one token, and samples the next."""
        return not self.shape.chunks and self.shape.queries == 1

    def fits(self, chunks: int, has_drafts: bool, has_adapters: bool) -> bool:
        """Whether it is for steps with so many chunks of prompts, with or without drafts and adapters."""
        if has_adapters and not self.has_adapters:
            return False
        if self.shape.chunks:
            return chunks < self.shape.chunks
        return not chunks and has_drafts != self.is_plain


def decode_sizes(max_rows: int) -> list[Size]:
    """Return the sizes of steps in which each of up to `max_rows` rows decodes a token."""
    counts = sorted({min(count, max_rows) for count in (*DECODE_SIZES, *LARGE_DECODE_SIZES)})
    return [Size(count, count, StepShape(count, 1)) for count in counts]


def draft_sizes(max_rows: int, max_queries: int, large: float) -> list[Size]:
    """Return the sizes of steps with drafts and without prompts.

    `large` is the number of tokens up to which launching takes longer than computing.
    """
    counts = (*DRAFT_SIZES, *(t for t in LARGE_DRAFT_SIZES if t <= large))
    return [Size(t, t, StepShape(min(t, max_rows) + 1, max_queries)) for t in counts if t <= max_rows * max_queries]


def prompt_sizes(max_tokens: int, max_rows: int, max_queries: int, large: float) -> list[Size]:
    """Return the sizes of steps with prompts, whose last chunk takes the padding tokens. Each costs the start one
    launch, one capture and its arithmetic.
    """
    sizes = []
    for tokens in (*TOKEN_SIZES, *(t for t in LARGE_SIZES if t <= large)):
        if tokens <= max_tokens:
            chunks = min(tokens // 2, MAX_CHUNKS) + 1
            samples = min(tokens - 1, max_rows + chunks - 1 + MAX_DRAFTED * (max_queries > 1))
            sizes.append(Size(tokens, samples, StepShape(max_rows, max_queries, chunks, tokens, tokens)))
    return sizes
