"""Loads weights: several threads copy safetensors files directly into the merged and sharded parameters, in one pass.

The files' headers are checked against the parameters before anything is read. Then the needed parts are copied from the
mapped files in pieces, in file order: directly if parameters are in host memory, else through a few pinned buffers
(`device/device.py: Uploader`). So peak memory is the parameters and these buffers.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minisgl.checkpoint import hf
from minisgl.core.errors import ConfigError
from minisgl.distributed.communicator import Communicator, SoloCommunicator
from minisgl.distributed.info import ALONE
from minisgl.layers.builder import Builder
from minisgl.layers.parameter import Init, Parameter, Source
from minisgl.models.dequantize import LAYOUTS, Matrix, Stored, dequantized, unpacked
from minisgl.models.gguf_weights import kinds, open_gguf, renamed
from minisgl.models.llama import LlamaForCausalLM
from minisgl.ops.quantized import INT8, MXFP4, Format, Quantized, Rounding, rounded

if TYPE_CHECKING:
    from minisgl.checkpoint.quantization import Quantization
    from minisgl.device.device import Device, Uploader
    from minisgl.models.fallback import FallbackForCausalLM
    from minisgl.models.families import ExpertFlags
    from minisgl.models.model_config import ModelConfig
    from minisgl.ops.table import OpTable

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called by any thread as loading proceeds, with (bytes loaded, bytes to load)."""


class HasParameters(Protocol):
    """Layers as the loader sees them."""

    parameters: tuple[Parameter, ...]


Loaded = TypeVar("Loaded", bound=HasParameters)

FLOATS: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of an element, by the file format's name of a dtype

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ROUNDED_BYTES: Final = 256 << 10  # of a piece that a CPU quantizes, so that intermediate results stay in L2
QUANTIZED_BYTES: Final = 32 << 20  # of a quantized piece for a GPU, where it takes about ten launches
PIECE_BYTES: Final = 8 << 20  # small enough to spread over threads and to overlap, large enough to hide Python's time
MAX_THREADS: Final = 8
DUMMY_STD: Final = 0.02
NAMES_SHOWN: Final = 5

# Modules around a decoder and its layers, from training or a larger model.
WRAPPER: Final = re.compile(r"((base|pretrained|language)_)?model|module|_orig_mod|_\w+_wrapped_module")
IN_MODEL: Final = re.compile(r"(embed_tokens|layers|norm|final_layernorm|embed_tokens_per_layer|per_layer_\w+)(\.|$)")
# Tensors that no parameter needs -> whether the model computes the same without this one.
HARMLESS: Final[Mapping[str, Callable[[Stored], bool]]] = {
    r"(^|\.)rotary_emb\.(\w*inv_freq|cos_cached|sin_cached)$|attn\.masked_bias$|\.wf$": lambda constant: True,
    r"attn\.bias$": lambda mask: len(mask.shape) == 4,  # [1, 1, n, n], of causal attention
    # Activations and K/V are not rounded with scales of the checkpoint.
    r"\.(input|act|output|q|k|v|kv|prob)_(scale|scale_ub|zero_point)$": lambda scale: True,
    r"^(score|classifier|v_head|value_head|mtp|mtp_layers)\.": lambda other_head: True,
    r"\.bias$": lambda bias: not bias.whole().float().count_nonzero(),
}
# Other tensors -> what they mean.
HARMFUL: Final = {
    r"\.(lora_\w+|base_layer)\.": "an adapter is not merged: do that first, as with peft's merge_and_unload",
    r"\.bias$": "a bias is not 0 where the architecture and config.json have none",
    r"\.(pre_quant_scale|act\.scales)$": "a layer's inputs are multiplied by scales, which is not supported",
    r"\.attention\.wq\.": "the names are those of Meta's or Mistral's own format, not of Hugging Face's",
    r"\.(weight_scale\w*|weight_packed|scales|qweight|absmax|SCB)$": "config.json does not describe this quantization",
}
TEXT_PART: Final = re.compile(r"(model|lm_head)\.")  # tensors of a multimodal model's decoder
NEXT_TOKENS: Final = re.compile(r"(model\.layers\.\d+\.)eh_proj\.")  # a layer that predicts tokens after the next

# The projections of a decoder's layers. Routers of experts are not quantized: small errors would change their choices.
PROJECTION: Final = re.compile(
    r"\.layers\.\d+\.(.*\.)?(\w+_proj(_with_mqa)?|in_proj_(qkvz?|z)|w[123]|dense|fc[12]|c_fc)\.weight$"
)
EXPERT: Final = re.compile(r"\.experts\.\d+\.\w+\.weight$")
# The format of an untied head with any `--quantization`, as on a CPU: the head is the largest matrix.
HEAD_FORMAT: Final = Format(8, 0, is_integer=True)


