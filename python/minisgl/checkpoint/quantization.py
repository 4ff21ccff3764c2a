"""Reads the layout of a quantized checkpoint's matrices from config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from minisgl.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Quantization:
    """The layout of a checkpoint's quantized matrices (`models/dequantize.py`).

    The checkpoint's tensors show which matrices are quantized: authors leave some out.
    """

    layout: str  # a key of `dequantize.LAYOUTS`
    bits: int = 8  # of most matrices; the shapes of packed ones show their own
    block: tuple[int, int] | None = None  # (rows, columns) that share a scale, unless shapes show it
    zero_offset: int = 0  # added to stored zero points
    needs_order: bool = False  # the columns of a group are not neighbours, so each matrix must store their order


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return the layout; None for a checkpoint that is not quantized.

    Raises `ConfigError` with the name of the field for an unsupported method or option.
    """
    settings = config.get("quantization_config")
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise ConfigError(f"config.json has quantization_config={settings!r:.60}; an object is needed")
    method = method_of(settings)
    if method not in METHODS:
        raise ConfigError(
            f"this checkpoint is quantized by {method or 'a method without a name':.40}, which is not supported; "
            f"supported: {', '.join(METHODS)}. Or use the model's float16 or bfloat16 version"
        )
    given = {name: value for name, value in settings.items() if value is not None}
    return METHODS[method]({"bits": given.get("w_bit")} | given)  # `w_bit` is AutoAWQ's old name


def method_of(settings: Mapping[str, Any], default: str = "") -> str:
    """Return the `quant_method` in lower case, or if there is none, the method that writes fields like these."""
    method = settings.get("quant_method") or next((m for mark, m in MARKS.items() if mark in settings), default)
    return str(method).lower().replace("compressed_tensors", "compressed-tensors")


def _one_of(settings: Mapping[str, Any], name: str, known: tuple[Any, ...], default: Any = None) -> Any:
    value = settings.get(name, default)
    if not isinstance(value, str | int | None) or value not in known:
        wanted = ", ".join(str(k) for k in known if k is not None)
        raise ConfigError(f"quantization_config has {name}={value!r:.60}, which is not supported; supported: {wanted}")
    return value


def _block(name: str, value: Any) -> tuple[int, int] | None:
    """Return the rows and columns of a block, which compressed-tensors may also write as "128x128"."""
    if isinstance(value, str):
        value = [int(n) for n in value.split("x") if n.isdecimal()]
    if value is None:
        return None
    if not (isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)):
        raise ConfigError(f"quantization_config has {name}={value!r:.60}; two positive numbers are needed")
    return value[0], value[1]


def _fp8(settings: Mapping[str, Any]) -> Quantization:
    """Read DeepSeek's and Qwen3's blocks with `weight_scale_inv`, or one `weight_scale` per matrix or row."""
    _one_of(settings, "fmt", ("e4m3", None))
    block = _block("weight_block_size", settings.get("weight_block_size"))
    return Quantization("scaled", block=block)


def _compressed_tensors(settings: Mapping[str, Any]) -> Quantization | None:
    formats = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mxfp4-pack-quantized", "dense")
    form = _one_of(settings, "format", formats)
    sparsity = settings.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise ConfigError("quantization_config has a sparsity_config, which is not supported; only dense matrices are")
    if settings.get("transform_config"):
        raise ConfigError("quantization_config has a transform_config: rotations of activations are not supported")
    groups = settings.get("config_groups")
    if form == "dense" or (not groups and settings.get("kv_cache_scheme")):  # only the K/V cache was to be quantized
        return None
    groups = groups if isinstance(groups, dict) else {}
    found = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
    weights = [w for w in found if isinstance(w, dict)]
    if not weights or len(weights) < len(found):
        raise ConfigError("quantization_config has no config_groups with weights")
    bits = min(_one_of(w, "num_bits", (4, 8)) for w in weights)
    if form.endswith("pack-quantized"):
        needs_order = all(w.get("actorder") in ("group", "dynamic") for w in weights)
        return Quantization("packed" if form == "pack-quantized" else "packed mxfp4", bits, needs_order=needs_order)
    block = _block("block_structure", weights[0].get("block_structure"))
    return Quantization("scaled", block=block)


def _awq(settings: Mapping[str, Any]) -> Quantization:
    _one_of(settings, "bits", (4,))
    for name in ("version", "checkpoint_format", "format"):  # AutoAWQ's name and GPTQModel's
        _one_of(settings, name, ("gemm", "GEMM"), "gemm")
    if settings.get("backend") == "llm-awq":  # other backends are kernels for the same packing
        raise ConfigError("quantization_config has backend='llm-awq', whose packing is not supported; AutoAWQ's is")
    return Quantization("awq", bits=4)


def _gptq(settings: Mapping[str, Any]) -> Quantization:
    bits = _one_of(settings, "bits", (4, 8))
    _one_of(settings, "is_marlin_format", (False,), False)
    name = "checkpoint_format" if "checkpoint_format" in settings else "format"
    form = _one_of(settings, name, ("gptq", "gptq_v2"), "gptq")
    return Quantization("gptq", bits, zero_offset=int(form == "gptq"), needs_order=settings.get("desc_act") is True)


def _modelopt(settings: Mapping[str, Any]) -> Quantization:
    _one_of(settings, "quant_algo", ("FP8", "W8A8_SQ_PER_CHANNEL", "FP8_PER_CHANNEL_PER_TOKEN"))
    return Quantization("scaled")


def _mxfp4(settings: Mapping[str, Any]) -> Quantization:
    return Quantization("blocked mxfp4", bits=4)


METHODS: Final[Mapping[str, Callable[[Mapping[str, Any]], Quantization | None]]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}

# Field -> the method of files that have it but no `quant_method`.
MARKS: Final = {
    "config_groups": "compressed-tensors",
    "quant_algo": "modelopt",
    "activation_scheme": "fp8",
    "version": "awq",
    "zero_point": "awq",
    "checkpoint_format": "gptq",
    "desc_act": "gptq",
}
