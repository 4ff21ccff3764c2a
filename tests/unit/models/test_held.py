"""Quantized matrices as a GPU stores them: the numbers of the checkpoint, on every rank, or rounded at the start."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from contract.checkpoints import COMMON, save
from minisgl.checkpoint.hf import BUILTIN_MODEL, load_config
from minisgl.checkpoint.quantization import read_quantization
from minisgl.core.errors import ConfigError
from minisgl.device.device import CpuDevice
from minisgl.distributed.communicator import SoloCommunicator
from minisgl.distributed.info import DistributedInfo
from minisgl.engine.fit import QUANTIZATIONS
from minisgl.layers.builder import Builder
from minisgl.layers.linear import RMSNorm, Stream
from minisgl.layers.parameter import Init, Parameter, Source
from minisgl.models import quantize, weight
from minisgl.models.dequantize import Matrix
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.mlp import SparseMLP
from minisgl.models.model_config import ModelConfig
from minisgl.models.weight import fill, load_model, open_checkpoint
from minisgl.ops.quantized import (
    INT8,
    MXFP4,
    TARGET_FORMATS,
    Format,
    Quantized,
    pack,
    round_int4,
    target_format,
    unpack,
)
from minisgl.ops.table import load_ops
from unit.models.test_dequantize import mxfp4
from unit.models.test_dequantize import pack as words

CPU = torch.device("cpu")


def load(
    folder: Path, is_supported: bool = False, target: Format | None = None, ranks: int = 1, rank: int = 0
) -> LlamaForCausalLM:
    config = ModelConfig.from_hf(load_config(folder))
    comm = SoloCommunicator(DistributedInfo(rank, ranks), CPU)
    ops = load_ops("reference")
    return load_model(
        folder,
        config,
        torch.bfloat16,
        CpuDevice(1),
        ops,
        comm=comm,
        target_format=target,
        supports_format=lambda kind: is_supported,
    )


def dense(model: LlamaForCausalLM) -> list[Tensor]:
    tensors = [p.tensor for p in model.parameters]
    return [t.dense(torch.bfloat16) if isinstance(t, Quantized) else t for t in tensors]


@pytest.mark.parametrize(
    ("scheme", "ranks", "kept"),
    [
        ("fp8", 1, 24),
        ("fp8", 2, 24),
        ("fp8", 4, 6),
        ("int4", 1, 24),
        ("int4", 2, 24),
        ("int4", 4, 18),
        ("int8", 1, 24),
        ("int8", 4, 24),
    ],
)
def test_numbers_of_a_checkpoint_are_kept(scheme: str, ranks: int, kept: int, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    quantize.quantize(str(BUILTIN_MODEL), folder, scheme)
    for rank in range(ranks):
        held, widened = (load(folder, is_supported, None, ranks, rank) for is_supported in (True, False))
        matrices = [p.tensor for p in held.parameters if isinstance(p.tensor, Quantized)]
        # Of 4 ranks' parts, 64 rows of k and v and 192 rows or columns of the MLP cut through blocks of 128, and 192
        # columns through groups of 128.
        assert len(matrices) == kept
        assert not any(isinstance(p.tensor, Quantized) for p in widened.parameters)
        for a, b in zip(dense(held), dense(widened), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("device", "scheme"), [(device, scheme) for device in TARGET_FORMATS for scheme in TARGET_FORMATS[device]]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_in_16_bits_is_rounded_while_it_loads(device: str, scheme: str, ranks: int) -> None:
    held, plain = (
        load(BUILTIN_MODEL, True, target, ranks, ranks - 1) for target in (TARGET_FORMATS[device][scheme], None)
    )
    assert sum(isinstance(p.tensor, Quantized) for p in held.parameters) == 24
    assert not isinstance(held.lm_head.weight, Quantized)
    assert f"{scheme} with scales" in held.quantization
    limit = {"fp8": 0.03, "int8": 0.015, "int4": 0.12}[scheme]
    for a, b in zip(dense(held), dense(plain), strict=True):
        assert float((a.float() - b.float()).norm() / b.float().norm()) < limit
    pairs = [(a.tensor, b.tensor) for a, b in zip(held.parameters, plain.parameters, strict=True)]
    for a, b in pairs:
        assert not isinstance(a, Quantized) or a.nbytes < {"fp8": 0.51, "int8": 0.54, "int4": 0.29}[scheme] * b.nbytes


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with two layers of three experts of 256."""
    folder = tmp_path_factory.mktemp("experts")
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    routing = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
    save(folder, Qwen3MoeConfig(**COMMON | sizes | routing))
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("scheme", TARGET_FORMATS["cuda"])
def test_a_head_of_its_own_has_8_bits(scheme: str, ranks: int, experts: Path) -> None:
    """Whatever the layers have, if the device supports such numbers."""
    target = TARGET_FORMATS["cuda"][scheme]
    held, plain = (load(experts, is_supported, target, ranks, ranks - 1) for is_supported in (True, False))
    head, want = held.lm_head.weight, plain.lm_head.weight
    assert isinstance(head, Quantized) and str(head.format) == "int8 with scales for rows" and isinstance(want, Tensor)
    assert float((head.dense(torch.float32) - want.float()).norm() / want.float().norm()) < 0.015
    assert isinstance(load(experts, True, None, ranks).lm_head.weight, Tensor)