def load_model(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    ops: OpTable,
    dummy: bool = False,
    progress: Progress | None = None,
    comm: Communicator | None = None,
    target_format: Format | None = None,
    supports_format: Callable[[Format], bool] = lambda kind: False,
    *,
    has_adapters: bool = False,
) -> LlamaForCausalLM | FallbackForCausalLM:
    """Build this rank's shard of the model and fill it from `folder`, or with fixed random numbers if `dummy`.

    Projections are quantized to `target_format`, if given, else converted to `dtype`. A quantized matrix whose format
    the device supports (`supports_format`) keeps that format. Raises `ConfigError` with the names of the tensors if the
    checkpoint does not fit its config.json.
    """
    comm = comm or SoloCommunicator(ALONE, device.torch_device)
    if config.is_fallback:
        from minisgl.models.fallback import load_fallback  # imports transformers

        return load_fallback(folder, config, Builder(ops, dtype, device.torch_device), dummy=dummy)
    options = dtype, device, ops, dummy, progress, comm, target_format, supports_format
    return load_layers(LlamaForCausalLM, folder, config, *options, has_adapters=has_adapters)


def load_layers(
    kind: Callable[[Builder, ModelConfig], Loaded],
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    ops: OpTable,
    dummy: bool,
    progress: Progress | None,
    comm: Communicator,
    target_format: Format | None,
    supports_format: Callable[[Format], bool],
    names: Mapping[str, str] | None = None,
    *,
    has_adapters: bool = False,
) -> Loaded:
    """Do what `load_model` does for any `kind` of layers. With `names`, beginnings of the checkpoint's names -> ours,
    only tensors with such a name are loaded."""

    def build(format_of: Callable[[str], Format | None]) -> Loaded:
        builder = Builder(ops, dtype, device.torch_device, comm, format_of, has_adapters=has_adapters)
        return kind(builder, config)

    def target_of(name: str) -> Format | None:
        if target_format is not None and name == HEAD and supports_format(HEAD_FORMAT):
            return HEAD_FORMAT
        return target_format if PROJECTION.search(name) else None

    if dummy:
        is_mxfp4 = config.quantization is not None and config.quantization.layout == "blocked mxfp4"
        kept = MXFP4 if is_mxfp4 and supports_format(MXFP4) else None
        model = build(lambda name: kept if kept and EXPERT.search(name) else target_of(name))
        _check_target_format(model.parameters, target_format)
        fill_dummy(model.parameters, ops.rounded)
        return model
    files = hf.weight_files(folder)
    with ExitStack() as stack:
        flags = None if config.experts is None else config.experts.flags
        stored = open_checkpoint(files, stack, config.quantization, flags)
        if names is not None:
            stored = _selected(stored, names)
        elif config.is_text_part:
            stored = text_part(stored, logs=comm.info.rank == 0)

        def stored_format(name: str) -> Format | None:
            found = stored[name].data if name in stored else None
            kept = found.format if isinstance(found, Matrix) else None
            return kept if kept is not None and supports_format(kept) else target_of(name)

        model = build(stored_format)
        _check_target_format(model.parameters, target_format)
        ignored = {HEAD} if config.tie_word_embeddings else set()
        ignored |= {HEAD, EMBEDDING} if names is not None else set()  # those of the model
        readers = [i for i, sizes in enumerate(config.layers) if sizes.kv_of is not None]
        own = ("k_proj", "v_proj", "k_norm", "v_norm")  # of layers that read another's keys and values
        ignored |= {f"model.layers.{i}.self_attn.{module}.weight" for i in readers for module in own}
        parameters, logs = model.parameters, comm.info.rank == 0
        if files[0].suffix == ".gguf":
            if logs:
                rounded_to = {str(p.tensor.format) for p in parameters if isinstance(p.tensor, Quantized)}
                held = " and ".join([str(dtype).removeprefix("torch."), *sorted(rounded_to)])
                size = sum(p.tensor.nbytes for p in parameters) / 1e9
                _log.info("GGUF tensors in %s are held in %s: %.2f GB", kinds(stored), held, size)
            stored = renamed(stored, parameters, hf.load_config(folder)["model_type"], config.num_layers)
            parameters = tuple(replace(p, offset=0.0) for p in parameters)  # the stored norms have it
        fill(stored, parameters, ignored, device, progress, rounding=ops.rounded, logs=logs)
    return model


