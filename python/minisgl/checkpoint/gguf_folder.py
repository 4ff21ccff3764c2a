"""Makes a model folder in Hugging Face's layout of a GGUF file. Imports no torch.

The folder has links to the weights, and config.json and the tokenizer's files made of the file's metadata. So only
`models/gguf_weights.py`, which reads the tensors, knows of the format. Folders are made once, in the user's cache.
"""

from __future__ import annotations

import glob
import json
import os
import re
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from minisgl.checkpoint.gguf_file import GgufTensor, gguf_package, read_gguf
from minisgl.core.errors import ConfigError

_PART: Final = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.IGNORECASE)

_SAME_NAMES: Final = (
    "Arcee Cohere2 Ernie4_5 Exaone4 Gemma Gemma2 Gemma3 Glm4 Granite Llama Nemotron Olmo2 Olmoe Phi3 Qwen2 Qwen2Moe "
    "Qwen3 Qwen3Moe SmolLM3 StableLm Starcoder2"
)
# `general.architecture` -> ours.
ARCHITECTURES: Final = {
    **{name.lower(): f"{name}ForCausalLM" for name in _SAME_NAMES.split()},
    "command-r": "CohereForCausalLM",
    "phi2": "PhiForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
}
PERMUTED: Final = ("arcee", "granite", "llama", "smollm3")  # rows of q and k are stored for interleaved RoPE
# Architectures with one scale of attention for all sizes but this number of layers.
WIDE_HEADS: Final = {"gemma2": 46, "gemma3": 62}

REQUIRED: Final = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
# Key below the architecture's name -> the fields of config.json, whose names depend on the family.
FIELDS: Final = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.causal": "is_causal",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps norm_epsilon norm_eps",
    "attention.scale": "attention_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale logits_scaling",
    "rope.freq_base_swa": "rope_local_base_freq",
    "use_parallel_residual": "use_parallel_residual",
    "expert_count": "num_local_experts num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
SCALING: Final = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# Other keys that `_config` reads, or that change nothing.
OTHERS: Final = re.compile(
    r"attention\.(key_length|sliding_window(_pattern)?)|rope\.(dimension_count|freq_base)|vocab_size|tensor_data_layout|"
    rf"rope\.scaling\.({'|'.join(SCALING)}|attn_factor|finetuned|type)"
)
BIASES: Final = ("attention_bias", "use_qkv_bias", "qkv_bias", "use_bias")  # names of one field


def gguf_files(path: Path) -> list[Path]:
    """Return the files of the model that the GGUF file `path` belongs to, or that the folder `path` has; [] if none.

    Raises `ConfigError` if there are several models, or if one is not complete.
    """
    if path.is_dir():
        files = [] if any(path.glob("*.safetensors")) else sorted(path.glob("*.gguf"))
    elif path.suffix.lower() == ".gguf" and path.is_file():
        pattern = _PART.sub(lambda m: f"{glob.escape(m[1])}-?????-of-{m[2]}.gguf", path.name)
        files = sorted(path.parent.glob(pattern)) if pattern != path.name else [path]
    else:
        files = []
    if len({gguf_name(file) for file in files}) > 1:
        raise ConfigError(f"{path} has several models; give one of {', '.join(file.name for file in files)}")
    if files and (match := _PART.fullmatch(files[0].name)) and len(files) != int(match[2]):
        raise ConfigError(f"{path} is of a set of {int(match[2])} files, of which there are {len(files)}")
    return files


def gguf_name(path: Path) -> str:
    """Return the name of the model in a GGUF file."""
    return _PART.sub(r"\1", path.name).removesuffix(".gguf")


def gguf_model_folder(files: list[Path]) -> Path:
    """Return the folder made of a model's GGUF files. It is made again if a file has changed.

    Raises `ConfigError` for a file that is broken or not supported.
    """
    code = [Path(__file__).with_name(f"gguf_{name}.py").read_bytes() for name in ("file", "folder", "tokenizer")]
    states = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minisgl" / "gguf"
    folder = base / blake2b(repr((code, states)).encode(), digest_size=16).hexdigest()
    if folder.exists():
        return folder
    contents = _contents(files)
    contents["config.json"]["gguf_files"] = states  # for the fingerprint of the model
    try:
        base.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=base, ignore_cleanup_errors=True) as unfinished:
            for name, content in contents.items():
                Path(unfinished, name).write_text(json.dumps(content), encoding="utf-8")
            for file in files:
                Path(unfinished, f"{file.stem}.gguf").symlink_to(file.resolve())
            Path(unfinished).rename(folder)
    except OSError as e:
        if not folder.exists():  # no other process was faster
            raise ConfigError(f"{base} cannot hold the files made of {files[0]} ({e}): set XDG_CACHE_HOME") from e
    return folder


