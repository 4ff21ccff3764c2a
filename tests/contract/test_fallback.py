"""Decoders that transformers computes on our pages: logits equal its own, and what cannot be right is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    DeepseekV32Config,
    DiffLlamaConfig,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    JetMoeConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MptConfig,
    OPTConfig,
    RobertaConfig,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from contract.checkpoints import COMMON, GEMMA_2, Checkpoint, save
from contract.harness import MiniEngine, Span
from contract.test_parity import A, B, C, assert_equal, check_decoding
from minisgl import LLM, SamplingParams
from minisgl.checkpoint import hf
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.core.errors import ConfigError
from minisgl.core.specs import GroupedQuery
from minisgl.engine import fit
from minisgl.models.fallback import TOLERANCES
from minisgl.models.model_config import ModelConfig, fallback_config
from minisgl.settings.options import EngineConfig
from support.embedding_models import write_modules

IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
PLAIN: dict[str, Any] = {**COMMON, **HEADS, **IDS}
GPT2: dict[str, Any] = {"vocab_size": 160, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
LATENT: dict[str, Any] = {
    **(PLAIN | {"num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 32}),
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
MODELS: dict[str, Any] = {
    "gpt-neox": GPTNeoXConfig(**COMMON, num_attention_heads=4, rotary_pct=0.5),
    "gpt2, learned positions": GPT2Config(**GPT2, initializer_range=0.15),
    "opt, learned positions from 2 on": OPTConfig(
        vocab_size=160,
        hidden_size=64,
        num_hidden_layers=2,
        ffn_dim=96,
        init_std=0.15,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        max_position_embeddings=256,
    ),
    "deepseek-v3, v smaller than q": DeepseekV3Config(**LATENT),
    "jetmoe, an expert for each head": JetMoeConfig(
        **(COMMON | {"num_key_value_heads": 2, "kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ),
    "gemma2, windows and soft caps": Gemma2Config(**GEMMA_2, attn_logit_softcapping=3.0, final_logit_softcapping=4.0),
    "gpt-oss, windows and sinks": GptOssConfig(
        **(PLAIN | {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
        head_dim=16,
        sliding_window=29,
    ),
    "llama": LlamaConfig(**PLAIN),
}


def load(folder: Path, **options: Any) -> MiniEngine:
    return MiniEngine.load(folder, config=fallback_config(hf.load_config(folder)), **options)


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return save(tmp_path_factory.mktemp("model"), MODELS[request.param])


@pytest.mark.parametrize(("page_size", "attention"), [(16, "cpu"), (1, "reference")])
def test_prefill_and_decode(checkpoint: Checkpoint, page_size: int, attention: str):
    check_decoding(load(checkpoint.folder, page_size=page_size, attention=attention), checkpoint)


@pytest.mark.parametrize("chunk", [1, 33])
def test_chunked_prefill(checkpoint: Checkpoint, chunk: int):
    engine, want = load(checkpoint.folder), checkpoint.logits(A)
    for start in range(0, len(A), chunk):
        stop = min(start + chunk, len(A))
        assert_equal(engine.step([Span(0, start, A[start:stop])]), want[stop - 1 : stop])


def test_after_a_prefix_hit_and_in_a_mixed_batch(checkpoint: Checkpoint):
    engine = load(checkpoint.folder)
    engine.step([Span(3, 0, A), Span(1, 0, A[:50]), Span(7, 0, C[:20], samples=False)])
    engine.share_prefix(3, 5, 64)
    spans = [Span(1, 50, [A[50]]), Span(4, 0, B), Span(0, 0, A[:30], samples=False), Span(7, 20, C[20:])]
    want = torch.cat([checkpoint.logits(ids)[-1:] for ids in (A[:51], B, C, A[:64] + B)])
    assert_equal(engine.step([*spans, Span(5, 64, B)]), want)
    assert engine.step([Span(2, 0, A, samples=False)]).shape == (0, 160)


def test_to_the_last_position(checkpoint: Checkpoint):
    engine, ids = load(checkpoint.folder), (A + B + C) * 2
    want = checkpoint.logits(ids[:256])
    assert_equal(engine.step([Span(0, 0, ids[:250])]), want[249:250])
    assert_equal(engine.step([Span(0, 250, ids[250:256])]), want[255:])


def test_bfloat16_is_close(checkpoint: Checkpoint):
    engine, want = load(checkpoint.folder, dtype=torch.bfloat16), checkpoint.logits(A)[-1:]
    ours = engine.step([Span(0, 0, A)])
    assert ours.dtype is torch.bfloat16
    assert (ours.float() - want).norm() <= 0.2 * want.norm()


def test_layers_are_seen_from_their_calls(tmp_path: Path):
    save(tmp_path, MODELS["gpt-oss, windows and sinks"])
    engine = load(tmp_path)
    kinds = [replace(GroupedQuery(4, 2, 64, 0.25, has_sinks=True), window=window) for window in (29, None)]
    assert list(engine.model.mixers) == kinds  # heads of 16 are padded
    assert len(engine.model.states) == 2
    assert engine.model.num_parameters == sum(
        p.numel() for p in Checkpoint(tmp_path, engine.model._model).model.parameters()
    )


def test_random_weights(tmp_path: Path):
    config = MODELS["gpt-neox"]
    save(tmp_path, config)
    (tmp_path / "model.safetensors").unlink()
    first, second = (load(tmp_path, dummy=True).step([Span(0, 0, A)]) for _ in range(2))
    assert torch.equal(first, second) and first.std() > 0


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """With the built-in model's tokenizer."""
    return save_with_tokenizer(tmp_path_factory.mktemp("neox"))


