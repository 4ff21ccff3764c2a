"""Writes the model in Hugging Face's layout (bf16), and checks that transformers computes the same logits.

python -m training.export --checkpoint build/demo/checkpoint.pt --tokenizer build/tokenizer --out build/demo/model
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.model import Model, Shape
from training.tokenizer import END_OF_TEXT, IM_END

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SIZES = {
    "vocab": "vocab_size", "hidden": "hidden_size", "intermediate": "intermediate_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "context": "max_position_embeddings", "eps": "rms_norm_eps", "theta": "rope_theta",
}  # fmt: skip


def config(shape: Shape) -> dict[str, Any]:
    """``config.json``."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **{name: getattr(shape, field) for field, name in SIZES.items()},
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


def parts(model: Model) -> dict[str, Tensor]:
    """The weights under Hugging Face's names, as views of the parameters."""
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
    return {name: t.detach() for name, t in result.items()}


def save(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Writes ``model.safetensors``; what is not an integer becomes bf16."""
    file = folder / "model.safetensors"
    stored = {name: t.to("cpu", torch.bfloat16 if t.is_floating_point() else None) for name, t in weights.items()}
    save_file({name: t.contiguous() for name, t in stored.items()}, file, metadata={"format": "pt"})
    file.chmod(0o644)


def load(folder: Path) -> Model:
    """The model that ``export`` wrote."""
    c = json.loads((folder / "config.json").read_text())
    model = Model(Shape(**{field: c[name] for field, name in SIZES.items()}))
    stored = load_file(folder / "model.safetensors")
    for name, part in parts(model).items():
        part.copy_(stored[name])
    return model


def export(model: Model, tokenizer: Path, out: Path) -> None:
    """Writes everything that ``AutoModelForCausalLM`` and ``AutoTokenizer`` read."""
    out.mkdir(parents=True, exist_ok=True)
    save(parts(model), out)
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
