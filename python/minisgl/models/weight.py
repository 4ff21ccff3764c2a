"""Weights: from safetensors files straight into the (merged, sharded) parameters, in one pass and by several threads.

Headers are compared with what the model wants before anything is read. Then the wanted parts, cut into pieces, are read
in the order of the files: into the parameter itself where it is memory of the host and of the stored type, else through
a few buffers of the device (`device/device.py: Inlet`). So the peak is the parameters and those buffers.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from minisgl.checkpoint import hf
from minisgl.checkpoint.safetensors import FLOATS, Stored, Take, TensorFile
from minisgl.distributed.communicator import Communicator, SoloCommunicator
from minisgl.distributed.info import ALONE
from minisgl.distributed.tensor_parallel import parallel_ops
from minisgl.errors import ConfigError
from minisgl.layers.base import Builder, Init, Parameter, Source
from minisgl.models.families import MODELS

if TYPE_CHECKING:
    from minisgl.device.device import Device, Inlet
    from minisgl.models.config import ModelConfig
    from minisgl.models.llama import LlamaForCausalLM
    from minisgl.ops.table import OpTable

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) of what is wanted of the checkpoint as loading goes on, by any thread."""

PIECE_BYTES: Final = 8 << 20  # small enough to spread over threads and to overlap, large enough to cost no Python time
SCRATCH_BYTES: Final = 2 << 20  # of a thread: fits into its cache
MAX_THREADS: Final = 8
DUMMY_STD: Final = 0.02
NAMES_SHOWN: Final = 5


def load_model(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    ops: OpTable,
    dummy: bool = False,
    progress: Progress | None = None,
    comm: Communicator | None = None,
) -> LlamaForCausalLM:
    """Build this rank's part of the model of `config` and fill it from `folder`, or with fixed random numbers when
    `dummy`.

    Raises `ConfigError` naming the tensors when the checkpoint and config.json do not belong together.
    """
    kind, comm = MODELS.load(config.architecture), comm or SoloCommunicator(ALONE, device.torch_device)
    model = kind(Builder(parallel_ops(ops, comm, kind.has_post_norms), dtype, device.torch_device, comm.info), config)
    if dummy:
        fill_dummy(model.parameters)
    else:
        ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
        load_weights(hf.weight_files(folder), model.parameters, ignored, device, progress)
    return model


def load_weights(
    files: list[Path],
    parameters: tuple[Parameter, ...],
    ignored: set[str],
    device: Device,
    progress: Progress | None = None,
    threads: int | None = None,
) -> None:
    """Fill every parameter from `files`, converting any float type to the parameter's.

    Tensors in `ignored` may be there or not, and so may the "model." in front of the decoder's names. Raises
    `ConfigError` naming those that are missing, unexpected, repeated, of the wrong shape or not of a float type, and
    for a file that cannot be read.
    """
    with ExitStack() as stack:
        stored: dict[str, Stored] = {}
        for path in files:
            file = TensorFile(path)
            stack.callback(file.close)
            if repeated := stored.keys() & file.tensors.keys():
                raise ConfigError(f"tensor {min(repeated)} is in more than one file of {path.parent}")
            stored |= file.tensors
        if "embed_tokens.weight" in stored:  # a decoder that was saved without its head has no name around it
            stored = {f"model.{name}": tensor for name, tensor in stored.items()}
        wanted = [(parameter, source) for parameter in parameters for source in parameter.sources]
        _check(wanted, stored, ignored, files[0].parent)
        order = {path: index for index, path in enumerate(files)}
        wanted.sort(key=lambda w: (order[stored[w[1].name].file.path], stored[w[1].name].offset))
        pieces = list(chain.from_iterable(_cut(*w, stored[w[1].name]) for w in wanted))
        for parameter in parameters:
            device.use_large_pages(parameter.tensor)
        inlets = [device.inlet() for _ in range(threads or default_threads())]
        _read_all(pieces, inlets, progress)
    for parameter in parameters:
        if parameter.offset:
            parameter.tensor.add_(parameter.offset)