def save_with_tokenizer(folder: Path) -> Checkpoint:
    size = json.loads((BUILTIN_MODEL / "config.json").read_text())["vocab_size"]
    config = GPTNeoXConfig(**(COMMON | {"vocab_size": size}), num_attention_heads=4, bos_token_id=1, eos_token_id=2)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUILTIN_MODEL / name, folder)
    return save(folder, config)


def generated(model: Any, ids: list[int], count: int) -> list[int]:
    """The likeliest tokens, each by a whole prompt."""
    tokens = [*ids]
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(ids) :]


OPTIONS: dict[str, Any] = {"model_impl": "transformers", "device": "cpu", "threads": 1}


@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_preemption_overlap_and_drafts_do_not_change_the_text(neox: Checkpoint, speculate: str):
    prompts = [A[:40], B, C[:30], A[:40] + B[:9]]
    with LLM(neox.folder, **OPTIONS, num_pages=13, overlap=True, max_prefill_length=32, speculate=speculate) as llm:
        llm.scheduler.prefill.growth.fraction = 0.0  # admit every request
        done = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        assert llm.scheduler.stats.preemptions > 0
    for ids, one in zip(prompts, done, strict=True):
        assert one.token_ids == generated(neox.model, ids, 60)


def test_logprobs_of_the_prompt_and_choices(neox: Checkpoint):
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=5, n=2, logprobs=0, prompt_logprobs=True, ignore_eos=True
    )
    with LLM(neox.folder, **OPTIONS, num_pages=100) as llm:
        (done,) = llm.generate([B], params)
    one, two = done.outputs
    assert one.token_ids != two.token_ids
    want = neox.logits(B + one.token_ids).log_softmax(-1)
    ours = [x.logprob for x in one.prompt_logprobs[1:] + one.logprobs]
    assert ours == pytest.approx([float(want[i, t]) for i, t in enumerate([*B[1:], *one.token_ids])], abs=1e-4)


