"""What `ops/penalties.py` changes logits by: penalties, biases, forbidden endings and masks, on the device.

All tables are as large as they will ever be, so captured steps may read them where they are. Each row is adjusted by
itself, so its result does not depend on its batch mates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minisgl.core import Ints
    from minisgl.device.device import Device

HEAD = 9  # ints before the lists of a record, see scheduler/plan.py: adjust_record


class LogitAdjuster:
    """State of the adjusted rows, and the masks of the newest step.

    seen         [rows, V] int32, 2 x how often a token was generated, + 1 if it is in the prompt
    penalties    [rows, 3] float32: presence, frequency, repetition
    first_end    [rows] int32, first position at which the request may end
    num_biases   [rows] int32, how many of the following a row has
    bias_ids     [rows, N] int32, distinct tokens; ~token for one that ends the request
    biases       [rows, N] float32
    masks        [rows, ceil(V / 32)] int32 in the order of the MASKED sequences, not by row: bit i of word w is token
                 32 w + i, 1 = allowed
    """

    def __init__(self, rows: int, vocab_size: int, max_biases: int, device: Device) -> None:
        self._device = device

        def table(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device.torch_device)

        # A row is cleared when it is filled. On a CPU, memory that nobody has written to costs nothing.
        self.seen = torch.empty(rows, vocab_size, dtype=torch.int32, device=device.torch_device)
        self.penalties = table(rows, 3, dtype=torch.float32)
        self.first_end, self.num_biases = table(rows), table(rows)
        self.bias_ids, self.biases = table(rows, max_biases), table(rows, max_biases, dtype=torch.float32)
        self.masks = table(rows, -(-vocab_size // 32))

    def apply(self, records: Ints, masks: Ints) -> None:
        """Take over newly filled rows and the masks [M, W] of the step that comes."""
        if len(records):
            self._fill(records)
        if len(masks):
            self.masks[: len(masks)] = self._device.upload(masks)[0]

    def _fill(self, records: Ints) -> None:
        heads, biases, prompts, outputs = [], [], [], []
        for record in _split(records):
            row, num_biases, prompt_len = record[1], record[6], record[7]
            places = np.arange(num_biases, dtype=np.int32)
            cuts = np.cumsum([num_biases, num_biases, prompt_len])
            ids, bits, prompt, output = np.split(record[HEAD:], cuts)
            heads.append(record[1:7])
            biases.append(np.stack([np.full_like(places, row), places, ids, bits]))
            prompts.append(np.stack([np.full_like(prompt, row), prompt]))
            outputs.append(np.stack([np.full_like(output, row), output]))
        arrays = (np.stack(heads, 1), *(np.concatenate(x, 1) for x in (biases, prompts, outputs)))
        head, bias, in_prompt, generated = self._device.upload(*arrays)
        rows = head[0].long()
        self.penalties[rows] = head[1:4].view(torch.float32).t()
        self.first_end[rows], self.num_biases[rows] = head[4], head[5]
        at = (bias[0].long(), bias[1].long())
        self.bias_ids[at], self.biases[at] = bias[2], bias[3].view(torch.float32)
        self.seen[rows] = 0
        self.seen[in_prompt[0].long(), in_prompt[1].long()] = 1
        twos = torch.full_like(generated[0], 2)
        self.seen.index_put_((generated[0].long(), generated[1].long()), twos, accumulate=True)


def _split(records: Ints) -> Iterator[Ints]:
    while len(records):
        yield records[: records[0]]
        records = records[records[0] :]
