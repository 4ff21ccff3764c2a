"""Drafters with a model: one that is its own drafter is always right, and a head drafts what its formulas say."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replace_fields
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from minisgl.core.errors import ConfigError
from minisgl.core.layout import SEQUENCE, Flag
from minisgl.core.params import SamplingParams
from minisgl.core.plan import BatchPlan, StepCosts
from minisgl.device.device import CpuDevice
from minisgl.engine.batch import make_batch
from minisgl.engine.draft_model import drafted_rows
from minisgl.engine.drafting import Drafting
from minisgl.engine.engine import Engine
from minisgl.engine.fit import check_fit
from minisgl.engine.resolve import resolve
from minisgl.engine.trial import spread_plan
from minisgl.models.llama import LlamaModel
from minisgl.native.runner import NativeModel, NativeRunner
from minisgl.ops.quantized import INT8
from minisgl.scheduler.drafts import DEVICE, HOST, Drafts
from minisgl.settings.options import EngineConfig, build_config
from support.embedding_models import write_modules
from support.late_device import LateDevice
from unit.engine.test_drafts import LAYOUTS, SOME_LAYOUTS, VOCAB, Requests, make_requests, run

pytestmark = pytest.mark.usefixtures("fixed_costs")

HIDDEN, HEADS, KV_HEADS, DIM, DRAFT_VOCAB = 32, 4, 2, 16, 40
EPS, THETA, LAYERS = 1e-6, 10000.0, [0, 2, 1]
STEPS = {"C++": (0, None), "op by op": (0, CpuDevice(1)), "op by op and late": (1, LateDevice(1))}
PAUSED = "C++ with plain steps between"
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 160,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
HEAD: dict[str, Any] = MODEL | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFT_VOCAB,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYERS},
}

RECURRENT: dict[str, Any] = MODEL | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}


def write(path: Path, config: dict[str, Any], weights: dict[str, Tensor] | None = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if weights is not None:
        save_file(weights, path / "model.safetensors")
    return path


def random_head() -> dict[str, Tensor]:
    """Weights in the published layout."""
    torch.manual_seed(1)
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj": (HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (KV_HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (KV_HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "midlayer.mlp.gate_proj": (48, HIDDEN),
        "midlayer.mlp.up_proj": (48, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, 48),
        "midlayer.hidden_norm": (HIDDEN,),
        "midlayer.input_layernorm": (HIDDEN,),
        "midlayer.post_attention_layernorm": (HIDDEN,),
        "norm": (HIDDEN,),
        "lm_head": (DRAFT_VOCAB, HIDDEN),
    }
    weights = {f"{name}.weight": 0.3 * torch.randn(shape) + (len(shape) == 1) for name, shape in shapes.items()}
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    weights["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "tiny", MODEL)


@pytest.fixture(scope="module")
def drafters(folder: Path) -> dict[str, str]:
    """The options for both kinds; with random weights the model itself is its own drafter."""
    return {"draft": f"draft:{folder}", "eagle3": f"eagle3:{write(folder.parent / 'head', HEAD)}"}


# -- answers


@pytest.mark.parametrize("kind", ["draft", "eagle3"])
@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_answers_are_equal_with_and_without_drafts(
    folder: Path, drafters: dict[str, str], layout: dict[str, Any], kind: str
) -> None:
    """Requests of every kind, with chunks, cached prefixes and preemption. A late device finds NaN in freed pages."""
    requests = make_requests(random.Random(5), 32 if "num_pages" in layout else 10)
    plain, _ = run(folder, requests, device=CpuDevice(1), **layout)
    late, scheduler = run(folder, requests, 1, LateDevice(1), speculate=drafters[kind], **layout)
    assert late.tokens == plain.tokens and late.ends == plain.ends
    assert scheduler.stats.drafted_tokens > 0
    assert scheduler.stats.cached_tokens > 0 or layout.get("cache_type") == "naive"
    if "num_pages" in layout and kind == "eagle3":  # right drafts end requests before pages are short
        assert scheduler.stats.preemptions > 0


@pytest.mark.parametrize("kind", ["draft", "eagle3"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_answers_of_the_cpp_step_are_equal_to_the_byte(
    folder: Path, drafters: dict[str, str], layout: dict[str, Any], depth: int, kind: str
) -> None:
    requests = make_requests(random.Random(depth), 14)
    plain, _ = run(folder, requests, **layout)
    drafted, scheduler = run(folder, requests, depth, speculate=drafters[kind], **layout)
    assert drafted.tokens == plain.tokens and drafted.ends == plain.ends and drafted.logprobs == plain.logprobs
    assert 0 < scheduler.stats.accepted_tokens <= scheduler.stats.drafted_tokens


@pytest.mark.parametrize("step", ["C++", "op by op", "op by op and late"])
@pytest.mark.parametrize("most", [1, 3, 5, 8])
def test_a_model_that_drafts_for_itself_is_right(folder: Path, drafters: dict[str, str], most: int, step: str) -> None:
    """Greedy or sampled, with filters and biases: the noise is the same.

    Penalties do not count drafts, and the host drafts for a grammar.
    """
    none = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "grammar": None}
    requests = [(prompt, replace_fields(p, **none)) for prompt, p in make_requests(random.Random(most), 16)]
    depth, device = STEPS[step]
    options = LAYOUTS[most // 2 % 4] | {"speculate": drafters["draft"], "num_draft_tokens": most}
    _, scheduler = run(folder, requests, depth, device, **options)
    assert scheduler.stats.accepted_tokens == scheduler.stats.drafted_tokens > 100


# -- the head


class ReferenceHead:
    """The formulas of EAGLE-3 over whole sequences, without a cache."""

    def __init__(self, engine: Engine, weights: dict[str, Tensor], rounds: bool) -> None:
        """`rounds`: the hidden states and `fc` to 8 bits, as the C++ step."""
        self.engine, self.weights, self.rounds = engine, weights, rounds

    def features(self, ids: list[int]) -> Tensor:
        """Hidden states [T, H] of all tokens, from the outputs of the layers, each as a model that ends there."""
        parts, states = self.engine.parts, []
        plan = spread_plan([(0, 0, len(ids), Flag.SAMPLES)], self.engine.page_size, self.engine.blocks)
        plan = replace(plan, tokens=torch.tensor(ids, dtype=torch.int32).numpy())
        input_ids, batch, out_loc = parts.begin(make_batch(plan, parts.device))
        batch = replace(batch, logit_tokens=torch.arange(len(ids)))
        for i in LAYERS:
            model = parts.model.model
            cut = LlamaModel(model.embed_tokens, model.layers[: i + 1], model.norm)
            x, residual = cut.forward(input_ids, parts.context(batch, out_loc))
            states.append(x + residual)
        joined, fc = torch.cat(states, 1), self.weights["fc.weight"]
        if not self.rounds:
            return joined @ fc.T
        matrix = INT8.empty(*fc.shape, fc.device)
        matrix.round_from(fc)
        groups = joined.unflatten(1, (-1, INT8.group))
        scale = groups.abs().amax(2, keepdim=True) / 127
        return ((groups / scale).round() * scale).flatten(1) @ matrix.dense(torch.float32).T

    def drafts(self, ids: list[int], count: int) -> list[int]:
        """The drafts after `ids`."""
        features, tokens, drafts = self.features(ids[:-1]), ids[1:], []
        draft_ids = self.weights["d2t"] + torch.arange(DRAFT_VOCAB)
        for _ in range(count):
            hidden = self.layer(features, self.engine.parts.model.model.embed_tokens.weight[tokens])[-1:]
            logits = F.rms_norm(hidden, (HIDDEN,), self.weights["norm.weight"], EPS) @ self.weights["lm_head.weight"].T
            drafts.append(int(draft_ids[logits.argmax()]))
            features, tokens = torch.cat([features, hidden]), [*tokens, drafts[-1]]
        return drafts

    def layer(self, features: Tensor, embedded: Tensor) -> Tensor:
        w = {name.removeprefix("midlayer.").removesuffix(".weight"): t for name, t in self.weights.items()}

        def norm(x: Tensor, name: str) -> Tensor:
            return F.rms_norm(x, (HIDDEN,), w[name], EPS)

        x = torch.cat([norm(embedded, "input_layernorm"), norm(features, "hidden_norm")], 1)
        q, k, v = ((x @ w[f"self_attn.{n}_proj"].T).unflatten(1, (-1, DIM)).transpose(0, 1) for n in "qkv")
        angles = torch.arange(len(x))[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)
        q, k = (self.rotated(t, angles) for t in (q, k))
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        x = features + out.transpose(0, 1).flatten(1) @ w["self_attn.o_proj"].T
        y = norm(x, "post_attention_layernorm")
        return x + (F.silu(y @ w["mlp.gate_proj"].T) * (y @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T

    @staticmethod
    def rotated(x: Tensor, angles: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Tensor]]:
    """A model and a head, both with weights in a file."""
    engine = Engine(
        resolve(EngineConfig(model=str(folder), dummy_weight=True, attention_backend="cpu"), "cpu"), CpuDevice(1)
    )
    torch.manual_seed(2)
    weights = {}
    for p in engine.parts.model.parameters:
        for s in p.sources:
            weights[s.name] = torch.randn(s.shape) * (0.1 if len(s.shape) == 2 else 0.2) + (len(s.shape) == 1)
    path, head = tmp_path_factory.mktemp("trained"), random_head()
    return write(path / "model", MODEL, weights), write(path / "head", HEAD, head), head


def seen_drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Return a list to which each step appends the text of each row that drafts, and its drafts."""
    seen: list[tuple[list[int], list[int]]] = []
    texts: dict[int, list[int]] = {}
    complete, run_cpp = Drafting.complete, NativeRunner._run

    def spy(drafting: Drafting, batch: Any) -> Any:
        columns = batch.drafts
        for row, count in zip(columns.rows.tolist(), columns.counts.tolist(), strict=True):
            ids = drafting.history[row, : int(drafting.lengths[row])].tolist()
            if max(ids[:-1]) >= 0:  # of a trial step, only the newest token is known
                seen.append((ids, drafting.drafts[row, :count].tolist()))
        return complete(drafting, batch)

    def spy_cpp(runner: NativeRunner, plan: BatchPlan, masks: Any) -> Any:
        records = plan.histories.tolist()
        while records:
            row, first = records[1:3]
            texts[row] = texts.get(row, [])[:first] + records[4 : records[0]]
            records = records[records[0] :]
        out, column = run_cpp(runner, plan, masks), 0
        for row, start, stop, flags in plan.sequences.tolist():
            width = stop - start if flags & Flag.DRAFTS else flags & Flag.SAMPLES
            if flags & Flag.DRAFTS:
                seen.append((list(texts[row]), runner.parts.drafting.drafts[row, : width - 1].tolist()))
                texts[row] += out[0, column : column + int(out[2, column : column + width].sum())].tolist()
            column += width
        return out

    monkeypatch.setattr(Drafting, "complete", spy)
    monkeypatch.setattr(NativeRunner, "_run", spy_cpp)
    return seen


