"""`minisgl quantize`: writes a checkpoint with 8 or 4 bits per weight, in a layout that other engines read."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from minisgl.checkpoint import hf
from minisgl.core.errors import ConfigError
from minisgl.models.model_config import ModelConfig
from minisgl.models.weight import FLOATS, PROJECTION, open_checkpoint, text_part
from minisgl.ops.quantized import BLOCK, positive, round_fp8, round_int4
from minisgl.process.log import Progress

PART: Final = 1 << 20  # numbers that are rounded at once
NOT_COPIED: Final = (".*", "*.bin", "*.pth", "*.pt", "*.gguf")  # a hidden folder may be the output, half written


@dataclass(frozen=True, slots=True)
class Scheme:
    """`tensors` quantizes a matrix [N, K] to tensors by the last part of their names; `config` describes the layout.

    Both get the group size, the number of columns that share a scale: the largest of `groups` that divides the columns
    of all matrices, or 0 without groups. `ignored` is the field of the configuration that lists unquantized matrices.
    """

    tensors: Callable[[Tensor, int], dict[str, Tensor]]
    config: Callable[[int], dict[str, Any]]
    ignored: str = "ignore"
    groups: tuple[int, ...] = ()


def _by_parts(weight: Tensor, rounding: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Round a matrix in parts of about PART numbers, whose intermediate results stay in the caches."""
    rows = max(1, PART // (weight.shape[1] * BLOCK)) * BLOCK
    q, scale = zip(*map(rounding, torch.split(weight, rows)), strict=True)
    return torch.cat(q), torch.cat(scale)


def _fp8(weight: Tensor, group: int) -> dict[str, Tensor]:
    q, scale = _by_parts(weight, lambda part: round_fp8(part, BLOCK))
    return {"weight": q, "weight_scale_inv": scale}


def _int8(weight: Tensor, group: int) -> dict[str, Tensor]:
    def rounded(part: Tensor) -> tuple[Tensor, Tensor]:
        w = part.float()
        scale = positive((w.abs().amax(1, keepdim=True) / 127).to(weight.dtype).float())
        return (w / scale).round_().clamp_(-128, 127).to(torch.int8), scale.to(weight.dtype)

    q, scale = _by_parts(weight, rounded)
    return {"weight": q, "weight_scale": scale}


def _int4(weight: Tensor, group: int) -> dict[str, Tensor]:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)

    def packed(part: Tensor) -> tuple[Tensor, Tensor]:
        q, scale = round_int4(part, group, weight.dtype)
        return (q.view(len(q), -1, 8).to(torch.int32) << shifts).sum(2, dtype=torch.int32), scale  # no two share a bit

    words, scale = _by_parts(weight, packed)
    return {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    fixed = {"type": "int", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": fixed | weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


SCHEMES: Final[Mapping[str, Scheme]] = {
    "fp8": Scheme(
        _fp8,
        lambda group: {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
        ignored="modules_to_not_convert",
    ),
    "int8": Scheme(
        _int8,
        lambda group: _compressed(
            "int-quantized",
            {"num_bits": 8, "strategy": "channel"},
            {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
        ),
    ),
    "int4": Scheme(
        _int4,
        lambda group: _compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": group}, None),
        groups=(128, 64, 32),
    ),
}


def quantize(source: str, target: Path, scheme: str) -> tuple[int, int]:
    """Quantize the checkpoint `source` into the new folder `target`; return the bytes of the tensors before and after.

    Raises `ConfigError` for a checkpoint that cannot be read or quantized, and for a target that exists. A failure
    leaves no files.
    """
    folder = hf.resolve_model(source)
    config = hf.load_config(folder)
    model = ModelConfig.from_hf(config)
    if model.quantization is not None:
        raise ConfigError(f"the checkpoint in {folder} is quantized already: give one in 16 or 32 bits")
    if target.exists():
        raise ConfigError(f"{target} exists already: give a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        with torch.inference_mode():
            config["architectures"] = [model.architecture]  # of a multimodal model, the text part is written
            sizes = _write(folder, unfinished, config, SCHEMES[scheme], is_text_part=model.is_text_part)
        unfinished.chmod(0o755)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return sizes


def _write(
    folder: Path, target: Path, config: dict[str, Any], scheme: Scheme, *, is_text_part: bool
) -> tuple[int, int]:
    files = hf.weight_files(folder)
    with ExitStack() as stack:
        stored = open_checkpoint(files, stack)
        stored = text_part(stored) if is_text_part else stored
        projections = {n for n, t in stored.items() if PROJECTION.search(n) and len(t.shape) == 2 and t.dtype in FLOATS}
        if not projections:
            raise ConfigError(f"the checkpoint in {folder} has no projections to quantize")
        widths = {stored[name].shape[1] for name in projections}
        group = next((size for size in scheme.groups if not any(width % size for width in widths)), 0)
        if scheme.groups and not group:
            raise ConfigError(
                f"the matrices have {sorted(widths)} columns, which are not multiples of {scheme.groups[-1]}"
            )
        matrices = [n for n, t in stored.items() if len(t.shape) == 2 and n not in projections and "embed" not in n]
        unquantized = sorted({"lm_head", *(name.removesuffix(".weight") for name in matrices)})
        progress = Progress("quantizing", "tensors", True)
        file_of: dict[str, str] = {}
        done = before = after = 0
        for file in files:
            tensors: dict[str, Tensor] = {}
            for name, tensor in stored.items():
                if tensor.path != file:
                    continue
                whole, module = tensor.whole(), name.rpartition(".")[0]
                if name in projections and not torch.stack(whole.aminmax()).isfinite().all():
                    raise ConfigError(f"tensor {name} in {file} has numbers that are not finite")
                new = scheme.tensors(whole, group) if name in projections else None
                tensors |= {name: whole} if new is None else {f"{module}.{last}": t for last, t in new.items()}
                before += whole.nbytes
                done += 1
                progress.update(done, len(stored))
            file_of |= dict.fromkeys(tensors, file.name)
            after += sum(t.nbytes for t in tensors.values())
            save_file({name: t.contiguous() for name, t in tensors.items()}, target / file.name, {"format": "pt"})
    if len(files) > 1:
        index = {"metadata": {"total_size": after}, "weight_map": file_of}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config["quantization_config"] = scheme.config(group) | {scheme.ignored: unquantized}
    (target / "config.json").write_text(json.dumps(config, indent=2))
    ignored = shutil.ignore_patterns("*.safetensors", "*.index.json", *NOT_COPIED)
    names = [path.name for path in folder.iterdir()]
    for name in {*names} - ignored(str(folder), names) - {"config.json"}:
        if (folder / name).is_dir():
            # The folder may have a draft head, whose weights are copied as they are.
            shutil.copytree(folder / name, target / name, ignore=shutil.ignore_patterns(*NOT_COPIED))
        else:
            shutil.copy(folder / name, target)
    return before, after
