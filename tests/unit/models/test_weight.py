"""The loader: every layout of files that occurs, and a clear refusal of those that do not fit."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from contract.checkpoints import COMMON, configurations, save
from contract.harness import CPU, DEVICE, MiniEngine, Span
from minisgl.checkpoint.hf import load_config
from minisgl.core.errors import ConfigError
from minisgl.distributed.communicator import SoloCommunicator
from minisgl.distributed.info import DistributedInfo
from minisgl.layers.parameter import Init, Parameter, Source
from minisgl.models import weight
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.mlp import GatedMLP, SparseMLP
from minisgl.models.model_config import ModelConfig
from minisgl.models.weight import load_model
from minisgl.ops.table import load_ops
from support.weights import load_weights

UNTIED, TIED = "llama-gqa-llama3-untied", "qwen3-tied-wide-heads"
IDS = list(range(30))


def load(folder: Path, dtype: torch.dtype = torch.float32, **options) -> LlamaForCausalLM:
    return load_model(folder, ModelConfig.from_hf(load_config(folder)), dtype, DEVICE, load_ops("cpu"), **options)


def rewrite(folder: Path, change) -> None:
    """Apply `change` to the dict of tensors of a one-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", [UNTIED, TIED])
def test_merged_parameters_stack_the_checkpoint_tensors(tmp_path: Path, name: str):
    save(tmp_path, configurations()[name])
    tensors = load_file(tmp_path / "model.safetensors")
    model = load(tmp_path)
    layer, prefix = model.model.layers[1], "model.layers.1"
    qkv = torch.cat([tensors[f"{prefix}.self_attn.{p}_proj.weight"] for p in "qkv"])
    assert torch.equal(layer.self_attn.qkv_proj.weight, qkv)
    assert isinstance(layer.mlp, GatedMLP)
    gate_up = torch.cat([tensors[f"{prefix}.mlp.{p}_proj.weight"] for p in ("gate", "up")])
    assert torch.equal(layer.mlp.gate_up_proj.weight, gate_up)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name == TIED)
    assert model.num_parameters == sum(t.numel() for t in tensors.values())


@pytest.mark.parametrize(
    ("name", "module", "parts"),
    [
        ("qwen3-moe-one-dense-layer", "mlp", ("gate_proj", "up_proj", "down_proj")),
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
    ],
)
def test_experts_stack_the_checkpoint_tensors(tmp_path: Path, name: str, module: str, parts: tuple[str, ...]):
    save(tmp_path, configurations()[name])
    tensors = load_file(tmp_path / "model.safetensors")
    model = load(tmp_path)
    mlp = model.model.layers[2].mlp
    assert isinstance(mlp, SparseMLP) and len(mlp.weights.gate_up) == 5
    for e in range(5):
        gate, up, down = (tensors[f"model.layers.2.{module}.experts.{e}.{part}.weight"] for part in parts)
        assert torch.equal(mlp.weights.gate_up[e], torch.cat([gate, up])) and torch.equal(mlp.weights.down[e], down)
    assert isinstance(model.model.layers[1].mlp, SparseMLP) == (name == "mixtral")
    assert model.num_parameters == sum(t.numel() for t in tensors.values())
    lost = f"model.layers.0.{module}.experts.4.{parts[1]}.weight"
    rewrite(tmp_path, lambda t: t.pop(lost))
    with pytest.raises(ConfigError, match=f"lacks {lost}"):
        load(tmp_path)


def test_sharded_index(tmp_path: Path):
    checkpoint = save(tmp_path, configurations()[UNTIED], max_shard_size="150KB")
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(files) >= 2 and (tmp_path / "model.safetensors.index.json").is_file()
    calls: list[tuple[int, int]] = []
    load(tmp_path, progress=lambda done, total: calls.append((done, total)))
    stored = sum(t.nbytes for t in checkpoint.model.state_dict().values())
    assert len(calls) >= len(files) and calls[-1] == (stored, stored) and sorted(calls) == calls
    got = MiniEngine.load(tmp_path).step([Span(0, 0, IDS)])
    assert torch.allclose(got, checkpoint.logits(IDS)[-1:], atol=1e-4)
    (tmp_path / files[0]).unlink()
    with pytest.raises(ConfigError, match=files[0]):
        load(tmp_path)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_any_stored_float_dtype_is_converted(tmp_path: Path, stored: torch.dtype):
    save(tmp_path, configurations()[TIED])
    rewrite(tmp_path, lambda t: t.update({k: v.to(stored) for k, v in t.items()}))
    expected = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    assert torch.equal(load(tmp_path).model.norm.weight, expected.float())
    assert load(tmp_path, torch.bfloat16).model.norm.weight.dtype is torch.bfloat16