@pytest.mark.parametrize("step", [*STEPS, PAUSED])
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_a_head_drafts_what_its_formulas_say(
    trained: tuple[Path, Path, dict[str, Tensor]], page_size: int, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after prompts of several chunks, beside other rows, and with some drafts accepted and some not."""
    model, path, weights = trained
    seen, load_eagle = seen_drafts(monkeypatch), NativeModel._eagle

    def load_nearly_whole(*args: Any) -> tuple[Any, list[Tensor]]:
        spec, rounded = load_eagle(*args)
        return spec, [w for w in rounded if w.shape == (HIDDEN, 3 * HIDDEN)]  # fc has 8 bits always

    monkeypatch.setattr(NativeModel, "_eagle", load_nearly_whole)
    if step == PAUSED:
        plan_drafts = Drafts.plan
        monkeypatch.setattr(Drafts, "plan", lambda *args: plan_drafts(*args) if args[1] % 23 < 4 else None)
    rng = random.Random(page_size)
    greedy = SamplingParams(temperature=0.0, max_tokens=80 if step == PAUSED else 20, ignore_eos=True)
    lengths = (2, 60, 75) if step == PAUSED else (1, 2, 60, 25, 90, 3, 130)  # all drafts fit into 24 tokens
    requests: Requests = [([rng.randrange(1, VOCAB) for _ in range(n)], greedy) for n in lengths]
    depth, device = STEPS.get(step, STEPS["C++"])
    options = {"page_size": page_size, "cache_type": "naive", "dummy_weight": False}
    options["max_prefill_length"] = 24 if page_size < 128 else 400
    _, scheduler = run(model, requests, depth, device, speculate=f"eagle3:{path}", **options)
    config = EngineConfig(model=str(model), attention_backend="cpu")
    reference = ReferenceHead(Engine(resolve(config, "cpu"), CpuDevice(1)), weights, device is None)  # not packed
    with torch.inference_mode():
        assert [drafts for _, drafts in seen] == [reference.drafts(ids, len(drafts)) for ids, drafts in seen]
    assert scheduler.stats.drafted_tokens > (60 if step == PAUSED else 300)


# -- a head that ships with a model


@pytest.fixture(scope="module")
def shipped(trained: tuple[Path, Path, dict[str, Tensor]]) -> Path:
    model, head, _ = trained
    shutil.copytree(model, model.parent / "shipped")
    shutil.copytree(head, model.parent / "shipped" / "head")
    return model.parent / "shipped"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_auto_drafts_by_the_head_of_the_model_and_by_lookup(
    shipped: Path, layout: dict[str, Any], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[BatchPlan] = []
    run_cpp = NativeRunner._run
    requests = make_requests(random.Random(depth), 24)
    plain, _ = run(shipped, requests, speculate="off", dummy_weight=False, **layout)
    monkeypatch.setattr(NativeRunner, "_run", lambda *args: (plans.append(args[1]), run_cpp(*args))[1])
    drafted, scheduler = run(shipped, requests, depth, speculate="auto", dummy_weight=False, **layout)
    assert drafted.tokens == plain.tokens and drafted.ends == plain.ends and drafted.logprobs == plain.logprobs
    assert scheduler.stats.accepted_tokens > 0
    assert any(len(plan.proposals) for plan in plans) and any(drafted_rows(plan)[1].any() for plan in plans)


def test_a_head_is_used_where_one_ships_with_the_model(shipped: Path, tmp_path: Path) -> None:
    """By default and with auto; not if its weights are missing, or if its heads cannot be divided among the ranks."""

    def drafter(speculate: str | None, model: Path, tp: int = 1) -> str | None:
        return resolve(EngineConfig(model=str(model), speculate=speculate, device="cpu", tp=tp), "cpu").drafter

    other, empty = (Path(shutil.copytree(shipped, tmp_path / name)) for name in ("other", "empty"))
    (other / "head" / "config.json").write_text(json.dumps(MODEL))
    (empty / "head" / "model.safetensors").unlink()
    assert [drafter("auto", m) for m in (shipped, other, empty)] == ["eagle3", "ngram", "ngram"]
    assert [drafter(None, m) for m in (shipped, other, empty)] == ["eagle3", None, None]
    assert [drafter("off", shipped), drafter("ngram", shipped)] == [None, "ngram"]
    assert [drafter(speculate, shipped, tp=64) for speculate in ("auto", None)] == ["ngram", None]


def _drafts(costs: StepCosts) -> Drafts:
    """Of one row, by a head and by lookup."""
    nothing: Any = None
    rows: Any = SimpleNamespace(
        num_rows=1,
        is_live=np.ones(1, np.bool_),
        flags=np.zeros(1, np.int32),
        cached_len=np.full(1, 50),
        confirmed_len=np.full(1, 51),
        limit=np.full(1, 100),
        max_len=np.full(1, 200),
        requests=[SimpleNamespace(row=0, matcher=None)],
    )
    return Drafts(rows, nothing, lambda req, guess: (guess, False), costs, is_async=False, max_drafts=4, kind="auto")


@pytest.mark.parametrize(
    ("right_by_head", "right_by_host", "want"),
    [(0.9, 0.1, (4, False)), (0.4, 0.9, (4, True)), (0.9, 0.9, (4, True)), (0.0, 0.0, (0, False))],
)
def test_auto_takes_what_is_worth_more(right_by_head: float, right_by_host: float, want: tuple[int, bool]) -> None:
    """Of equally good drafts those of the host, which cost less; none if neither pays."""
    costs = StepCosts(1e-3, 0.0, plain=((1, 1e-3),), drafted=(((5, 1.5e-3),),), proposed=(((5, 1.2e-3),),))
    drafts = _drafts(costs)
    drafts.guess = lambda req: np.arange(8, dtype=np.int32)  # type: ignore[method-assign]
    drafts.ready[DEVICE] = 8
    for source, rate in ((DEVICE, right_by_head), (HOST, right_by_host)):
        drafts.accepted_weight[source], drafts.tried_weight[source] = 1000 * rate, 1000
    planned = drafts.plan(1, np.zeros(1, np.intp), 100)
    found = (0, False) if planned is None else (int(planned.counts[0]), len(planned.proposals) > 0)
    assert found == want
    assert (drafts.resumes_at[0] > 1) == (want[0] == 0)


@pytest.mark.parametrize("right", [0, 4])
def test_a_request_begins_with_what_others_have_shown(right: int) -> None:
    costs = StepCosts(1e-3, 0.0, plain=((1, 1e-3),), drafted=(((5, 1.5e-3),),), proposed=(((5, 1.2e-3),),))
    drafts, index = _drafts(costs), np.zeros(1, np.intp)
    sequences = np.array([(0, 50, 55, Flag.SAMPLES | Flag.FROM_DEVICE | Flag.DRAFTS)], SEQUENCE)
    confirmed = (np.arange(5) <= right).astype(np.int32)
    result: Any = SimpleNamespace(confirmed=confirmed, ready=np.full(5, 8, np.int32))
    for step in range(30):
        drafts.collect(step, BatchPlan(step, sequences), result)
    drafts.add(SimpleNamespace(row=0, sampling_params=SamplingParams()))  # type: ignore[arg-type]
    by_head, by_host = drafts._rates(index)[:, 0]
    assert by_head > 0.95 if right else by_head < 0.5
    assert by_host == pytest.approx(0.8, abs=0.01), "nothing was looked up"


# -- bad input


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("draft", None, "is not a folder with a config.json"),
        ("draft", {"vocab_size": 98}, "has a vocabulary of 98, and the model one of 97"),
        ("draft", {"architectures": ["Bert"]}, "model architecture Bert is not supported"),
        ("draft", HEAD, "has an EAGLE-3 head; give --speculate eagle3:"),
        ("draft", RECURRENT, "has a recurrent state, and only models without one can be draft models"),
        ("eagle3", {}, "has architectures=.'Qwen3ForCausalLM'., not LlamaForCausalLMEagle3"),
        ("eagle3", HEAD | {"hidden_size": 64}, "has a hidden size of 64, and the model one of 32"),
        ("eagle3", HEAD | {"vocab_size": 98}, "has a vocabulary of 98, and the model one of 97"),
        ("eagle3", HEAD | {"draft_vocab_size": 98}, "draft_vocab_size is 98, not a part of the vocabulary of 97"),
        ("eagle3", HEAD | {"num_hidden_layers": 2}, "only heads of one layer are supported"),
        ("eagle3", HEAD | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, "from 0 to 2"),
    ],
)
def test_a_drafter_for_another_model_is_refused(
    folder: Path, tmp_path: Path, kind: str, change: dict[str, Any] | None, message: str
) -> None:
    path = tmp_path / "drafter"
    if change is not None:
        write(path, MODEL | change)
    config = EngineConfig(model=str(folder), dummy_weight=True, speculate=f"{kind}:{path}")
    with pytest.raises(ConfigError, match=rf"^--speculate {kind}: .*{message}"):
        resolve(config, "cpu")


def test_embedding_models_have_no_drafter(folder: Path, drafters: dict[str, str], tmp_path: Path) -> None:
    embedder = write(tmp_path / "embedder", MODEL)
    write_modules(embedder, "lasttoken")
    for model, asked, message in (
        (embedder, drafters["draft"], "is for models that generate text; this one makes embeddings"),
        (folder, f"draft:{embedder}", "makes embeddings, and generates no text"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_fit(EngineConfig(model=str(model), device="cpu", speculate=asked))


def test_a_head_needs_its_draft_vocabulary(trained: tuple[Path, Path, dict[str, Tensor]], tmp_path: Path) -> None:
    model, _, weights = trained
    without = {name: tensor for name, tensor in weights.items() if name != "d2t"}
    for name, given, message in (
        ("none", without, "has no d2t for its 40 draft tokens"),
        ("short", weights | {"d2t": weights["d2t"][:39].clone()}, "has no d2t for its 40 draft tokens"),
        ("far", weights | {"d2t": weights["d2t"] + VOCAB}, "leads out of the vocabulary"),
    ):
        config = EngineConfig(model=str(model), speculate=f"eagle3:{write(tmp_path / name, HEAD, given)}")
        with pytest.raises(ConfigError, match=message):
            Engine(resolve(config, "cpu"), CpuDevice(1))


@pytest.mark.parametrize("asked", ["draft", "draft:", "eagle3", "crystal:/ball"])
def test_a_path_is_needed(asked: str) -> None:
    with pytest.raises(
        ConfigError, match=f"speculate='{asked}' is not one of off, auto, ngram, tree, mtp, draft:PATH, eagle3:PATH"
    ):
        build_config(EngineConfig, {"speculate": asked})


def test_pages_of_both_models_are_counted(folder: Path, drafters: dict[str, str]) -> None:
    def engine(speculate: str) -> Engine:
        config = EngineConfig(model=str(folder), dummy_weight=True, attention_backend="cpu", speculate=speculate)
        return Engine(resolve(config, "cpu"), CpuDevice(1))

    plain, own, head = engine("off").memory, engine(drafters["draft"]).memory, engine(drafters["eagle3"]).memory
    page = plain.block_bytes
    assert own.block_bytes == 2 * page and own.weight_bytes == 2 * plain.weight_bytes
    assert head.block_bytes == page * 5 // 4