def _selected(stored: dict[str, Stored], names: Mapping[str, str]) -> dict[str, Stored]:
    """Return the tensors whose names begin as one of `names`, renamed."""
    firsts = [(name, next((old for old in names if name.startswith(old)), None)) for name in stored]
    return {names[old] + name.removeprefix(old): stored[name] for name, old in firsts if old is not None}


def _check_target_format(parameters: tuple[Parameter, ...], target: Format | None) -> None:
    """Raise `ConfigError` if no projection can have the format `target`; log those that cannot."""
    if target is None:
        return
    plain = {p.sources[0].name: p.tensor for p in parameters if isinstance(p.tensor, Tensor)}
    plain = {name: tensor for name, tensor in plain.items() if PROJECTION.search(name)}
    quantized = [p.tensor for p in parameters if isinstance(p.tensor, Quantized)]
    if not quantized:
        raise ConfigError(f"no matrix can be quantized to {target}: the sizes of {listed([*plain])} do not divide")
    if plain:
        reason = "stay in 16 or 32 bits (their sizes do not divide)"
        saved = sum(tensor.nbytes - tensor.numel() for tensor in plain.values())  # by 8 bits
        added = sum(matrix.data.nbytes for matrix in quantized if matrix.format.bits == 4)  # to the others
        if target.bits == 4 and saved > added and all(w.shape[-1] % INT8.columns == 0 for w in plain.values()):
            reason += f"; --quantization int8 has {(saved - added) / 1e6:,.1f} MB less, and is faster here"
        _log.warning("%d matrices %s: %s", len(plain), reason, listed([*plain]))


def open_checkpoint(
    files: list[Path], stack: ExitStack, quantization: Quantization | None = None, flags: ExpertFlags | None = None
) -> dict[str, Stored]:
    """Map all files until `stack` is closed; return their tensors in file order, dequantized and with full names.

    With `flags`, each expert has its own tensors.
    """
    stored: dict[str, Stored] = {}
    for name, tensor in open_all(files, stack).items():
        full = full_name(name)
        if full in stored:
            raise ConfigError(f"tensor {full} is in {tensor.path.parent} under two names, one of which is {name}")
        stored[full] = tensor
    stored = stored if flags is None else unpacked(stored, flags)
    return stored if quantization is None else dequantized(stored, quantization)


def full_name(name: str) -> str:
    """Return a checkpoint's name of a tensor or module as this package has it: without wrappers."""
    full = ".".join(part for part in name.split(".") if not WRAPPER.fullmatch(part))
    return f"model.{full}" if IN_MODEL.match(full) else full


def text_part(stored: dict[str, Stored], *, logs: bool = True) -> dict[str, Stored]:
    """Return the tensors of a multimodal model's decoder; if it `logs`, one line names the other parts."""
    others = dict.fromkeys(name.split(".")[0] for name in stored if not TEXT_PART.match(name))
    if others and logs:
        _log.warning("only the text part of the model is used, without %s", ", ".join(others))
    return {name: tensor for name, tensor in stored.items() if TEXT_PART.match(name)}


def fill(
    stored: dict[str, Stored],
    parameters: tuple[Parameter, ...],
    ignored: set[str],
    device: Device,
    progress: Progress | None = None,
    threads: int | None = None,
    rounding: Rounding = rounded,
    logs: bool = True,
) -> None:
    """Fill every parameter; convert float dtypes and quantized matrices to the parameter's format.

    Tensors in `ignored` are optional. Those in HARMLESS are allowed, and if it `logs`, one log line names them. Raises
    `ConfigError` with the names of tensors that are missing, unexpected, of the wrong shape, or not floating point.
    """
    folder = next(iter(stored.values())).path.parent
    if HEAD in ignored and HEAD in stored:  # of a tied pair, the checkpoint may store only the head
        stored = {EMBEDDING: stored[HEAD]} | stored
    wanted = [(parameter, source) for parameter in parameters for source in parameter.sources]
    extra = _check(wanted, stored, ignored, folder)
    if extra and logs:
        kinds = {re.sub(r"\.\d+\.", ".*.", name) for name in extra}
        _log.warning("ignored tensors without which the model computes the same (%d): %s", len(extra), listed([*kinds]))
    order = {name: index for index, name in enumerate(stored)}
    wanted.sort(key=lambda w: order[w[1].name])
    pieces = list(chain.from_iterable(_cut(*w, stored[w[1].name]) for w in wanted))
    for parameter in parameters:
        if isinstance(parameter.tensor, Tensor):
            device.use_large_pages(parameter.tensor)
    _copy_all(pieces, [device.uploader() for _ in range(threads or default_threads())], rounding, progress)
    for parameter in parameters:
        if not parameter.finish():
            name = parameter.sources[0].name
            raise ConfigError(f"{name} is quantized in blocks, and this model rotates elements of heads across them")


