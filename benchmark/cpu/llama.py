"""llama.cpp through the C interface that llama-cpp-python wraps, and a writer of GGUF files for Qwen3 checkpoints."""

from __future__ import annotations

import ctypes
import json
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from engines import CONTEXT, Run

SLOTS = 16
BATCH = 2048  # tokens of a call; its default
NAMES = {  # Hugging Face's names -> GGUF's, without layer and ".weight"
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


def missing_for_llama(config: dict[str, Any]) -> str | None:
    """Why llama.cpp cannot run a checkpoint with this config.json here; None if it can."""
    if config["architectures"] != ["Qwen3ForCausalLM"]:
        return "only dense Qwen3 shapes are converted"
    try:
        import gguf  # noqa: F401
        import llama_cpp  # noqa: F401
    except ImportError as e:
        return f"{e}: pip install llama-cpp-python gguf (compiles it, with cmake)"
    return None


QUANTIZED = {"Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0", "Q4_K_M": "LLAMA_FTYPE_MOSTLY_Q4_K_M"}  # by llama.cpp itself


def write_gguf(folder: Path, kind: str) -> Path:
    """Write the dense Qwen3 checkpoint in `folder` as GGUF beside it.

    Matrices have type `kind` ("F32", "BF16", "Q8_0"), or the types that llama.cpp takes for it ("Q4_0", "Q4_K_M").
    """
    if kind in QUANTIZED:
        return _quantize(write_gguf(folder, "BF16"), folder / f"{kind}.gguf", QUANTIZED[kind])
    import gguf
    from safetensors.torch import load_file

    path = folder / f"{kind}.gguf"
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    types = gguf.GGMLQuantizationType
    for part in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(part).items():
            wanted = types[kind] if tensor.dim() == 2 else types.F32
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(tensor.float().numpy(), wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@cache
def _library() -> tuple[Any, Any]:
    """llama.cpp's functions, and the callback that drops its log, which must stay alive."""
    import llama_cpp as c

    log = c.llama_log_callback(lambda level, text, data: None)
    c.llama_log_set(log, None)
    c.llama_backend_init()
    return c, log


def _quantize(source: Path, target: Path, type_name: str) -> Path:
    c, _ = _library()
    params = c.llama_model_quantize_default_params()
    params.ftype = getattr(c, type_name)
    status = c.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    assert status == 0, f"llama_model_quantize: {status}"
    return target


def gguf_name(name: str) -> str:
    match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.+)\.weight", name)
    assert match is not None, f"{name} is not a weight"
    layer, rest = match.groups()
    return f"blk.{layer}.{NAMES[rest]}.weight" if layer else f"{NAMES[rest]}.weight"


class LlamaCpp:
    """16 slots, each of which takes the next request when one has ended, as in llama.cpp's server.

    Prompts and decoding share one call. Tokens are sampled by numpy's argmax.
    """

    def __init__(self, path: Path, threads: int) -> None:
        self.name = f"llama.cpp, {path.stem}"
        c, _ = _library()
        self._c = c
        self._model = c.llama_model_load_from_file(str(path).encode(), c.llama_model_default_params())
        params = c.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = SLOTS * CONTEXT, SLOTS, BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = c.llama_init_from_model(self._model, params)
        assert self._model and self._context, f"llama.cpp does not load {path}"
        self._vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))
        self._batch = c.llama_batch_init(BATCH, 0, 1)

    def run(self, prompts: list[list[int]], lengths: list[int]) -> Run:
        memory = self._c.llama_get_memory(self._context)
        self._c.llama_memory_clear(memory, True)
        start, first = time.perf_counter(), 0.0
        waiting = list(zip(prompts, lengths, strict=True))[::-1]
        remaining = [0] * SLOTS  # tokens to generate, of each slot
        last = [0] * SLOTS  # newest token
        length = [0] * SLOTS  # computed tokens
        while waiting or any(remaining):
            sampled: list[tuple[int, int]] = []  # slot, index in the batch
            size = 0
            for slot in range(SLOTS):
                if remaining[slot]:
                    ids = [last[slot]]
                elif waiting and size + len(waiting[-1][0]) + SLOTS <= BATCH:
                    ids, remaining[slot] = waiting.pop()
                    self._c.llama_memory_seq_rm(memory, slot, -1, -1)
                    length[slot] = 0
                else:
                    continue
                self._put(size, ids, slot, length[slot])
                size, length[slot] = size + len(ids), length[slot] + len(ids)
                sampled.append((slot, size - 1))
            self._batch.n_tokens = size
            status = self._c.llama_decode(self._context, self._batch)
            assert status == 0, f"llama_decode: {status}"
            for slot, index in sampled:
                last[slot] = int(self.logits(index).argmax())
                remaining[slot] -= 1
            if not waiting and not first:
                first = time.perf_counter()
        return Run(time.perf_counter() - start, first - start)

    def logits(self, index: int) -> npt.NDArray[np.float32]:
        """Logits [V] float32 after token `index` of the last call; a view that the next call overwrites."""
        values = self._c.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(ctypes.cast(values, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,))

    def _put(self, start: int, ids: list[int], slot: int, position: int) -> None:
        """Put `ids` into the batch from index `start` on; the last token gets logits."""
        batch = self._batch
        for i, token in enumerate(ids):
            index = start + i
            batch.token[index] = token
            batch.pos[index] = position + i
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = slot
            batch.logits[index] = i == len(ids) - 1