REFUSED: dict[str, tuple[Any, str]] = {
    "ALiBi": (BloomConfig(vocab_size=160, hidden_size=64, n_layer=2, n_head=4, seq_length=256), "no layer attends thr"),
    "ALiBi of MPT": (MptConfig(vocab_size=160, d_model=64, n_layers=2, n_heads=4, max_seq_len=256), "no layer attends"),
    "a model without attention": (
        MambaConfig(vocab_size=160, hidden_size=64, num_hidden_layers=2, state_size=8, max_position_embeddings=256),
        "no layer attends",
    ),
    "attention outside of the interface": (
        FalconConfig(vocab_size=160, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
        "no layer attends",
    ),
    "a convolution": (
        Lfm2Config(**PLAIN, layer_types=["conv", "full_attention", "conv"]),
        "something besides attention mixes tokens, such as a recurrence or a convolution",
    ),
    "positions of its own": (
        BartConfig(
            vocab_size=160,
            d_model=64,
            decoder_layers=2,
            decoder_ffn_dim=96,
            decoder_attention_heads=4,
            max_position_embeddings=256,
        ),
        "do not follow from this token and the position",
    ),
    "positions after padding": (
        RobertaConfig(**(PLAIN | {"pad_token_id": 1}), is_decoder=True),
        "do not follow from this token and the position",
    ),
    "attention to later tokens": (BertConfig(**PLAIN, is_decoder=False), "masks are not those of causal attention"),
    "chunked attention": (
        Llama4TextConfig(**PLAIN, head_dim=16, intermediate_size_mlp=96, num_local_experts=4, attention_chunk_size=64),
        "masks are not those of causal attention",
    ),
    "a layer that attends twice": (DiffLlamaConfig(**PLAIN), "a layer attends more than once, or not in every step"),
    "chosen keys": (
        DeepseekV32Config(**LATENT, index_topk=16, index_n_heads=2, index_head_dim=16),
        "do not attend to all keys, but to those of DeepseekV32Indexer",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused(tmp_path: Path, case: str):
    config, message = REFUSED[case]
    save(tmp_path, config)
    change_config(tmp_path, max_position_embeddings=256)
    require_refusal(tmp_path, message)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def require_refusal(folder: Path, message: str, **options: Any) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load(folder, **options)
    assert str(error.value).startswith("--model-impl transformers cannot run ")
    assert "\n" not in str(error.value)


def passes(**more: Any) -> Callable[..., Any]:
    """Llama's attention with further arguments for the function that attends."""
    forward = LlamaAttention.forward
    return lambda self, *args, **kwargs: forward(self, *args, **kwargs, **more)


def test_unknown_arguments_of_attention_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path, MODELS["llama"])
    monkeypatch.setattr(LlamaAttention, "forward", passes(unused=None, position_bias=torch.zeros(1)))
    require_refusal(tmp_path, "attention has the unknown arguments position_bias")


def test_masks_of_its_own_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of which only the sums with a causal mask would be seen."""
    forward = LlamaAttention.forward
    save(tmp_path, MODELS["llama"])
    monkeypatch.setattr(
        LlamaAttention,
        "forward",
        lambda self, hidden_states, position_embeddings, attention_mask, **kwargs: forward(
            self, hidden_states, position_embeddings, None if attention_mask is None else attention_mask + 0, **kwargs
        ),
    )
    require_refusal(tmp_path, "attention has no causal mask, or one of its own")


def test_a_layer_that_does_not_always_attend_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    forward, calls = LlamaAttention.forward, list[int]()

    def skip(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return (hidden_states, None) if len(calls) == 2 else forward(self, hidden_states, *args, **kwargs)

    save(tmp_path, MODELS["llama"])
    monkeypatch.setattr(LlamaAttention, "forward", skip)
    require_refusal(tmp_path, "a layer attends more than once, or not in every step")


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path):
    save(tmp_path, MODELS["llama"])
    (tmp_path / "modeling_mine.py").write_text("raise SystemExit('it was run')")
    changes = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}}
    change_config(tmp_path, architectures=["MineForCausalLM"], **changes)
    require_refusal(tmp_path, "cannot run MineForCausalLM: code from a checkpoint is never run")


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path):
    save(tmp_path, MODELS["gpt-neox"])
    config = fallback_config(hf.load_config(tmp_path))
    with pytest.raises(ConfigError, match=r"it has 160 logits, and config\.json a vocab_size of 150"):
        MiniEngine.load(tmp_path, config=replace(config, vocab_size=150))
    change_config(tmp_path, num_hidden_layers=4)
    require_refusal(tmp_path, r"does not fit its config.json: missing keys gpt_neox.layers.3.\w+")
    change_config(tmp_path, num_hidden_layers=3, intermediate_size=32)
    require_refusal(tmp_path, r"does not fit its config.json: mismatched keys .*dense_4h_to_h")
    change_config(tmp_path, intermediate_size=96)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 99)
    require_refusal(tmp_path, "its code fails with SafetensorError")


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "an encoder": ({"is_encoder_decoder": True}, "cannot run GPTNeoXForCausalLM: it has an encoder"),
    "no architecture": ({"architectures": None}, "it must name one of"),
    "no length": ({"max_position_embeddings": None}, "max_position_embeddings=None; a number of tokens"),
    "no size": ({"hidden_size": None}, "hidden_size"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_config_json(neox: Checkpoint, case: str):
    changes, message = CHANGES[case]
    with pytest.raises(ConfigError, match=message):
        fallback_config(hf.load_config(neox.folder) | changes)


def test_older_names_of_sizes(tmp_path: Path):
    save(tmp_path, MODELS["gpt2, learned positions"])
    config = fallback_config(hf.load_config(tmp_path))
    assert (config.hidden_size, config.max_position_embeddings) == (64, 256)


def test_unknown_architectures_advise_it(neox: Checkpoint):
    with pytest.raises(ConfigError, match="GPTNeoXForCausalLM is not supported; try --model-impl transf"):
        ModelConfig.from_hf(hf.load_config(neox.folder))


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "ranks": ({"tp": 2}, "does not support --tp 2"),
    "quantization": ({"quantization": "int8"}, "does not support --quantization int8"),
    "a draft model": ({"speculate": f"draft:{BUILTIN_MODEL}"}, "does not support --speculate draft:"),
    "graphs": ({"cuda_graph_max_bs": 4}, "does not support --cuda-graph-max-bs 4"),
}


def settings(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), model_impl="transformers", device="cpu", **options)


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_are_not_supported(neox: Checkpoint, case: str):
    options, message = SETTINGS[case]
    with pytest.raises(ConfigError, match=message):
        fit.check_fit(settings(neox.folder, **options))


def test_quantized_checkpoints_are_refused(tmp_path: Path):
    save_with_tokenizer(tmp_path)
    change_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(ConfigError, match="does not support a quantized checkpoint"):
        fit.check_fit(settings(tmp_path))


def test_gguf_files_are_refused(neox: Checkpoint, tmp_path: Path):
    (tmp_path / "model.gguf").touch()
    config = settings(neox.folder)
    checkpoint = replace(fit.Checkpoint.read(config), folder=tmp_path)
    with pytest.raises(ConfigError, match="does not support GGUF files"):
        fit.check_settings(checkpoint, config, "cpu")


def test_embedding_models_are_refused(tmp_path: Path):
    save_with_tokenizer(tmp_path)
    write_modules(tmp_path, "lasttoken")
    change_config(tmp_path, architectures=["Qwen3Model"])
    with pytest.raises(ConfigError, match="does not support an embedding model"):
        fit.check_fit(settings(tmp_path))


def test_without_transformers(neox: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fit, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs `pip install 'minisgl\[transformers\]'`"):
        fit.check_fit(settings(neox.folder))


def test_every_dtype_has_a_tolerance():
    assert {str(dtype).removeprefix("torch.") for dtype in TOLERANCES} == fit.ITEM_BYTES.keys()
