"""What `kernel/adjust.py` changes logits by: penalties, biases and forbidden endings, kept per row on the device.

Only rows that ask for it have state here, in slots made when first needed: counts of a whole vocabulary are too large
to hold for every row. Each row is adjusted by itself, so its result does not depend on its batch mates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.core import Batch, Ints

HEAD = 11  # ints before the lists of a record, see scheduler/plan.py: adjust_record


class LogitAdjuster:
    """State of the adjusted rows.

    slot_of_row  [rows] int64, on host and device; -1 = none
    counts       [slots, V] int32, how often a token was generated
    in_prompt    [slots, V] bool
    penalties    [slots, 3] float32: presence, frequency, repetition
    first_end    [slots] int32, first position at which the request may end
    bias_ids     [slots, N] int64 and biases [slots, N] float32; unused places add 0 to token 0
    end_ids      [slots, M] int64, -1 = none
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._slot_of_row: dict[int, int] = {}
        self.slot_of_row = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._resize(0, 1, 1)

    def apply(self, records: Ints) -> None:
        """Take over newly filled rows; a row keeps its slot for the next request that needs one."""
        start = 0
        while start < len(records):
            stop = start + int(records[start])
            self._fill(records[start:stop])
            start = stop

    def count(self, tokens: Tensor, batch: Batch) -> None:
        """Remember the tokens [S] int32 that were chosen."""
        chosen = batch.adjusted
        slots = self.slot_of_row[batch.sample_rows[chosen]]
        self.counts[slots, tokens[chosen].long()] += 1

    def _fill(self, record: Ints) -> None:
        row, first_end = int(record[1]), int(record[5])
        ends = HEAD + np.cumsum(record[6:HEAD])
        bias_ids, bias_bits, end_ids, prompt, output = np.split(record, [HEAD, *ends[:-1]])[1:]
        slot = self._slot(row, len(bias_ids), len(end_ids))
        self.penalties[slot] = torch.from_numpy(record[2:5].view(np.float32).copy())
        self.first_end[slot] = first_end
        self.bias_ids[slot], self.biases[slot], self.end_ids[slot] = 0, 0.0, -1
        self.bias_ids[slot, : len(bias_ids)] = torch.from_numpy(bias_ids.astype(np.int64))
        self.biases[slot, : len(bias_ids)] = torch.from_numpy(bias_bits.view(np.float32).copy())
        self.end_ids[slot, : len(end_ids)] = torch.from_numpy(end_ids.astype(np.int64))
        self.in_prompt[slot] = False
        self.in_prompt[slot, torch.from_numpy(prompt.astype(np.int64)).to(self.device)] = True
        counted = np.bincount(output, minlength=self.vocab_size).astype(np.int32)
        self.counts[slot] = torch.from_numpy(counted)

    def _slot(self, row: int, num_biases: int, num_ends: int) -> int:
        """The slot of `row`, made if it has none; all slots grow when this one needs wider lists."""
        slots, biases, ends = len(self.counts), self.bias_ids.shape[1], self.end_ids.shape[1]
        if row not in self._slot_of_row:
            if len(self._slot_of_row) == slots:
                self._resize(max(4, 2 * slots), biases, ends)
            self._slot_of_row[row] = len(self._slot_of_row)
            self.slot_of_row[row] = self._slot_of_row[row]
        if num_biases > biases or num_ends > ends:
            self._resize(len(self.counts), max(num_biases, biases), max(num_ends, ends))
        return self._slot_of_row[row]

    def _resize(self, slots: int, biases: int, ends: int) -> None:
        old = dict(vars(self))

        def grown(name: str, width: int, dtype: torch.dtype, fill: float) -> Tensor:
            new = torch.full((slots, width), fill, dtype=dtype, device=self.device)
            if name in old:
                new[: len(old[name]), : old[name].shape[1]] = old[name]
            return new

        self.counts = grown("counts", self.vocab_size, torch.int32, 0)
        self.in_prompt = grown("in_prompt", self.vocab_size, torch.bool, 0)
        self.penalties = grown("penalties", 3, torch.float32, 0)
        self.bias_ids = grown("bias_ids", biases, torch.int64, 0)
        self.biases = grown("biases", biases, torch.float32, 0)
        self.end_ids = grown("end_ids", ends, torch.int64, -1)
        first_end = torch.zeros(slots, dtype=torch.int32, device=self.device)
        if "first_end" in old:
            first_end[: len(old["first_end"])] = old["first_end"]
        self.first_end = first_end
