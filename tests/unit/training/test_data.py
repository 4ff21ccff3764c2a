"""The batches of training: their order, and the death of a worker that makes them."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from training.data import batches, make_batch
from training.train import on_device

TOKENIZER = Path(__file__).parents[3] / "python/minisgl/demo/model/tokenizer.json"


def test_batches_come_in_order_and_the_death_of_a_worker_is_an_error() -> None:
    before = multiprocessing.active_children()
    source = batches(TOKENIZER, seed=3, total=50, tokens=4096, context=2048, long_share=0.0, workers=2)
    feed = on_device(source, torch.device("cpu"))
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    for index in range(3):
        ids, positions, starts, targets = next(feed)
        made = make_batch(tokenizer, Random(f"3 {index}"), 4096, 2048, 0.0)
        wanted = made.ids, made.positions, made.starts, made.targets
        for tensor, array in zip((ids, positions, starts, targets), wanted, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)
    workers = [process for process in multiprocessing.active_children() if process not in before]
    assert len(workers) == 2
    workers[0].kill()
    with pytest.raises(RuntimeError, match=r"data worker \d has died"):
        list(feed)
