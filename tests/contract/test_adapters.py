"""Adapters beside the base in one step give the logits of models that have them alone: changed by us, and by PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from contract.checkpoints import Checkpoint, configurations, save
from contract.harness import MiniEngine, Span
from contract.test_parity import A, B, C, assert_equal
from minisgl.checkpoint.adapter import WEIGHTS, make_adapter
from minisgl.core.layout import adapter_load
from minisgl.distributed.communicator import Communicator
from minisgl.layers.adapters import AdapterSizes
from minisgl.models.weight import full_name
from support.ranks import run_ranks

SIZES = AdapterSizes(slots=3, hosted=2, rank=16)
FAMILIES = [
    "llama-linear-biases",
    "qwen3-moe-one-dense-layer",
    "gemma3",
    "gemma4-shared",
    "phi3",
    "glm4",
    "qwen3.5",
    "deepseek-v2",
    "olmoe",
]
STEPS = [
    [Span(1, 0, A[:50]), Span(2, 0, B), Span(3, 0, C[:20], samples=False), Span(4, 0, A[:50])],
    [Span(1, 50, [A[50]]), Span(3, 20, C[20:]), Span(4, 50, A[50:])],
]
WANTED = [[(1, A[:50]), (2, B), (4, A[:50])], [(1, A[:51]), (3, C), (4, A)]]
SLOTS = {1: 0, 2: 1, 3: 2, 4: 3}  # of rows


def check(checkpoint: Checkpoint, folders: list[Path], logits_of: Any) -> None:
    """A mixed step and one that goes on, on 1 and 2 ranks; `logits_of(slot, ids)` are the right logits."""
    want = [torch.cat([logits_of(SLOTS[row], ids)[-1:] for row, ids in step]) for step in WANTED]

    def rank(comm: Communicator) -> list[Tensor]:
        engine = MiniEngine.load(checkpoint.folder, comm=comm, adapters=SIZES)
        for slot, folder in enumerate(folders, 1):
            engine.parts.adapters.start(adapter_load(slot, make_adapter(f"a{slot}", folder).source))
        engine.parts.state.adapter[list(SLOTS)] = torch.tensor(list(SLOTS.values()), dtype=torch.int32)
        return [engine.step(spans) for spans in STEPS]

    for size in (1, 2):
        for logits in run_ranks(size, rank):
            for ours, theirs in zip(logits, want, strict=True):
                assert_equal(ours, theirs)


# What the three adapters of a model have besides rank, alpha and targets; the rank and alpha of a module are below.
KINDS: list[dict[str, Any]] = [
    {"r": 4},
    {"r": 15, "use_rslora": True, "lora_bias": True},
    {"r": 7, "rank_pattern": {r"layers\.1\..*": 3}, "alpha_pattern": {"o_proj": 5.0}},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_changed_modules(tmp_path: Path, family: str):
    """All modules that an adapter may change, with ranks, scales and biases that differ."""
    checkpoint = save(tmp_path / "base", configurations()[family])
    modules = {full_name(name): m for name, m in checkpoint.model.named_modules() if isinstance(m, torch.nn.Linear)}
    adapted = MiniEngine.load(checkpoint.folder, adapters=SIZES).model.adapted
    shapes = {name: shape for projection in adapted for name, shape in projection.modules.items()}
    assert all(tuple(modules[name].weight.shape) == shape for name, shape in shapes.items())
    deltas: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
    folders, active = [], 0
    for slot, kind in enumerate(KINDS, 1):
        tensors = {}
        for name, (rows, columns) in shapes.items():
            rank = 3 if slot == 3 and "layers.1." in name else kind["r"]
            scale = (5 if slot == 3 and name.endswith("o_proj") else 12) / (rank**0.5 if slot == 2 else rank)
            a, b, bias = torch.randn(rank, columns) * 0.2, torch.randn(rows, rank) * 0.1, torch.randn(rows) * 0.1
            deltas[name, slot] = scale * (b @ a), scale * bias * (slot == 2)
            key, middle = f"base_model.model.{name}", ".default" * (slot == 3)
            tensors |= {f"{key}.lora_A{middle}.weight": a, f"{key}.lora_B{middle}.weight": b}
            tensors |= {f"{key}.lora_B.bias": bias} if slot == 2 else {}
        config = {"peft_type": "LORA", "lora_alpha": 12, "target_modules": "all-linear", **kind}
        folders.append(write(tmp_path / str(slot), config, tensors))
    for name in shapes:

        def changed(module: Any, args: tuple[Tensor], out: Tensor, name: str = name) -> Tensor:
            return F.linear(args[0], deltas[name, active][0], deltas[name, active][1]).add_(out) if active else out

        modules[name].register_forward_hook(changed)

    def logits_of(slot: int, ids: list[int]) -> Tensor:
        nonlocal active
        active = slot
        return checkpoint.logits(ids)

    check(checkpoint, folders, logits_of)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


# Three adapters of a family, as PEFT's options.
OPTIONS = [
    {"target_modules": ["q_proj", "o_proj", "qkv_proj", "down_proj", "lm_head"], "r": 4, "lora_alpha": 9},
    {"target_modules": "all-linear", "r": 3, "use_rslora": True, "lora_bias": True, "lora_alpha": 2},
    {
        "target_modules": r".*\.\d+\.(self_attn|mlp|mlp\.shared_expert)\.(k|v|qkv|o|gate|up|gate_up)_proj",
        "rank_pattern": {"self_attn.o_proj": 9, r"^model\.layers\.1\.mlp.*": 2},
        "alpha_pattern": {"gate_proj": 3},
        "exclude_modules": ["layers.2.self_attn.o_proj"],
    },
]


@pytest.mark.filterwarnings("ignore")  # of PEFT about deprecated names, and about a head that is tied
@pytest.mark.parametrize("family", ["llama-gqa-llama3-untied", "qwen2-moe", "phi3", "glm"])
def test_equal_peft(tmp_path: Path, family: str):
    peft = pytest.importorskip("peft")
    checkpoint = save(tmp_path / "base", configurations()[family])
    configs = [peft.LoraConfig(init_lora_weights=False, **options) for options in OPTIONS]
    model = peft.get_peft_model(checkpoint.model, configs[0], adapter_name="a1")
    for slot in (2, 3):
        model.add_adapter(f"a{slot}", configs[slot - 1])
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    changed = {name for slot in (1, 2, 3) for name in load_file(tmp_path / f"a{slot}" / WEIGHTS)}
    adapted = {n for p in MiniEngine.load(checkpoint.folder, adapters=SIZES).model.adapted for n in p.modules}
    assert {f"base_model.model.{n}.lora_{h}.weight" for n in adapted for h in "AB"} <= changed, "all are compared"

    def logits_of(slot: int, ids: list[int]) -> Tensor:
        if slot == 0:
            with model.disable_adapter():
                return checkpoint.logits(ids)
        model.set_adapter(f"a{slot}")
        return checkpoint.logits(ids)

    check(checkpoint, [tmp_path / f"a{slot}" for slot in (1, 2, 3)], logits_of)