ATTENTION, NEXT = "model.layers.0.self_attn", "model.layers.3"
HARMLESS = {
    "constants of RoPE": [f"{ATTENTION}.rotary_emb.{n}" for n in ("inv_freq", "cos_cached", "sin_cached")],
    "constants of the decoder": ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"],
    "biases of 0": [f"{ATTENTION}.q_proj.bias", "model.layers.2.mlp.down_proj.bias", "model.norm.bias", "lm_head.bias"],
    "scales of K/V": [f"{ATTENTION}.{n}" for n in ("kv_scale", "k_scale", "v_scale", "q_scale", "prob_scale")],
    "scales of K/V, older": [f"{ATTENTION}.k_proj.output_scale", f"{ATTENTION}.v_proj.output_scale"],
    "scales of K/V by ModelOpt": [f"{ATTENTION}.k_proj.k_scale", f"{ATTENTION}.v_proj.v_scale"],
    "scales of K/V by vLLM": [f"{ATTENTION}.attn.k_scale", f"{ATTENTION}.attn.v_zero_point"],
    "scales of activations": ["model.layers.1.mlp.up_proj.input_scale", "model.layers.1.mlp.up_proj.input_zero_point"],
    "masks": [f"{ATTENTION}.masked_bias"],
    "classifier": ["score.weight"],
    "value head": ["v_head.summary.weight", "v_head.summary.bias"],
    "layer of further tokens": [f"{NEXT}.eh_proj.weight", f"{NEXT}.enorm.weight", f"{NEXT}.self_attn.q_proj.weight"],
    "module of further tokens": ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"],
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", HARMLESS)
def test_tensors_that_change_nothing_are_one_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str):
    save(tmp_path, configurations()[UNTIED])
    whole = load_file(tmp_path / "model.safetensors")
    extra = {n: torch.full((64,), 0.0 if n.startswith("model.") and "bias" in n else 2.0) for n in HARMLESS[kind]}
    extra |= {name: torch.zeros(160) for name in extra if name == "lm_head.bias"}
    rewrite(tmp_path, lambda t: t.update(extra))
    model = load(tmp_path)
    assert torch.equal(model.lm_head.weight, whole["lm_head.weight"])
    start = f"ignored tensors without which the model computes the same ({len(extra)}): "
    assert [record.getMessage().startswith(start) for record in caplog.records] == [True]
    assert all(re.sub(r"\.\d+\.", ".*.", name.removeprefix("model.")) in caplog.text for name in list(extra)[:5])


