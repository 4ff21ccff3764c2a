"""Writes the model in Hugging Face's layout (bf16), and checks that transformers computes the same logits.

python -m training.export --checkpoint build/demo/checkpoint.pt --tokenizer build/tokenizer --out build/demo/model
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from training.model import Model, Shape
from training.tokenizer import END_OF_TEXT, IM_END

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def config(shape: Shape) -> dict[str, Any]:
    """``config.json``."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def tensors(model: Model) -> dict[str, Tensor]:
    """The weights under Hugging Face's names."""
    names = {
        "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
        "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    }  # fmt: skip
    result = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    for ours, theirs in names.items():
        stack: Tensor = getattr(model, ours)
        for i in range(model.shape.layers):
            result[f"model.layers.{i}.{theirs}.weight"] = stack[i]
    return {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in result.items()}


def export(model: Model, tokenizer: Path, out: Path) -> None:
    """Writes everything that ``AutoModelForCausalLM`` and ``AutoTokenizer`` read."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors(model), out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(config(model.shape), indent=2) + "\n")
    generation = {"eos_token_id": [IM_END, END_OF_TEXT], "pad_token_id": END_OF_TEXT, "do_sample": False}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if tokenizer.resolve() != out.resolve():
        for name in TOKENIZER_FILES:
            shutil.copyfile(tokenizer / name, out / name)


def compare(model: Model, folder: Path) -> float:
    """Largest difference of our logits and transformers' on random ids, both in fp32, over the largest logit."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rounded = Model(model.shape)
    rounded.load_state_dict({name: t.to("cpu", torch.bfloat16).float() for name, t in model.state_dict().items()})
    ids = torch.randint(0, model.shape.vocab, (200,))
    with torch.no_grad():
        ours = rounded(ids, torch.arange(200), torch.tensor([0, 200], dtype=torch.int32)) @ rounded.embed.T
        expected = theirs(ids[None]).logits[0]
    return float((ours - expected).abs().max() / expected.abs().max())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = Model(Shape())
    model.load_state_dict(torch.load(args.checkpoint, map_location="cpu"))
    export(model, args.tokenizer, args.out)
    difference = compare(model, args.out)
    print(f"largest relative difference from transformers: {difference:.2e}")
    if difference > 1e-4:
        raise SystemExit("the exported model does not agree")


if __name__ == "__main__":
    main()