def default_threads() -> int:
    """Threads that read at the same time."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def _check(wanted: list[tuple[Parameter, Source]], stored: dict[str, Stored], ignored: set[str], folder: Path) -> None:
    """That the files have what the parameters want, and nothing else."""
    names = {source.name for _, source in wanted}
    missing = [name for name in names if name not in stored]
    derived = ".rotary_emb.inv_freq"  # a constant that some checkpoints store
    unexpected = [n for n in stored if n not in names and n not in ignored and not n.endswith(derived)]
    if missing or unexpected:
        parts = [f"{word} {_listed(names)}" for word, names in (("lacks", missing), ("has also", unexpected)) if names]
        raise ConfigError(f"the checkpoint in {folder} does not fit its config.json: it {' and '.join(parts)}")
    for _, source in wanted:
        found = stored[source.name]
        if found.shape != source.shape:
            raise ConfigError(
                f"tensor {source.name} in {found.file.path} has shape {list(found.shape)}; "
                f"config.json asks for {list(source.shape)}"
            )
        if found.dtype not in FLOATS:
            raise ConfigError(
                f"tensor {source.name} in {found.file.path} is {found.dtype}, not one of {', '.join(FLOATS)}"
            )


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part `take` of a stored tensor, and the rows of a parameter that it becomes."""

    stored: Stored
    take: Take
    target: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return FLOATS[self.stored.dtype]

    @property
    def bytes(self) -> int:
        return self.target.numel() * self.dtype.itemsize

    def read(self, scratch: Tensor, host: Tensor) -> None:
        """Into `host`, contiguous, of the target's shape and the stored type."""
        self.stored.read(self.take, host, scratch)


def _cut(parameter: Parameter, source: Source, stored: Stored) -> Iterator[_Piece]:
    """The rows of a source in pieces of about PIECE_BYTES, at least a row each."""
    target = parameter.tensor[source.start : source.start + source.rows]
    rows, *others = source.take
    row_bytes = target[:1].numel() * FLOATS[stored.dtype].itemsize
    step = max(1, PIECE_BYTES // max(row_bytes, 1))
    for start in range(0, source.rows, step):
        stop = min(start + step, source.rows)
        yield _Piece(stored, (slice(rows.start + start, rows.start + stop), *others), target[start:stop])


def _read_all(pieces: list[_Piece], inlets: list[Inlet], progress: Progress | None) -> None:
    """Each thread takes the next piece, so neighbours in a file are read at the same time; the first error ends all."""
    total, done = sum(piece.bytes for piece in pieces), 0
    queue = iter(pieces)
    lock, failed = threading.Lock(), threading.Event()

    def work(inlet: Inlet) -> None:
        nonlocal done
        torch.set_num_threads(1)  # of this thread: each copy is a thread's own
        scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8)
        try:
            with torch.inference_mode():
                while not failed.is_set():
                    with lock:
                        piece = next(queue, None)
                    if piece is None:
                        break
                    inlet.fill(piece.target, piece.dtype, partial(piece.read, scratch))
                    with lock:
                        done += piece.bytes
                        if progress is not None:
                            progress(done, total)
            inlet.finish()
        except BaseException:
            failed.set()
            raise

    threads_before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(len(inlets), "load") as pool:
            for future in [pool.submit(work, inlet) for inlet in inlets]:
                future.result()
    finally:
        torch.set_num_threads(threads_before)  # what threads made from now on begin with


def fill_dummy(parameters: tuple[Parameter, ...]) -> None:
    """Random weights, the same in every run and however many ranks share them; norms are 1.

    Each tensor of the checkpoint is drawn whole, from a seed that its name gives, and cut afterwards.
    """
    generator = torch.Generator(device=parameters[0].tensor.device)
    for parameter in parameters:
        if parameter.init is Init.ONES:
            parameter.tensor.fill_(1.0)
            continue
        for source in parameter.sources:
            whole = parameter.tensor.new_empty(source.shape)
            whole.normal_(0.0, DUMMY_STD, generator=generator.manual_seed(zlib.crc32(source.name.encode())))
            parameter.tensor[source.start : source.start + source.rows] = whole[source.take]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(sorted(names)[:NAMES_SHOWN]) + more
