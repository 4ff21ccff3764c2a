"""Quantized matrices are read as their formats define them, whole and in parts, and bad ones are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from minisgl.checkpoint.quantization import read_quantization
from minisgl.core.errors import ConfigError
from minisgl.device.device import CpuDevice
from minisgl.layers.parameter import Init, Parameter, Source
from support.weights import load_weights

ROWS, COLUMNS = 48, 160
E4M3 = torch.float8_e4m3fn


def pack(q: Tensor, bits: int, dim: int, order: tuple[int, ...] = ()) -> Tensor:
    """Numbers below 2^bits -> words of 32 bits along `dim`; `order[i]` is the neighbour in the i-th place of a word."""
    per = 32 // bits
    words = torch.zeros([n // per if d == dim else n for d, n in enumerate(q.shape)], dtype=torch.int64)
    for i, neighbour in enumerate(order or range(per)):
        words |= q.index_select(dim, torch.arange(neighbour, q.shape[dim], per)).long() << bits * i
    return torch.where(words >= 2**31, words - 2**32, words).int()


def scaled(config: dict[str, Any], dtype: torch.dtype, scale: Tensor, name: str = "weight_scale") -> Any:
    q = torch.randn(ROWS, COLUMNS).mul_(40).to(dtype)
    rows, columns = config.get("weight_block_size") or (
        (1, COLUMNS) if scale.dim() and len(scale) == ROWS else (ROWS, COLUMNS)
    )
    whole = scale.float().reshape(-(-ROWS // rows), -(-COLUMNS // columns))
    whole = whole.repeat_interleave(rows, 0)[:ROWS].repeat_interleave(columns, 1)[:, :COLUMNS]
    return config, {"weight": q, name: scale}, q.float() * whole


def compressed(bits: int, group: int, *, zeros: bool = False, order: bool = False) -> Any:
    weights = {"num_bits": bits, "type": "int", "group_size": group, "symmetric": not zeros}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": {"weights": weights}},
    }
    q = torch.randint(0, 2**bits, (ROWS, COLUMNS))
    scale = torch.rand(ROWS, COLUMNS // group) + 0.1
    tensors = {
        "weight_packed": pack(q, bits, 1),
        "weight_shape": torch.tensor([ROWS, COLUMNS]),
        "weight_scale": scale.bfloat16(),
    }
    zero = torch.full_like(scale, 2 ** (bits - 1))
    if zeros:
        zero = torch.randint(0, 2**bits, scale.shape)
        tensors["weight_zero_point"] = pack(zero, bits, 0)
    groups = torch.arange(COLUMNS) // group
    if order:
        groups = groups[torch.randperm(COLUMNS)]
        tensors["weight_g_idx"] = groups.int()
    return config, tensors, (q - zero[:, groups]) * scale.bfloat16().float()[:, groups]


def mxfp4(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random bytes [..., K / 2], exponents [..., K / 32], and the numbers: (-1)^s 2^(e - 1) (1 + m / 2), or m / 2."""
    q, exponents = torch.randint(0, 16, shape), torch.randint(120, 131, (*shape[:-1], shape[-1] // 32))
    e, m = q >> 1 & 3, (q & 1) / 2
    numbers = torch.where(e > 0, 2.0 ** (e - 1) * (1 + m), m) * (1 - 2 * (q >> 3))
    packed, exponents[..., 0, 0] = (q[..., ::2] | q[..., 1::2] << 4).byte(), 0  # 2^-127 is a scale, too
    return packed, exponents.byte(), numbers * (2.0 ** (exponents.double() - 127)).repeat_interleave(32, -1)


def compressed_mxfp4() -> Any:
    packed, scale, expected = mxfp4(ROWS, COLUMNS)
    weights = {"num_bits": 4, "type": "float", "group_size": 32, "scale_dtype": "torch.uint8"}
    config = {"format": "mxfp4-pack-quantized", "config_groups": {"g": {"weights": weights}}}
    return {"quant_method": "compressed-tensors", **config}, {"weight_packed": packed, "weight_scale": scale}, expected


def awq(group: int) -> Any:
    q, scale = torch.randint(0, 16, (ROWS, COLUMNS)), (torch.rand(ROWS, COLUMNS // group) + 0.1).half()
    zero, groups, order = torch.randint(0, 16, scale.shape), torch.arange(COLUMNS) // group, (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": pack(q.t(), 4, 1, order), "qzeros": pack(zero.t(), 4, 1, order), "scales": scale.t()}
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return config, tensors, (q - zero[:, groups]) * scale.float()[:, groups]


def gptq(bits: int, group: int, *, v2: bool = False, act_order: bool = False) -> Any:
    q, scale = torch.randint(0, 2**bits, (ROWS, COLUMNS)), (torch.rand(ROWS, COLUMNS // group) + 0.1).half()
    zero, groups = torch.randint(0, 2**bits, scale.shape), torch.arange(COLUMNS) // group
    if act_order:
        groups = groups[torch.randperm(COLUMNS)]
    ones = pack(torch.full_like(zero.t(), int(not v2)), bits, 1)  # GPTQModel subtracts words, which may borrow
    tensors = {
        "qweight": pack(q.t(), bits, 0),
        "qzeros": pack(zero.t(), bits, 1) - ones,
        "scales": scale.t(),
        "g_idx": groups.int(),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order}
    if v2:
        config["checkpoint_format"] = "gptq_v2"
    return config, tensors, (q - zero[:, groups]) * scale.float()[:, groups]


def with_config(case: Any, **changes: Any) -> Any:
    config, *rest = case
    return config | changes, *rest


def with_tensors(case: Any, **more: Tensor) -> Any:
    config, tensors, expected = case
    return config, tensors | more, expected


def int_config() -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"dynamic": True}}}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}


CASES = {
    "fp8 blocks": lambda: scaled(
        {"quant_method": "fp8", "weight_block_size": [32, 64]}, E4M3, torch.rand(2, 3) + 0.1, "weight_scale_inv"
    ),
    "fp8 blocks, bfloat16 scales": lambda: scaled(
        {"quant_method": "fp8", "weight_block_size": [16, 32]}, E4M3, (torch.rand(3, 5) + 0.1).bfloat16()
    ),
    "fp8 a tensor": lambda: scaled({"quant_method": "fp8"}, E4M3, torch.tensor(0.3)),
    "fp8 a row": lambda: scaled({"quant_method": "fbgemm_fp8"}, E4M3, torch.rand(ROWS, 1) + 0.1),
    "modelopt": lambda: scaled({"quant_method": "modelopt", "quant_algo": "FP8"}, E4M3, torch.tensor([0.3])),
    "int8 a row": lambda: scaled(int_config(), torch.int8, torch.rand(ROWS, 1) + 0.1),
    "compressed 4 bits": lambda: compressed(4, 32),
    "compressed 4 bits, zero points": lambda: compressed(4, 80, zeros=True),
    "compressed 4 bits, order": lambda: compressed(4, 16, order=True),
    "compressed 8 bits": lambda: compressed(8, 160, zeros=True),
    "compressed 8 bits beside 4": lambda: with_config(
        compressed(8, 32), config_groups={str(bits): {"weights": {"num_bits": bits}} for bits in (4, 8)}
    ),
    "compressed, order not set": lambda: with_tensors(
        compressed(4, 16), weight_g_idx=torch.full((COLUMNS,), -1, dtype=torch.int32)
    ),
    "int8 a row, zero points of 0": lambda: with_tensors(CASES["int8 a row"](), weight_zero_point=torch.zeros(ROWS, 1)),
    "compressed, 16 bits": lambda: (
        int_config() | {"format": "dense"},
        {"weight": (w := torch.randn(ROWS, COLUMNS))},
        w,
    ),
    "compressed mxfp4": compressed_mxfp4,
    "awq": lambda: awq(32),
    "awq, one group": lambda: awq(160),
    "gptq": lambda: gptq(4, 32),
    "gptq act_order": lambda: gptq(4, 16, act_order=True),
    "gptq v2": lambda: gptq(4, 80, v2=True),
    "gptq 8 bits": lambda: gptq(8, 32),
    "gptq 8 bits, dynamic": lambda: with_config(gptq(8, 32), bits=4, dynamic={"+:a": {"bits": 8}}),
    "gptq 4 bits, dynamic": lambda: with_config(gptq(4, 32), bits=8, dynamic={"+:a": {"bits": 4}}),
    "gptq v2 8 bits": lambda: gptq(8, 80, v2=True),
    "gptq by its old settings": lambda: (
        {
            "bits": 4,
            "desc_act": False,
            "sym": True,
            "checkpoint_format": None,
            "is_marlin_format": False,
            "lm_head": False,
        },
        *gptq(4, 32)[1:],
    ),
    "awq by its old settings": lambda: (
        {"w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True},
        *awq(32)[1:],
    ),
    "awq by GPTQModel": lambda: with_config(awq(32), version=None, checkpoint_format="gemm", pack_dtype="int32"),
    "awq, exllama": lambda: with_config(awq(32), exllama_config={"version": 2}, do_fuse=False, backend="autoawq"),
}


def load(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *take: slice) -> Tensor:
    """Write a checkpoint of one module and load a part of its weight, as a rank's shard is."""
    save_file({f"a.{name}": t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")
    rows, columns = take or (slice(0, ROWS), slice(0, COLUMNS))
    target = torch.full((rows.stop - rows.start, columns.stop - columns.start), torch.nan)
    source = Source("a.weight", (ROWS, COLUMNS), (rows, columns), 0)
    quantization = read_quantization({"quantization_config": dict(config)})
    parameter = Parameter(target, (source,), Init.NORMAL)
    load_weights([path / "model.safetensors"], (parameter,), set(), CpuDevice(), quantization=quantization)
    return target


@pytest.mark.parametrize("case", CASES)
def test_matrices_are_read_as_defined(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config, tensors, expected = CASES[case]()
    assert torch.equal(load(tmp_path, config, tensors), expected.float())
    for take in ((slice(0, 24), slice(0, COLUMNS)), (slice(24, 48), slice(0, 80)), (slice(5, 29), slice(33, 158))):
        assert torch.equal(load(tmp_path, config, tensors, *take), expected.float()[take])


def test_matrices_that_are_left_out_are_read_as_they_are(tmp_path: Path) -> None:
    config, _, _ = CASES["awq"]()
    plain = torch.randn(ROWS, COLUMNS).bfloat16()
    assert torch.equal(load(tmp_path, config, {"weight": plain}), plain.float())


@pytest.mark.filterwarnings("default")
def test_scales_of_activations_and_of_the_cache_are_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, tensors, expected = CASES["modelopt"]()
    one = torch.tensor(1.3)
    names = (
        "input_scale",
        "act_scale",
        "output_scale",
        "kv_scale",
        "k_scale",
        "v_scale",
        "q_scale",
        "prob_scale",
        "input_zero_point",
    )
    found = load(tmp_path, config, tensors | {name: one.clone() for name in names})
    assert torch.equal(found, expected)
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        "ignored tensors without which the model computes the same (9)"
    ]


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("fp8 blocks", {"weight_scale_inv": None}, r"quantized weights a but no a\.weight_scale"),
        (
            "fp8 blocks",
            {"weight_scale_inv": torch.ones(3, 2)},
            r"a\.weight_scale_inv in .* shape \[3, 2\] instead of .*\[2, 3\]",
        ),
        ("fp8 a row", {"weight_scale": torch.zeros(ROWS, 1)}, r"a\.weight_scale in .* 0 or not finite"),
        ("fp8 a row", {"weight_scale": torch.empty(0, 1)}, r"a\.weight_scale in .* 0 or not finite"),
        ("int8 a row", {"weight_scale": torch.full((ROWS, 1), torch.nan)}, r"a\.weight_scale in .* 0 or not finite"),
        ("int8 a row", {"weight_zero_point": torch.ones(ROWS, 1)}, r"zero points"),
        ("awq", {"qzeros": None}, r"no a\.qzeros"),
        (
            "awq",
            {"qzeros": torch.zeros(5, 5, dtype=torch.int32)},
            r"a\.qzeros in .* shape \[5, 5\] instead of \[5, 6\]",
        ),
        ("gptq", {"scales": torch.ones(4, ROWS)}, r"a\.qzeros in .* shape \[5, 6\] instead of \[4, 6\]"),
        ("gptq", {"g_idx": torch.full((COLUMNS,), 9)}, r"a\.g_idx .* groups that do not exist"),
        ("compressed 4 bits", {"weight_shape": None}, r"no a\.weight_shape"),
        (
            "compressed mxfp4",
            {"weight_scale": torch.full((ROWS, COLUMNS // 32), 255, dtype=torch.uint8)},
            r"a\.weight_scale in .* 0 or not finite",
        ),
        (
            "compressed mxfp4",
            {"weight_packed": torch.zeros(ROWS, 16, dtype=torch.uint8)},
            r"a\.weight_packed in .* shape \[48, 16\] instead of \[48, 80\]",
        ),
        ("awq", {"weight_scale": torch.ones(1)}, r"has also a\.weight_scale"),
        ("awq", {"act.scales": torch.ones(COLUMNS)}, r"has also a\.act\.scales; a layer's inputs are multiplied by"),
        (
            "modelopt",
            {"pre_quant_scale": torch.ones(COLUMNS)},
            r"a\.pre_quant_scale; a layer's inputs are multiplied by",
        ),
        ("gptq", {"bias": torch.ones(ROWS)}, r"has also a\.bias; a bias is not 0 where"),
        ("gptq", {"bias": torch.full((ROWS,), torch.nan)}, r"has also a\.bias; a bias is not 0 where"),
        ("gptq act_order", {"g_idx": None}, r"no a\.g_idx"),
        ("gptq", {"qweight": torch.zeros(40, ROWS, dtype=torch.int16)}, r"a\.qweight in .* is I16 instead of I32"),
        ("gptq", {"qweight": None, "B": torch.zeros(10, 96).int()}, r"lacks a\.weight and has also a\.B"),
        (
            "awq",
            {"scales": torch.ones(3, ROWS), "qzeros": torch.zeros(3, ROWS // 8).int()},
            r"160 columns of quantized weights a are in 3 unequal groups",
        ),
        (
            "compressed 4 bits, zero points",
            {"weight_zero_point": torch.zeros(48, 2).char()},
            r"shape \[48, 2\] instead",
        ),
        ("gptq", {"weight": torch.ones(ROWS, COLUMNS)}, r"has a\.weight twice: quantized and not"),
    ],
)
def test_bad_tensors_are_refused(case: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config, tensors, _ = CASES[case]()
    tensors = {name: t for name, t in (tensors | change).items() if t is not None}
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, config, tensors)
