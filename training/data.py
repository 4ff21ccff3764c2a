"""Packed batches of training documents, made by worker processes in an order that only the seed decides."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from training import skills

IGNORE = -100


class Batch:
    """``tokens`` packed positions: ids, targets (−100 where nothing is trained), positions, and where documents start.

    ``starts`` has a fixed length and ends in repetitions of ``tokens`` (documents of length zero).
    """

    __slots__ = ("ids", "targets", "positions", "starts")

    def __init__(self, ids: np.ndarray, targets: np.ndarray, positions: np.ndarray, starts: np.ndarray) -> None:
        self.ids, self.targets, self.positions, self.starts = ids, targets, positions, starts


def make_batch(tokenizer: Tokenizer, rng: Random, tokens: int, context: int, long_share: float) -> Batch:
    """Fills ``tokens`` positions with documents; the last one is cut. Those longer than ``context`` are left out."""
    ids = np.zeros(tokens, np.int32)
    targets = np.full(tokens, IGNORE, np.int32)
    positions = np.zeros(tokens, np.int32)
    starts, at = [0], 0
    while at < tokens:
        documents = [skills.document(rng, rng.random() < long_share) for _ in range(64)]
        spans = [span for document in documents for span in document]
        encoded = iter(tokenizer.encode_batch_fast([text for text, _ in spans], add_special_tokens=False))
        for document in documents:
            parts = [(next(encoded).ids, trained) for _, trained in document]
            row = np.array([t for part, _ in parts for t in part], np.int32)
            if len(row) > context or at >= tokens:
                continue
            trained = np.array([flag for part, flag in parts for _ in part], bool)
            want = np.where(trained, row, IGNORE)
            n = min(len(row), tokens - at)
            ids[at : at + n] = row[:n]
            targets[at : at + n - 1] = want[1:n]
            positions[at : at + n] = np.arange(n)
            at += n
            starts.append(at)
    padded = np.full(tokens // 160 + 32, tokens, np.int32)
    if len(starts) > len(padded):
        raise ValueError("more documents in a batch than tokens / 160 + 31")
    padded[: len(starts)] = starts
    return Batch(ids, targets, positions, padded)


def _work(
    path: Path,
    seed: int,
    first: int,
    stride: int,
    total: int,
    tokens: int,
    context: int,
    long_share: float,
    writer: Connection,
) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(path))
    for index in range(first, total, stride):
        writer.send(make_batch(tokenizer, Random(f"{seed} {index}"), tokens, context, long_share))


def batches(
    path: Path, seed: int, total: int, tokens: int, context: int, long_share: float, workers: int
) -> Iterator[Batch]:
    """``total`` batches; batch ``i`` comes from worker ``i mod workers``, so their speed does not change the order.

    Raises `RuntimeError` if a worker dies.
    """
    spawn = mp.get_context("spawn")
    readers, processes = [], []
    for i in range(workers):
        reader, writer = spawn.Pipe(duplex=False)
        given = (path, seed, i, workers, total, tokens, context, long_share, writer)
        process = spawn.Process(target=_work, args=given, daemon=True)
        process.start()
        writer.close()  # the worker has the only one, so its end is the end of the pipe
        readers.append(reader)
        processes.append(process)
    try:
        for index in range(total):
            try:
                batch: Batch = readers[index % workers].recv()
            except (EOFError, OSError):
                raise RuntimeError(f"data worker {index % workers} has died before batch {index}") from None
            yield batch
    finally:
        for process in processes:
            process.terminate()