def _contents(files: list[Path]) -> dict[str, Any]:
    """Return the files of the folder by name."""
    import numpy as np  # not before a command speaks

    from minisgl.checkpoint.gguf_tokenizer import tokenizer_files

    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for file in files:
        fields, found = read_gguf(file)
        metadata = fields | metadata
        tensors |= found
    for kind in {tensor.kind for tensor in tensors.values()}:
        try:  # the package knows the sizes of more types than it can read
            gguf_package().dequantize(np.zeros(gguf_package().GGML_QUANT_SIZES[kind][1], np.uint8), kind)
        except NotImplementedError:
            raise ConfigError(f"{files[0]} has tensors of the type {kind.name}, which is not supported") from None
    config = _config(files[0], metadata, tensors)
    return tokenizer_files(files[0], metadata) | {"config.json": config}


def _config(path: Path, metadata: dict[str, Any], tensors: dict[str, GgufTensor]) -> dict[str, Any]:
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"{path} has the architecture {arch!r:.40}, which is not supported; supported: {known}")
    given = {key.removeprefix(f"{arch}."): value for key, value in metadata.items() if key.startswith(f"{arch}.")}
    for key in REQUIRED:
        if not isinstance(given.get(key), int) or given[key] < 1:
            raise ConfigError(f"{path} has {arch}.{key}={given.get(key)!r:.60}; a positive integer is needed")
    if "token_embd.weight" not in tensors:
        raise ConfigError(f"{path} has no tensor token_embd.weight")
    heads, hidden = given["attention.head_count"], given["embedding_length"]
    head_dim = given.get("attention.key_length", hidden // heads)
    window, pattern = given.get("attention.sliding_window") or None, given.get("attention.sliding_window_pattern")
    for key, value in given.items():
        is_read = key in FIELDS or OTHERS.fullmatch(key) or (key == "attention.value_length" and value == head_dim)
        if value and not is_read:
            raise ConfigError(f"{path} has {arch}.{key}={value!r:.60}, which is not supported")
    architecture = ARCHITECTURES[arch]
    if given.get("expert_count") and arch == "llama":
        architecture = "MixtralForCausalLM"
    if window is not None and arch == "olmo2":
        architecture = "Olmo3ForCausalLM"
    kinds = {tensor.kind.name for tensor in tensors.values() if len(tensor.shape) > 1}
    config = {field: given[key] for key, fields in FIELDS.items() if key in given for field in fields.split()}
    config |= dict.fromkeys(BIASES, "blk.0.attn_q.bias" in tensors)
    config |= {
        "architectures": [architecture],
        "model_type": arch,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "head_dim": head_dim,
        "rope_theta": given.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(given, tensors),
        "partial_rotary_factor": given.get("rope.dimension_count", head_dim) / head_dim,
        "rope_interleave": arch in PERMUTED or None,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "norm_topk_prob": arch == "qwen3moe",
        "dtype": "float32" if kinds == {"F32"} else "float16" if kinds == {"F16"} else "bfloat16",
        "is_rounded": not kinds <= {"F32", "F16", "BF16"},
    }
    if arch in WIDE_HEADS:
        config["query_pre_attn_scalar"] = hidden / heads if given["block_count"] == WIDE_HEADS[arch] else head_dim
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if is_local else "full_attention" for is_local in pattern]
    elif pattern:
        config["sliding_window_pattern"] = pattern
    return {name: value for name, value in config.items() if value is not None} | {"sliding_window": window}


def _rope_scaling(given: dict[str, Any], tensors: dict[str, GgufTensor]) -> dict[str, Any] | None:
    """Return `rope_scaling` in config.json. Stored factors of frequencies are LongRoPE's, also those of Llama 3."""
    kind = given.get("rope.scaling.type", "none")
    scaling = {field: given[f"rope.scaling.{key}"] for key, field in SCALING.items() if f"rope.scaling.{key}" in given}
    factors = tensors.get("rope_freqs.weight") or tensors.get("rope_factors_short.weight")
    if factors is None:
        return None if kind == "none" else {"rope_type": kind, **scaling}
    return {
        "rope_type": "longrope",
        "short_factor": gguf_package().dequantize(factors.data.copy(), factors.kind).tolist(),
        "original_max_position_embeddings": scaling.get("original_max_position_embeddings", given["context_length"]),
        "attention_factor": given.get("rope.scaling.attn_factor", 1.0),
    }