def moe_layer(model: LlamaForCausalLM) -> SparseMLP:
    layer = model.model.layers[1].mlp
    assert isinstance(layer, SparseMLP)
    return layer


@pytest.mark.parametrize(
    ("scheme", "published", "ranks", "kept"),
    [
        ("fp8", True, 1, 2),
        ("fp8", True, 2, 2),
        ("fp8", True, 4, 0),
        ("fp8", False, 1, 2),
        ("fp8", False, 4, 2),
        ("int8", True, 4, 2),
        ("int8", False, 2, 2),
        ("int4", True, 1, 2),
        ("int4", True, 4, 1),
        ("int4", False, 2, 2),
    ],
)
def test_experts_keep_their_bits(
    scheme: str, published: bool, ranks: int, kept: int, experts: Path, tmp_path: Path
) -> None:
    """As a checkpoint has them, whose blocks and groups the fourth rank's 64 columns cut, or rounded at the start."""
    target = None if published else TARGET_FORMATS["cuda"][scheme]
    if published:
        quantize.quantize(str(experts), tmp_path / "out", scheme)
    held = load(tmp_path / "out" if published else experts, True, target, ranks, ranks - 1)
    wide = load(tmp_path / "out" if published else experts, False, None, ranks, ranks - 1)
    assert not any(isinstance(p.tensor, Quantized) for p in wide.parameters)
    layer, widened = moe_layer(held), moe_layer(wide)
    pairs = list(zip(layer.weights[:2], widened.weights[:2], strict=True))
    assert sum(isinstance(got, Quantized) for got, _ in pairs) == kept
    for got, want in pairs:
        assert isinstance(want, Tensor) and isinstance(got, Tensor | Quantized) and got.shape == want.shape
        for e in range(3):
            matrix = got[e]
            numbers = matrix.dense(torch.bfloat16) if isinstance(matrix, Quantized) else matrix
            error = (numbers.float() - want[e].float()).norm() / want[e].float().norm()
            limit = 0 if published else {"fp8": 0.03, "int8": 0.01, "int4": 0.12}[scheme]
            assert float(error) < limit or torch.equal(numbers, want[e])
    norm = RMSNorm(Builder(load_ops("reference"), torch.bfloat16, CPU), "n", 128, 0)
    x, residual = torch.randn(2, 5, 128)
    torch.nn.init.ones_(norm.weight)
    outs = [m.forward(Stream(x.bfloat16(), residual.bfloat16()), norm).x.float() for m in (layer, widened)]
    assert float((outs[0] - outs[1]).norm() / outs[1].norm()) < (0.01 if published else 0.2)


