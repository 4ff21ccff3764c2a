"""The text part of multimodal checkpoints, against transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    LlavaConfig,
    Mistral3Config,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from contract.checkpoints import COMMON
from contract.harness import CPU, MiniEngine, Span
from contract.test_parity import assert_equal
from minisgl.checkpoint import hf
from minisgl.core.errors import ConfigError
from minisgl.models.model_config import ModelConfig
from minisgl.models.quantize import quantize
from minisgl.tools.verify.checks import reference

IDS = [(7 * i * i + 3 * i) % 150 for i in range(70)]
GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
PIXTRAL |= {"num_attention_heads": 4, "image_size": 32, "patch_size": 16}
SIGLIP = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
SIGLIP |= {"image_size": 32, "patch_size": 16}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "out_hidden_size": 64}
SECTIONS = {"mrope_section": [2, 3, 3]}
CONFIGS: dict[str, Any] = {
    "gemma3": Gemma3Config(
        text_config={**COMMON, **GQA, "head_dim": 32, "sliding_window": 17, "num_hidden_layers": 6},
        vision_config=SIGLIP,
        mm_tokens_per_image=4,
        image_token_index=159,
    ),
    "mistral3": Mistral3Config(
        text_config={**COMMON, **GQA, "model_type": "mistral", "head_dim": 16, "sliding_window": None},
        vision_config=PIXTRAL,
        tie_word_embeddings=False,
        image_token_index=159,
    ),
    "llava": LlavaConfig(
        text_config={**COMMON, **GQA, "model_type": "qwen2"},
        vision_config={**SIGLIP, "model_type": "siglip_vision_model"},
        image_token_index=159,
    ),
    "qwen2-vl": Qwen2VLConfig(
        text_config={**COMMON, **GQA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **SECTIONS}},
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 4},
    ),
    "qwen2.5-vl": Qwen2_5_VLConfig(
        text_config={**COMMON, **GQA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **SECTIONS}},
        vision_config={**QWEN_VISION, "fullatt_block_indexes": [0]},
        tie_word_embeddings=False,
    ),
    "qwen3-vl": Qwen3VLConfig(
        text_config={
            **COMMON,
            **GQA,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True, **SECTIONS},
        },
        vision_config={**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
}


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
CONFIGS["gemma4"] = Gemma4Config(
    text_config={
        **COMMON,
        **GQA,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 17,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 160,
    },
    vision_config={**VISION, "num_key_value_heads": 2, "position_embedding_size": 64},
    audio_config=None,
    image_token_id=159,
    video_token_id=158,
    audio_token_id=157,
)
CONFIGS["qwen3-vl-moe"] = Qwen3VLMoeConfig(
    text_config={
        **COMMON,
        **GQA,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True, **SECTIONS},
    },
    vision_config={**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
)


@pytest.fixture(params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A random model in a folder, and its logits [tokens, V] of a text."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[request.param], attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        logits = model(input_ids=torch.tensor([IDS])).logits[0]
    model.save_pretrained(tmp_path)
    return tmp_path, logits


def check(folder: Path, want: torch.Tensor) -> None:
    engine = MiniEngine.load(folder)
    assert_equal(engine.step([Span(0, 0, IDS[:60])]), want[59:60])
    for i in range(60, 64):
        assert_equal(engine.step([Span(0, i, [IDS[i]])]), want[i : i + 1])


def test_text_parts_agree_with_transformers(
    checkpoint: tuple[Path, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check(*checkpoint)
    folder, want = checkpoint
    assert_equal(reference(folder, [IDS], torch.float32, CPU).logits[0], want)  # of `minisgl verify`
    (line,) = [record.getMessage() for record in caplog.records if "text part" in record.getMessage()]
    assert "vis" in line


def test_names_and_configurations_of_older_checkpoints(checkpoint: tuple[Path, torch.Tensor]) -> None:
    """`language_model.model.` in the names of tensors; or all fields of the text part at the top."""
    folder, want = checkpoint
    tensors = load_file(folder / "model.safetensors")
    names = ("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")
    if any(name.startswith("language_model.model.") for name in tensors):  # transformers has written the older names
        names = tuple((new, old) for old, new in names)
    other = {name.replace(*names[0]).replace(*names[1]): tensor for name, tensor in tensors.items()}
    assert other.keys() != tensors.keys()
    save_file(other, folder / "model.safetensors", {"format": "pt"})
    check(folder, want)
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"].startswith("qwen2"):
        flat = config.pop("text_config") | config
        flat["rope_scaling"] = {"type": "mrope", **SECTIONS}
        flat["rope_theta"] = flat.pop("rope_parameters")["rope_theta"]
        (folder / "config.json").write_text(json.dumps(flat))
        check(folder, want)


@pytest.mark.parametrize("checkpoint", ["mistral3"], indirect=True)
def test_quantize_writes_the_text_part_as_a_model_of_its_own(checkpoint: tuple[Path, torch.Tensor]) -> None:
    folder, want = checkpoint
    target = folder / "int8"
    quantize(str(folder), target, "int8")
    config = hf.load_config(target)
    assert config["architectures"] == ["MistralForCausalLM"] and "vision_config" not in config
    assert {name.split(".")[0] for name in load_file(target / "model.safetensors")} == {"model", "lm_head"}
    got = MiniEngine.load(target).step([Span(0, 0, IDS)])[0]
    assert float((got - want[-1]).norm() / want[-1].norm()) < 0.1


def test_gemma_leaves_out_what_transformers_defaults_to(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    whole |= {"vision_config": {}, "eos_token_id": [1, 106], "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = ModelConfig.from_hf(hf.load_config(tmp_path))
    assert config.architecture == "Gemma3ForCausalLM" and config.is_text_part and config.tie_word_embeddings
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert config.windows[4:6] == (1024, None) and config.max_position_embeddings == 131072
    assert config.dtype == "bfloat16" and hf.load_config(tmp_path)["eos_token_id"] == [1, 106]


@pytest.mark.parametrize(("kind", "sizes"), [("llama", (11008, 32, 32)), ("mistral", (14336, 32, 8))])
def test_llava_leaves_out_sizes(kind: str, sizes: tuple[int, int, int], tmp_path: Path) -> None:
    """The files of llava-1.5-7b-hf and llava-v1.6-mistral-7b-hf have only fields that differ from the defaults."""
    text = {"model_type": kind, "architectures": [f"{kind.title()}ForCausalLM"], "rms_norm_eps": 1e-05}
    text |= {"vocab_size": 32064, "max_position_embeddings": 4096}
    whole = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    config = ModelConfig.from_hf(hf.load_config(tmp_path))
    assert (config.intermediate_size, config.num_heads, config.num_kv_heads) == sizes
    assert (config.vocab_size, config.hidden_size, config.num_layers, config.head_dim) == (32064, 4096, 32, 128)
    assert config.max_position_embeddings == 4096
    with pytest.raises(ConfigError, match="hidden_size"):  # required of a text model
        ModelConfig.from_hf(text)


@pytest.mark.parametrize("kind", ["gemma3n_text", "new_text", None])
def test_other_text_parts_are_refused_by_name(tmp_path: Path, kind: str | None) -> None:
    whole = {"architectures": ["NewForConditionalGeneration"], "text_config": {"model_type": kind}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ConfigError, match=f"the text part of NewForConditionalGeneration is a {kind!r}, which"):
        ModelConfig.from_hf(hf.load_config(tmp_path))
