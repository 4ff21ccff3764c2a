"""What the device remembers of each row from step to step. A step writes the plan's changes first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from minisgl.core.layout import PAGE_WRITE, PENALTY_HEAD, columns, words
from minisgl.ops.sampling import PenaltyTables, SamplingState

if TYPE_CHECKING:
    from minisgl.core.plan import Ints
    from minisgl.device.device import Device

_PAGE: Final = columns(PAGE_WRITE)


class RowState(SamplingState):
    """The sampling state of the rows, and their `page_tables` [groups, rows, pages per row] int32."""

    def __init__(self, rows: int, pages_per_row: int, device: torch.device, groups: int = 1) -> None:
        super().__init__(rows, device)
        self.page_tables = torch.zeros(groups, rows, pages_per_row, dtype=torch.int32, device=device)

    def apply(self, page_writes: torch.Tensor, row_states: torch.Tensor) -> None:
        """Write page-table entries [P, 4] and fields of rows [R, words of ROW_STATE], int32 like their records."""
        if len(page_writes):
            group, row, index = (page_writes[:, _PAGE[name]].long() for name in ("group", "row", "index"))
            self.page_tables[group, row, index] = page_writes[:, _PAGE["page"]]
        self.fill(row_states)

    def fill(self, row_states: torch.Tensor) -> None:
        """Write fields of rows [R, words of ROW_STATE], int32 like their records."""
        if len(row_states):
            self.table[row_states[:, 0].long()] = row_states[:, 1:]


class LogitPenalties(PenaltyTables):
    """The penalty tables, filled from the records of plans."""

    def __init__(self, rows: int, vocab_size: int, max_biases: int, device: Device) -> None:
        super().__init__(rows, vocab_size, max_biases, device.torch_device)
        self._device = device

    def apply(self, records: Ints, masks: Ints) -> None:
        """Take over the penalty records of newly filled rows, and the masks [M, W] of the coming step."""
        if len(records):
            self._fill(records)
        if len(masks):
            self.masks[: len(masks)] = self._device.upload(masks)[0]

    def _fill(self, records: Ints) -> None:
        heads = []
        biases = []
        prompts = []
        outputs = []
        for head, (ids, bits, prompt, output) in _split(records):
            index = np.arange(len(ids), dtype=np.int32)
            heads.append(head)
            biases.append(np.stack([np.full_like(index, head["row"]), index, ids, bits]))
            prompts.append(np.stack([np.full_like(prompt, head["row"]), prompt]))
            outputs.append(np.stack([np.full_like(output, head["row"]), output]))
        fields = np.stack(heads)
        factors = np.stack([fields[name] for name in ("presence", "frequency", "repetition")]).view(np.int32)
        ints = np.stack([fields[name] for name in ("row", "first_end", "num_biases")])
        arrays = (factors, ints, *(np.concatenate(x, 1) for x in (biases, prompts, outputs)))
        factor, head_ints, bias, in_prompt, generated = self._device.upload(*arrays)
        rows = head_ints[0].long()
        self.penalties[rows] = factor.view(torch.float32).t()
        self.first_end[rows] = head_ints[1]
        self.num_biases[rows] = head_ints[2]
        at = (bias[0].long(), bias[1].long())
        self.bias_ids[at] = bias[2]
        self.biases[at] = bias[3].view(torch.float32)
        self.seen[rows] = 0
        self.seen[in_prompt[0].long(), in_prompt[1].long()] = 1
        twos = torch.full_like(generated[0], 2)
        self.seen.index_put_((generated[0].long(), generated[1].long()), twos, accumulate=True)


def _split(records: Ints) -> Iterator[tuple[np.void, list[Ints]]]:
    """The head and the four lists of each penalty record."""
    while len(records):
        head = records[: words(PENALTY_HEAD)].view(PENALTY_HEAD)[0]
        lists = records[words(PENALTY_HEAD) : head["words"]]
        yield head, np.split(lists, np.cumsum([head["num_biases"], head["num_biases"], head["num_prompt"]]))
        records = records[head["words"] :]