@pytest.fixture
def mxfp4_experts(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of gpt-oss with experts in MXFP4, and their matrices as transformers reads them."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    routing = {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 256}
    save(tmp_path, GptOssConfig(**COMMON | sizes | routing, head_dim=32))
    file = tmp_path / "model.safetensors"
    tensors, want = load_file(file), {}
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        for name, rows, columns in (("gate_up_proj", 512, 128), ("down_proj", 128, 256)):
            del tensors[f"{experts}.{name}"]
            packed, scales, _ = mxfp4(3, rows, columns)
            blocks = packed.view(3, rows, columns // 32, 16)
            tensors |= {f"{experts}.{name}_blocks": blocks, f"{experts}.{name}_scales": scales}
            read = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).transpose(1, 2)
            parts = {"gate_proj": read[:, ::2], "up_proj": read[:, 1::2]} if rows == 512 else {"down_proj": read}
            want |= {f"{experts}.{e}.{part}.weight": matrix[e] for part, matrix in parts.items() for e in range(3)}
    save_file(tensors, file)
    config = load_config(tmp_path) | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, want


@pytest.mark.parametrize(("ranks", "held"), [(1, False), (2, False), (1, True), (4, True)])
def test_experts_in_mxfp4_are_read_as_published(
    mxfp4_experts: tuple[Path, dict[str, Tensor]], ranks: int, held: bool
) -> None:
    folder, want = mxfp4_experts
    for rank in range(ranks):
        model, found = load(folder, held, None, ranks, rank), 0
        for parameter in model.parameters:
            for source in parameter.sources:
                if source.name in want:
                    tensor, rows = parameter.tensor, (source.start, source.start + source.rows)
                    if isinstance(tensor, Quantized):
                        assert held and tensor.format == MXFP4
                        got = tensor.part(*rows).dense(torch.bfloat16)
                    else:
                        assert not held
                        got = tensor[slice(*rows)]
                    assert torch.equal(got, want[source.name][source.slices])
                    found += 1
        assert found == len(want) == 2 * 3 * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"up_scales": None}, r"no model\.layers\.0\.mlp\.experts\.0\.gate_proj\.scales"),
        ({"up_scales": torch.full((3, 512, 4), 255).byte()}, r"gate_proj\.scales in .* 0 or not finite"),
        ({"up_blocks": torch.zeros(3, 512, 4, 8).byte()}, r"gate_proj\.blocks in .* instead of \[256, 4, 16\]"),
        ({"up_blocks": None, "up_scales": None}, r"lacks model\.layers\.0\..*experts\.0\."),
    ],
)
def test_bad_experts_in_mxfp4_are_refused(
    mxfp4_experts: tuple[Path, dict[str, Tensor]], change: dict[str, Tensor | None], message: str
) -> None:
    folder, _ = mxfp4_experts
    tensors = load_file(folder / "model.safetensors")
    for end, tensor in change.items():
        name = next(n for n in sorted(tensors) if n.endswith(f"gate_{end.replace('_', '_proj_')}"))
        tensors.pop(name)
        tensors |= {} if tensor is None else {name: tensor}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load(folder)


@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_what_a_device_does_not_hold_can_be_rounded_again(scheme: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    quantize.quantize(str(BUILTIN_MODEL), folder, scheme)
    again, widened = (load(folder, False, target) for target in (INT8, None))
    assert {p.tensor.format for p in again.parameters if isinstance(p.tensor, Quantized)} == {INT8}
    for a, b in zip(dense(again), dense(widened), strict=True):
        assert float((a.float() - b.float()).norm() / b.float().norm()) < 0.007


@pytest.mark.parametrize("kind", [Format(8, 0), Format(8, 128), Format(4, 32, has_zeros=True), INT8], ids=str)
def test_parts_are_filled_apart(kind: Format) -> None:
    torch.manual_seed(0)
    values = torch.randn(256, 384)
    whole, parts = kind.empty(256, 384, CPU), kind.empty(256, 384, CPU)
    for t in (*whole.tensors, *parts.tensors):
        t.zero_()
    whole.round_from(values)
    for start in (128, 0):
        parts.part(start, start + 128).round_from(values[start : start + 128])
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(whole.tensors, parts.tensors, strict=True)
    )


def test_narrow_models_have_small_groups() -> None:
    groups = [target_format("cuda", "int4", size).group for size in (256, 4096)]
    assert (
        groups == [32, 128]
        and target_format("cuda", "fp8", 256) == TARGET_FORMATS["cuda"]["fp8"]
        and target_format("cuda", "", 256) is None
    )


def test_what_the_settings_offer_is_what_is_made() -> None:
    offered = {(device, name): bits for device, names in QUANTIZATIONS.items() for name, bits in names.items()}
    assert offered == {
        (device, name): kind.bits for device, kinds in TARGET_FORMATS.items() for name, kind in kinds.items()
    }