def test_causal_masks_and_a_copy_of_the_embedding_are_ignored(tmp_path: Path):
    save(tmp_path, configurations()[TIED])
    mask = {f"model.layers.{i}.self_attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril() for i in range(3)}
    rewrite(tmp_path, lambda t: t.update(mask | {"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(tmp_path)


def test_many_tensors_are_named_by_kind(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save(tmp_path, configurations()[UNTIED])
    names = [f"model.layers.{i}.self_attn.{p}_proj.bias" for i in range(3) for p in "qkvo"]
    rewrite(tmp_path, lambda t: t.update({name: torch.zeros(64) for name in names}))
    for rank in range(2):  # only the first logs
        load(tmp_path, comm=SoloCommunicator(DistributedInfo(rank, 2, 2), CPU))
    listed = ", ".join(f"model.layers.*.self_attn.{p}_proj.bias" for p in "koqv")
    assert caplog.messages == [f"ignored tensors without which the model computes the same (12): {listed}"]


WRAPPED = {
    "decoder alone": lambda name: name.removeprefix("model."),
    "compiled": lambda name: f"_orig_mod.{name}",
    "compiled layers": lambda name: name.replace(".mlp.", "._orig_mod.mlp."),
    "sharded": lambda name: f"_fsdp_wrapped_module.{name.replace('.mlp.', '._fsdp_wrapped_module.mlp.')}",
    "checkpointed": lambda name: name.replace(".mlp.", "._checkpoint_wrapped_module.mlp."),
    "parallel": lambda name: f"module.{name}",
    "peft": lambda name: f"base_model.model.{name}",
    "trl": lambda name: f"pretrained_model.{name}",
    "doubled": lambda name: f"model.{name}",
    "of images": lambda name: f"language_model.{name}",
    "of images, newer": lambda name: name.replace("model.", "model.language_model."),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_wrappers_around_the_decoder_are_left_out_of_names(tmp_path: Path, wrapper: str):
    save(tmp_path, configurations()[UNTIED])
    expected = load(tmp_path).parameters
    tensors = {WRAPPED[wrapper](n): t for n, t in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")  # without the metadata that transformers wants
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(load(tmp_path).parameters, expected, strict=True))


DEFECTS = {
    "missing": (lambda t: t.pop("model.layers.2.mlp.up_proj.weight"), r"lacks model\.layers\.2\.mlp\.up_proj\.weight"),
    "unexpected": (lambda t: t.update(stray=torch.ones(1)), "has also stray$"),
    "bias": (
        lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.tensor([0.0] * 63 + [1e-9])}),
        r"o_proj\.bias; a bias is not 0 where the architecture and config\.json have none$",
    ),
    "bias beside harmless": (
        lambda t: t.update({"lm_head.bias": torch.ones(160), "model.norm.bias": torch.zeros(64)}),
        r"has also lm_head\.bias; a bias",
    ),
    "mask of attention": (
        lambda t: t.update({"model.layers.0.self_attn.bias": torch.ones(64)}),
        r"has also model\.layers\.0\.self_attn\.bias; a bias",
    ),
    "further layers": (
        lambda t: t.update({"model.layers.3.self_attn.q_proj.weight": torch.ones(64, 64)}),
        r"has also model\.layers\.3\.self_attn\.q_proj\.weight$",
    ),
    "a projection in a layer of the model": (
        lambda t: t.update({"model.layers.2.eh_proj.weight": torch.ones(64, 64), "model.layers.2.a": torch.ones(1)}),
        r"has also model\.layers\.2\.a, model\.layers\.2\.eh_proj\.weight$",
    ),
    "scales": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}),
        r"up_proj\.weight_scale; config\.json does not describe this quantization$",
    ),
    "adapter": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.lora_A.default.weight": torch.ones(8, 64)}),
        r"lora_A\.default\.weight; an adapter is not merged: do that first",
    ),
    "wrapped by an adapter": (
        lambda t: t.update(
            {"model.layers.0.mlp.up_proj.base_layer.weight": t.pop("model.layers.0.mlp.up_proj.weight")}
        ),
        r"lacks model\.layers\.0\.mlp\.up_proj\.weight and .* an adapter is not merged",
    ),
    "Mistral's names": (
        lambda t: t.update({"layers.0.attention.wq.weight": torch.ones(64, 64)}),
        r"attention\.wq\.weight; the names are those of Meta's or Mistral's own format",
    ),
    "two names": (
        lambda t: t.update({"norm.weight": t["model.norm.weight"].clone()}),
        r"tensor model\.norm\.weight is in .* under two names, one of which is (model\.)?norm\.weight$",
    ),
    "shape": (lambda t: t.update({"model.norm.weight": torch.ones(65)}), r"model\.norm\.weight .*\[65\].*\[64\]"),
    "merged shape": (
        lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(16, 64)}),
        r"k_proj\.weight .*\[16, 64\].*\[32, 64\]",
    ),
    "rank": (lambda t: t.update({"lm_head.weight": torch.ones(160)}), r"lm_head\.weight .*\[160\].*\[160, 64\]"),
    "type": (lambda t: t.update({"model.norm.weight": torch.ones(64).int()}), r"model\.norm\.weight .* I32"),
    "untied head": (lambda t: t.pop("lm_head.weight"), r"lacks lm_head\.weight"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_misfitting_tensors_are_named(tmp_path: Path, defect: str):
    change, message = DEFECTS[defect]
    save(tmp_path, configurations()[UNTIED])
    rewrite(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path):
    save(tmp_path, configurations()[UNTIED])
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "extra.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is in more than one file"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "consolidated.safetensors",
        "adapter_model.safetensors",
        "model.fp16.safetensors",
        "pytorch_model.bin",
        "training_args.bin",
        "optimizer.pt",
    ],
)
def test_other_sets_of_tensors_are_not_read(tmp_path: Path, name: str):
    save(tmp_path, configurations()[UNTIED])
    whole = load_file(tmp_path / "model.safetensors")
    save_file({key: tensor + 1 for key, tensor in whole.items()}, tmp_path / name)
    assert torch.equal(load(tmp_path).model.embed_tokens.weight, whole["model.embed_tokens.weight"])


def test_a_truncated_file_is_refused(tmp_path: Path):
    save(tmp_path, configurations()[UNTIED])
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="is the download complete"):
        load(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_shards_of_fused_tensors(tmp_path: Path, rank: int):
    checkpoint = save(tmp_path, configurations()["phi3"])
    tensors = load_file(tmp_path / "model.safetensors")
    comm = SoloCommunicator(DistributedInfo(rank, 2, 2), CPU)  # enough for loading
    model = load(tmp_path, comm=comm)
    prefix, layer = "model.layers.1", model.model.layers[1]
    q, k, v = tensors[f"{prefix}.self_attn.qkv_proj.weight"].split([64, 32, 32])
    assert torch.equal(layer.self_attn.qkv_proj.weight, torch.cat([part.chunk(2)[rank] for part in (q, k, v)]))
    gate, up = tensors[f"{prefix}.mlp.gate_up_proj.weight"].chunk(2)
    assert isinstance(layer.mlp, GatedMLP)
    assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat([part.chunk(2)[rank] for part in (gate, up)]))
    assert model.num_parameters == sum(p.numel() for p in checkpoint.model.parameters())


