"""Writes small GGUF files of checkpoints in Hugging Face's layout, as llama.cpp's converter does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from safetensors.torch import load_file

PERMUTED = ("arcee", "granite", "llama", "smollm3")
ONE_MORE = ("gemma", "gemma2", "gemma3", "nemotron")  # norms are stored with 1 added
# Fields of config.json -> methods of GGUFWriter.
WRITERS = {
    "max_position_embeddings": "add_context_length",
    "hidden_size": "add_embedding_length",
    "num_hidden_layers": "add_block_count",
    "intermediate_size": "add_feed_forward_length",
    "num_attention_heads": "add_head_count",
    "num_key_value_heads": "add_head_count_kv",
    "head_dim": "add_key_length",
    "rms_norm_eps": "add_layer_norm_rms_eps",
    "layer_norm_eps": "add_layer_norm_eps",
    "norm_epsilon": "add_layer_norm_eps",
    "norm_eps": "add_layer_norm_eps",
    "sliding_window": "add_sliding_window",
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "final_logit_softcapping": "add_final_logit_softcapping",
    "attention_multiplier": "add_attention_scale",
    "embedding_multiplier": "add_embedding_scale",
    "residual_multiplier": "add_residual_scale",
    "logits_scaling": "add_logit_scale",
    "logit_scale": "add_logit_scale",
    "num_experts": "add_expert_count",
    "num_local_experts": "add_expert_count",
    "num_experts_per_tok": "add_expert_used_count",
    "moe_intermediate_size": "add_expert_feed_forward_length",
    "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
}


def vocabulary(size: int) -> dict[str, list[Any]]:
    """A SentencePiece vocabulary with single characters."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(size - 60)), "\u2581", "a", "b", "ab", "\u2581ab"]
    tokens += [chr(0x4E00 + i) for i in range(size - len(tokens))]
    types = [2, 3, 3, *[6] * (size - 60), *[1] * (57)]
    return {"tokens": tokens, "scores": [-float(i) for i in range(size)], "token_types": types}


def rope_factors(rope: dict[str, Any], dim: int) -> torch.Tensor:
    """The divisors of Llama 3's frequencies."""
    lengths = 2 * torch.pi * rope["rope_theta"] ** (torch.arange(0, dim, 2) / dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((rope["original_max_position_embeddings"] / lengths - low) / (high - low)).clip(0, 1)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


def write_gguf(path: Path, folder: Path, arch: str, kind: Kind = Kind.F32, **options: Any) -> Path:
    """Write the model in `folder` to `path`, with matrices in `kind`. `options` are those of GGUFWriter."""
    path.parent.mkdir(exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, arch, **options)
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for field, method in WRITERS.items():
        if config.get(field) is not None:
            getattr(writer, method)(config[field])
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1)))
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(rope, dim).numpy())
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 256))
    if arch == "gemma3":
        writer.add_sliding_window_pattern(3)
    if arch == "qwen3moe":
        assert config["norm_topk_prob"]
    vocab = vocabulary(config["vocab_size"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list(vocab["tokens"])
    writer.add_token_scores(vocab["scores"])
    writer.add_token_types(vocab["token_types"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    _add_tensors(writer, load_file(folder / "model.safetensors"), config, arch, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensors(
    writer: GGUFWriter, tensors: dict[str, torch.Tensor], config: dict[str, Any], arch: str, kind: Kind
) -> None:
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    experts: dict[str, dict[int, torch.Tensor]] = {}
    heads = {
        "q": config["num_attention_heads"],
        "k": config.get("num_key_value_heads") or config["num_attention_heads"],
    }
    for name, tensor in tensors.items():
        if config.get("tie_word_embeddings") and name == "lm_head.weight":
            continue
        value = tensor.float()
        if arch in PERMUTED and (match := re.search(r"\.([qk])_proj\.", name)):
            halves = value.reshape(heads[match[1]], 2, -1, *value.shape[1:])
            value = halves.transpose(1, 2).reshape(value.shape)
        if arch in ONE_MORE and name.endswith("norm.weight"):
            value = value + 1
        if match := re.search(r"\.experts\.(\d+)\.", name):
            merged = name.replace(match[0], ".experts.")
            experts.setdefault(merged, {})[int(match[1])] = value
        else:
            _add(writer, names.get_name(name, (".weight", ".bias")), value, kind)
    for name, parts in experts.items():
        stacked = torch.stack([parts[i] for i in range(len(parts))])
        _add(writer, names.get_name(name, (".weight",)), stacked, kind)


def _add(writer: GGUFWriter, name: str, value: torch.Tensor, kind: Kind) -> None:
    assert name is not None
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if value.dim() == 1 or value.shape[-1] % block:
        kind = Kind.F32
    writer.add_tensor(name, gguf.quantize(value.contiguous().numpy(), kind), raw_dtype=kind)