def test_gptq_without_zero_points_is_symmetric(tmp_path: Path) -> None:
    """AutoGPTQ writes zero points always: 7, which is 8 less one, if there are none."""
    torch.manual_seed(0)
    rows, columns, group = 48, 256, 128
    q, scale = torch.randint(0, 16, (rows, columns)), (torch.rand(rows, columns // group) + 0.1).half()
    for zero in (8, 5):
        zeros = torch.full((rows, columns // group), 8)
        zeros[3, 1] = zero
        tensors = {"qweight": words(q.t(), 4, 0), "qzeros": words(zeros.t() - 1, 4, 1), "scales": scale.t()}
        save_file({f"a.{name}": t.contiguous() for name, t in tensors.items()}, tmp_path / "model.safetensors")
        quantization = read_quantization({"quantization_config": {"quant_method": "gptq", "bits": 4}})
        with ExitStack() as stack:
            found = open_checkpoint([tmp_path / "model.safetensors"], stack, quantization)["a.weight"].data
            assert isinstance(found, Matrix) and found.format == Format(4, group, zero != 8, torch.float16)


@pytest.mark.parametrize("chunk", [64, 128])
def test_packing_is_reversible(chunk: int) -> None:
    q = torch.randint(0, 16, (5, 256), dtype=torch.uint8)
    assert torch.equal(unpack(pack(q, chunk), chunk), q)


def save_gptq(source: Path, target: Path) -> None:
    """Write the projections of a checkpoint in 4 bits as GPTQ does with `desc_act`: any columns share a scale."""
    target.mkdir()
    tensors, generator = {}, torch.Generator().manual_seed(0)
    orders: dict[str, Tensor] = {}  # matrices with the same inputs have the same
    for name, tensor in load_file(source / "model.safetensors").items():
        if not weight.PROJECTION.search(name):
            tensors[name] = tensor
            continue
        module = name.removesuffix(".weight")
        inputs = f"{module.rpartition('.')[0]} {module.endswith(('o_proj', 'down_proj'))}"
        order = orders.setdefault(inputs, torch.randperm(tensor.shape[1], generator=generator))
        numbers, scale = round_int4(tensor[:, order], 128, torch.float16)
        q = numbers[:, order.argsort()].int()
        new = {"qweight": words(q.t(), 4, 0), "qzeros": words(torch.full_like(scale.t(), 7).int(), 4, 1)}
        new |= {"scales": scale.t(), "g_idx": (order.argsort() // 128).int()}
        tensors |= {f"{module}.{last}": t.contiguous() for last, t in new.items()}
    save_file(tensors, target / "model.safetensors")
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    config = load_config(source) | {"quantization_config": {"quant_method": "gptq", "bits": 4, "desc_act": True}}
    (target / "config.json").write_text(json.dumps(config))


def test_a_published_gptq_folder_with_more_than_needed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Biases of 0, constants and scales in it; settings in quantize_config.json; zero points less 1, not named so."""
    folder = tmp_path / "gptq"
    save_gptq(BUILTIN_MODEL, folder)
    expected = load(folder, True)
    config = load_config(folder)
    settings = {"bits": 4, "group_size": 128, "desc_act": True, "sym": True, "checkpoint_format": None}
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps(settings))
    tensors = load_file(folder / "model.safetensors")
    scales = [(n, t) for n, t in tensors.items() if n.endswith(".scales")]
    extra = {n.replace(".scales", ".bias"): torch.zeros(t.shape[1]).half() for n, t in scales}
    extra |= {n: torch.ones(4) for n in ("score.weight", "model.layers.0.self_attn.rotary_emb.cos_cached")}
    extra |= {f"model.layers.1.self_attn.{n}": torch.tensor(0.5) for n in ("kv_scale", "k_scale")}
    save_file(tensors | extra, folder / "model.safetensors")
    assert all(map(torch.equal, dense(load(folder, True)), dense(expected)))
    assert [f"the same ({len(extra)}): " in message for message in caplog.messages] == [True]


@pytest.mark.parametrize(("ranks", "kept"), [(1, 24), (2, 12)])
def test_columns_in_an_order_of_their_own_are_kept(ranks: int, kept: int, tmp_path: Path) -> None:
    """All of them, so not those of a rank's part."""
    save_gptq(BUILTIN_MODEL, tmp_path / "out")
    for rank in range(ranks):
        held, widened = (load(tmp_path / "out", is_supported, None, ranks, rank) for is_supported in (True, False))
        matrices = [p.tensor for p in held.parameters if isinstance(p.tensor, Quantized)]
        assert len(matrices) == kept and all(matrix.format.order for matrix in matrices)
        assert held.quantization == "int4 with scales for groups of 128 in an order of their own"
        for a, b in zip(dense(held), dense(widened), strict=True):
            assert torch.equal(a, b)


def test_a_matrix_of_mixed_parts_is_not_quantized() -> None:
    config = ModelConfig.from_hf(load_config(BUILTIN_MODEL))
    builder = Builder(
        load_ops("reference"), torch.bfloat16, CPU, format_of=lambda name: Format(8, 0) if "q_proj" in name else None
    )
    model = LlamaForCausalLM(builder, config)
    assert not any(isinstance(p.tensor, Quantized) for p in model.parameters)


def test_zero_points_and_scales_of_awq_are_kept(tmp_path: Path) -> None:
    """One module of 4 bits with zero points, as AutoAWQ stores it, against its float32 numbers."""
    torch.manual_seed(0)
    rows, columns, group = 48, 256, 64
    q, zero = torch.randint(0, 16, (rows, columns)), torch.randint(0, 16, (rows, columns // group))
    scale, order = (torch.rand(rows, columns // group) + 0.1).half(), (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words(q.t(), 4, 1, order), "qzeros": words(zero.t(), 4, 1, order), "scales": scale.t()}
    save_file({f"a.{name}": t.contiguous() for name, t in tensors.items()}, tmp_path / "model.safetensors")
    quantization = read_quantization({"quantization_config": {"quant_method": "awq", "bits": 4}})
    with ExitStack() as stack:
        stored = open_checkpoint([tmp_path / "model.safetensors"], stack, quantization)
        found = stored["a.weight"].data
        assert isinstance(found, Matrix) and found.format == Format(4, group, True, torch.float16)
        slices = slice(16, 48), slice(128, 256)
        target = found.format.empty(32, 128, CPU)
        source = Source("a.weight", (rows, columns), slices, 0)
        fill(stored, (Parameter(target, (source,), Init.NORMAL),), set(), CpuDevice(1))
    spread = (q - zero.repeat_interleave(group, 1)) * scale.float().repeat_interleave(group, 1)
    assert torch.equal(target.dense(torch.float32), spread[slices])


@pytest.mark.parametrize(
    ("block", "shape"), [([128, 128], (256, 128)), ([64, 256], (256, 256)), ([128, 256], (256, 256))]
)
def test_blocks_as_wide_as_the_matrix_are_not_rows(block: list[int], shape: tuple[int, int], tmp_path: Path) -> None:
    torch.manual_seed(0)
    q, scale = torch.randn(shape).to(torch.float8_e4m3fn), torch.rand(shape[0] // block[0], 1) + 0.1
    save_file({"a.weight": q, "a.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    config = {"quant_method": "fp8", "weight_block_size": block}
    with ExitStack() as stack:
        files = [tmp_path / "model.safetensors"]
        stored = open_checkpoint(files, stack, read_quantization({"quantization_config": config}))
        found = stored["a.weight"].data
        assert isinstance(found, Matrix)
        assert found.format == (Format(8, 128) if block == [128, 128] else None)
        target = (found.format or Format(8, 0)).empty(*shape, CPU)
        source = Source("a.weight", shape, (slice(0, shape[0]), slice(0, shape[1])), 0)
        if found.format is not None:
            fill(stored, (Parameter(target, (source,), Init.NORMAL),), set(), CpuDevice(1))
            assert torch.equal(target.dense(torch.float32), q.float() * scale.repeat_interleave(128, 0))


@pytest.mark.parametrize(
    ("device", "dtype", "columns", "rows", "told"),
    [
        ("cpu", torch.bfloat16, 576, 1024, "--quantization int8 has 0.5 MB less, and is faster here: "),
        ("cuda", torch.bfloat16, 576, 1024, "--quantization int8 has 0.5 MB less"),
        ("cpu", torch.float32, 576, 1024, "--quantization int8 has 1.6 MB less"),
        ("cpu", torch.bfloat16, 576, 128, ""),  # 0.07 MB more
        ("cpu", torch.bfloat16, 584, 1024, ""),  # int8 has no such matrix either
    ],
)
def test_int4_says_where_int8_has_fewer_bytes(
    device: str, dtype: torch.dtype, columns: int, rows: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = TARGET_FORMATS[device]["int4"]
    builder = Builder(load_ops("reference"), dtype, CPU, format_of=lambda name: target)
    builder.matrix({"model.layers.0.mlp.up_proj.weight": rows}, columns)
    builder.matrix({"model.layers.0.mlp.down_proj.weight": 1024}, 256)
    weight._check_target_format(tuple(builder.parameters), target)
    assert told in caplog.text and ("faster" in caplog.text) == bool(told)


def test_what_cannot_be_rounded_is_told(caplog: pytest.LogCaptureFixture) -> None:
    target = TARGET_FORMATS["cuda"]["int4"]  # four ranks have 192 columns of down, no multiple of 128
    held = load(BUILTIN_MODEL, True, target, ranks=4)
    assert sum(isinstance(p.tensor, Quantized) for p in held.parameters) == 18
    assert "6 matrices stay in 16 or 32 bits" in caplog.text and "down_proj" in caplog.text
    builder = Builder(load_ops("reference"), torch.bfloat16, CPU)
    builder.parameter({"model.layers.0.mlp.up_proj.weight": 100}, 100)
    with pytest.raises(ConfigError, match=r"no matrix can be quantized to int4.*up_proj"):
        weight._check_target_format(tuple(builder.parameters), target)