def test_dummy_weights_need_only_the_config(tmp_path: Path):
    config = {"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 4, "head_dim": 16, **COMMON}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine, again = (MiniEngine.load(tmp_path, dummy=True) for _ in range(2))
    logits = engine.step([Span(0, 0, IDS)])
    assert logits.isfinite().all() and logits.std() > 0
    assert torch.equal(logits, again.step([Span(0, 0, IDS)]))
    assert engine.model.model.norm.weight.eq(1).all()


# -- parts of tensors, and the file format


def parameter(shape: tuple[int, ...], *sources: Source, dtype: torch.dtype = torch.float32) -> Parameter:
    return Parameter(torch.full(shape, float("nan"), dtype=dtype), sources, Init.NORMAL)


def part(name: str, whole: tuple[int, ...], start: int, **bounds: tuple[int, int]) -> Source:
    """`bounds` are rows and columns; all that are not given are taken."""
    rows, columns = bounds.get("rows", (0, whole[0])), bounds.get("columns", (0, whole[-1]))
    slices = (slice(*rows), slice(*columns))[: len(whole)]
    return Source(name, whole, slices, start)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", [1, 100, weight.PIECE_BYTES])
def test_row_and_column_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, piece: int):
    monkeypatch.setattr(weight, "PIECE_BYTES", piece)
    wide, tall, bias = (torch.randn(*shape).to(stored) for shape in ((6, 10), (8, 10), (8,)))
    path = tmp_path / "x.safetensors"
    save_file({"wide": wide, "tall": tall, "bias": bias}, path)
    merged = parameter(
        (7, 10), part("tall", (8, 10), 0, rows=(2, 6)), part("wide", (6, 10), 4, rows=(3, 6)), dtype=torch.bfloat16
    )
    vector = parameter((4,), part("bias", (8,), 0, rows=(4, 8)))
    load_weights([path], (merged, vector), {"wide"}, DEVICE)
    assert torch.equal(merged.tensor, torch.cat([tall[2:6], wide[3:6]]).bfloat16())
    assert torch.equal(vector.tensor, bias[4:].float())
    path = tmp_path / "y.safetensors"
    save_file({"wide": wide, "tall": tall}, path)
    columns = [parameter((6, 5), part("wide", (6, 10), 0, columns=(5, 10)))]
    columns.append(parameter((4, 3), part("tall", (8, 10), 0, rows=(1, 5), columns=(2, 5)), dtype=stored))
    done: list[tuple[int, int]] = []
    load_weights([path], tuple(columns), set(), DEVICE, lambda *x: done.append(x), threads=3)
    assert torch.equal(columns[0].tensor, wide[:, 5:].float()) and torch.equal(columns[1].tensor, tall[1:5, 2:5])
    wanted = (6 * 5 + 4 * 3) * stored.itemsize  # what is not taken is not counted
    assert done[-1] == (wanted, wanted) and (len(done) == 10 or piece > 1)


def test_loading_restores_the_number_of_threads(tmp_path: Path):
    save(tmp_path, configurations()[TIED])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        load(tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


ENTRY = b'{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
BROKEN = {
    "empty": b"",
    "another format": b"PK\x03\x04 is a zip, torch.save's format",
    "no JSON": header(b"x" * 8),
    "no mapping": header(b"[]"),
    "no offsets": header(b'{"a": {"dtype": "F32", "shape": [2]}}') + bytes(8),
    "negative": header(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}'),
    "too few bytes": header(b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}') + bytes(8),
    "truncated": header(b'{"a": ' + ENTRY + b"}") + bytes(7),
}


@pytest.mark.parametrize("defect", [*BROKEN, "absent"])
def test_broken_files_are_refused(tmp_path: Path, defect: str):
    path = tmp_path / "model.safetensors"
    if defect != "absent":
        path.write_bytes(BROKEN[defect])
    with pytest.raises(ConfigError, match=rf"^cannot read {path} \([^\n]+\); is the download complete\?$"):
        load_weights([path], (parameter((2,), part("a", (2,), 0)),), set(), DEVICE)


def test_an_error_while_copying_ends_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weight, "PIECE_BYTES", 4)
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(20)}, path)
    copies: list[torch.Tensor] = []

    class Failing:
        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            copies.append(target)
            if len(copies) == 3:
                raise MemoryError("out of memory")

        def finish(self) -> None:
            pass

    monkeypatch.setattr(DEVICE, "uploader", Failing)
    with pytest.raises(MemoryError, match="out of memory"):
        load_weights([path], (parameter((20,), part("a", (20,), 0)),), set(), DEVICE, threads=2)
    assert len(copies) < 20 and not [t.name for t in threading.enumerate() if t.name.startswith("load")]