def has_own_head(folder: Path) -> bool:
    """Return whether the checkpoint stores a head that differs from its embedding.

    If so, transformers 5 does not tie them, even if config.json says so.
    """
    with ExitStack() as stack:
        stored = open_checkpoint(hf.weight_files(folder), stack)
        if any(f"lm_head{mark}" in stored for mark, _ in LAYOUTS.values() if mark != ".weight"):
            return True  # it is quantized
        head, embedding = stored.get(HEAD), stored.get(EMBEDDING)
        if head is None or embedding is None:
            return False
        if (head.shape, head.dtype) != (embedding.shape, embedding.dtype) or head.dtype not in FLOATS:
            return True
        rows = max(1, PIECE_BYTES // (FLOATS[head.dtype] * math.prod(head.shape[1:])))
        pieces = (slice(start, start + rows) for start in range(0, head.shape[0], rows))
        return not all(torch.equal(head.data[piece], embedding.data[piece]) for piece in pieces)


def default_threads() -> int:
    """Return the number of loading threads."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def _check(
    wanted: list[tuple[Parameter, Source]], stored: dict[str, Stored], ignored: set[str], folder: Path
) -> list[str]:
    """Raise `ConfigError` unless the files have the tensors that the parameters need; return harmless others."""
    names = {source.name for _, source in wanted}
    missing = [name for name in names if name not in stored]
    extra = {name: tensor for name, tensor in stored.items() if name not in names and name not in ignored}
    layers = [match[1] for match in map(NEXT_TOKENS.match, extra) if match]
    unused = tuple(layer for layer in layers if not any(name.startswith(layer) for name in names))
    unexpected = [n for n, t in extra.items() if not (n.startswith(unused) or _is_harmless(n, t))]
    if missing or unexpected:
        parts = [f"{word} {listed(names)}" for word, names in (("lacks", missing), ("has also", unexpected)) if names]
        reasons = [f"; {why}" for pattern, why in HARMFUL.items() if any(re.search(pattern, n) for n in unexpected)]
        raise ConfigError(
            f"the checkpoint in {folder} does not fit its config.json: it {' and '.join(parts)}{''.join(reasons)}"
        )
    for _, source in wanted:
        found = stored[source.name]
        if found.shape != source.shape:
            raise ConfigError(
                f"tensor {source.name} in {found.path} has shape {list(found.shape)}; "
                f"config.json asks for {list(source.shape)}"
            )
        if found.dtype not in FLOATS:
            raise ConfigError(f"tensor {source.name} in {found.path} is {found.dtype}, not one of {', '.join(FLOATS)}")
    return [*extra]


def _is_harmless(name: str, tensor: Stored) -> bool:
    """Return whether the model computes the same without this tensor, of which only a bias is read."""
    return any(re.search(pattern, name) and is_harmless(tensor) for pattern, is_harmless in HARMLESS.items())


def open_all(files: list[Path], stack: ExitStack) -> dict[str, Stored]:
    """Map all files until `stack` is closed; return their tensors in file order."""
    stored: dict[str, Stored] = {}
    for path in files:
        tensors = _open(path, stack)
        if repeated := stored.keys() & tensors.keys():
            raise ConfigError(f"tensor {min(repeated)} is in more than one file of {path.parent}")
        stored |= tensors
    return stored


def _open(path: Path, stack: ExitStack) -> dict[str, Stored]:
    """Map a file until `stack` is closed; return its tensors in file order."""
    if path.suffix == ".gguf":
        return open_gguf(path)
    try:
        file = stack.enter_context(safe_open(path, framework="pt"))
        slices = {name: file.get_slice(name) for name in file.offset_keys()}
    except (SafetensorError, OSError) as e:
        raise ConfigError(f"cannot read {path} ({e}); is the download complete?") from None
    return {name: Stored(path, data, tuple(data.get_shape()), data.get_dtype()) for name, data in slices.items()}


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part `slices` of a stored tensor, and the rows of a parameter (`target`) that it fills."""

    stored: Stored
    slices: tuple[slice, ...]
    target: Tensor | Quantized

    @property
    def bytes(self) -> int:
        return math.prod(len(range(s.start, s.stop)) for s in self.slices) * _bytes_of(self.stored, self.target)

    def copy(self, uploader: Uploader, rounding: Rounding) -> None:
        data, target = self.stored.data, self.target
        if isinstance(target, Tensor):
            uploader.copy(target, data[self.slices])
        elif (kept := _kept(self.stored, target)) is not None:
            rows, columns = self.slices
            uploader.run(lambda upload: target.fill(*kept.numbers((rows, columns), upload)))
        else:
            uploader.run(lambda upload: target.round_from(upload(data[self.slices]), rounding))


def _kept(stored: Stored, target: Tensor | Quantized) -> Matrix | None:
    """Return the stored matrix if `target` has its format."""
    data = stored.data
    is_same = isinstance(target, Quantized) and isinstance(data, Matrix) and data.format == target.format
    return data if is_same else None


def _bytes_of(stored: Stored, target: Tensor | Quantized) -> int:
    """Return the bytes of an element, at least 1, that are copied to `target`."""
    return 1 if _kept(stored, target) is not None else FLOATS[stored.dtype]


def _cut(parameter: Parameter, source: Source, stored: Stored) -> Iterator[_Piece]:
    """Cut the rows of a source into pieces, each of whole (blocks of) rows."""
    target = parameter.tensor
    rows, *others = source.slices
    row_bytes = math.prod(s.stop - s.start for s in others) * _bytes_of(stored, target)
    unit = target.format.rows if isinstance(target, Quantized) else 1
    size = PIECE_BYTES
    if isinstance(target, Quantized):
        size = ROUNDED_BYTES if target.data.is_cpu else QUANTIZED_BYTES
    step = max(1, size // max(row_bytes * unit, 1)) * unit
    for start in range(0, source.rows, step):
        stop = min(start + step, source.rows)
        first, last = source.start + start, source.start + stop
        part = target.part(first, last) if isinstance(target, Quantized) else target[first:last]
        yield _Piece(stored, (slice(rows.start + start, rows.start + stop), *others), part)


def _copy_all(pieces: list[_Piece], uploaders: list[Uploader], rounding: Rounding, progress: Progress | None) -> None:
    """Copy all pieces, with a thread for each uploader. The first error ends all threads.

    Each thread takes the next piece, so that adjacent parts of a file are read at the same time.
    """
    total, done = sum(piece.bytes for piece in pieces), 0
    queue = iter(pieces)
    lock, failed = threading.Lock(), threading.Event()

    def work(uploader: Uploader) -> None:
        nonlocal done
        torch.set_num_threads(1)  # for this thread: a copy must not start threads of its own
        try:
            with torch.inference_mode():
                while not failed.is_set():
                    with lock:
                        piece = next(queue, None)
                    if piece is None:
                        break
                    piece.copy(uploader, rounding)
                    with lock:
                        done += piece.bytes
                        if progress is not None:
                            progress(done, total)
            uploader.finish()
        except BaseException:
            failed.set()
            raise

    threads_before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(len(uploaders), "load") as pool:
            for future in [pool.submit(work, uploader) for uploader in uploaders]:
                future.result()
    finally:
        torch.set_num_threads(threads_before)  # the default of threads that start later


def fill_dummy(parameters: tuple[Parameter, ...], rounding: Rounding = rounded) -> None:
    """Fill parameters with random weights, the same in each run and for any number of ranks; norms are 1.

    Each tensor of the checkpoint is generated whole, with a seed from its name, and then cut.
    """
    first = next(p.tensor for p in parameters if isinstance(p.tensor, Tensor))
    generator = torch.Generator(device=first.device)
    for parameter in parameters:
        target = parameter.tensor
        if isinstance(target, Tensor) and parameter.init is Init.ONES:
            target.fill_(1.0)
            continue
        like = target if isinstance(target, Tensor) else first
        for source in parameter.sources:
            whole = like.new_empty(source.shape)
            whole.normal_(0.0, DUMMY_STD, generator=generator.manual_seed(zlib.crc32(source.name.encode())))
            rows = slice(source.start, source.start + source.rows)
            if isinstance(target, Tensor):
                target[rows] = whole[source.slices]
            else:
                target.part(rows.start, rows.stop).round_from(whole[source.slices], rounding)


def listed(names: list[str]) -> str:
    """Return the first NAMES_SHOWN names, sorted, and the number of the others."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(sorted(names)[:NAMES_SHOWN]) + more
