"""The real engine with real tensors on a device that is always late, freed pages full of NaN: same tokens, no NaN."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.core.message import AbortMsg, UserMsg, ids_from_bytes, ids_to_bytes
from minisgl.core.params import Grammar, SamplingParams
from minisgl.core.plan import FinishReason
from minisgl.core.specs import GatedDelta
from minisgl.device.device import CpuDevice, Device
from minisgl.engine.engine import Engine
from minisgl.engine.resolve import resolve
from minisgl.kvcache import storage, tree
from minisgl.kvcache.snapshots import IdPool
from minisgl.scheduler.budget import LoadBudget, Pace
from minisgl.scheduler.check import check_idle
from minisgl.scheduler.grammars import Grammars
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.scheduler import Scheduler
from minisgl.settings.options import SchedulerConfig, build_config
from support.fake_engine import planned_units, unit_ids
from support.fake_grammar import FakeCompiler, LateExecutor
from support.late_device import LateCopy, LateDevice
from support.tiny_model import CONFIG, VOCAB, write_tiny_model

pytestmark = pytest.mark.usefixtures("fixed_costs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), 128)


LINEAR = GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=8, width=3)
Requests = list[tuple[list[int], SamplingParams]]


def make_requests(seed: int) -> Requests:
    rng = random.Random(seed)
    heads = [[rng.randrange(1, VOCAB) for _ in range(40)] for _ in range(2)]
    requests = []
    for i in range(24):
        prompt = rng.choice(heads)[: rng.randrange(1, 41)] + [rng.randrange(1, VOCAB) for _ in range(rng.randrange(12))]
        sampled = SamplingParams(max_tokens=rng.randrange(1, 30), temperature=1.0, top_k=20, top_p=0.9, seed=i)
        greedy = SamplingParams(max_tokens=rng.randrange(1, 30), temperature=0.0, ignore_eos=True)
        penalized = SamplingParams(
            max_tokens=rng.randrange(8, 30),
            temperature=rng.choice((0.0, 1.0)),
            min_p=0.02,
            seed=i,
            presence_penalty=0.4,
            frequency_penalty=0.3,
            repetition_penalty=1.2,
            logit_bias=((3, 1.5), (5, -2.0)),
            min_tokens=6,
        )
        grammar = Grammar("regex", f"{i} {rng.randrange(5, 30)}", param="regex")
        bound = SamplingParams(max_tokens=20, temperature=1.0, seed=i, grammar=grammar, presence_penalty=0.1 * (i % 2))
        requests.append((prompt, rng.choice((sampled, greedy, penalized, bound))))
    return requests


def scramble(path: Path) -> None:
    """Change a byte in each 64 after the header."""
    data = np.fromfile(path, np.uint8)
    data[storage.HEADER_BYTES + 32 :: 64] ^= 1
    data.tofile(path)


def give_poisoned(
    scheduler: Scheduler, pool: IdPool, release: Callable[..., None], ids: list[int], *, last: bool = False
) -> None:
    """Poison what becomes free, but not before it is in its tier."""
    engine = scheduler.engine
    assert isinstance(engine, Engine)
    planned, copies = planned_units(scheduler.cache), engine.mover._newest

    def waits(unit: int) -> bool:
        copy = copies.get((-1, unit))
        return unit in planned or (isinstance(copy, LateCopy) and not copy.is_done)

    freed = [i for i in ids if i not in pool.others and not any(map(waits, unit_ids(pool.blocks, pool.group, i)))]
    engine.parts.store.poison(freed, pool.group)
    release(ids, last=last)


def run(
    folder: Path,
    device: Device,
    requests: Requests,
    aborts: frozenset[int] = frozenset(),
    tiers: Mapping[str, object] = {},
    window: int | None = None,
    gives_back: bool = True,
    recurs: bool = False,
    **options: object,
):
    """With a `window`, the last layer has it; if the model `recurs`, its first layer of three is a recurrence.

    A hybrid model is left as it is.
    """
    torch.manual_seed(0)
    # Op by op: the C++ step computes at once, whatever the device.
    settings = {"model": str(folder), "dummy_weight": True, "attention_backend": "cpu", **options}
    config = build_config(SchedulerConfig, settings)
    spec = replace(resolve(config.engine, "cpu"), **tiers)  # `host_kv` is refused on a CPU, where it gains nothing
    windows = (*[None] * (1 + recurs), window)
    model = replace(spec.model, layers=spec.model.layers[:1] * len(windows), windows=windows, gives_back=gives_back)
    if recurs:
        model = replace(model, linear=LINEAR, linear_layers=frozenset({0}))
    if spec.model.linear is None:
        spec = replace(spec, model=model)
    engine, io = Engine(spec, device), OfflineIO()
    assert (engine.general.name == "eager") == (settings["attention_backend"] == "cpu")
    compiling = LateExecutor()
    scheduler = Scheduler(config, engine, io, Grammars(FakeCompiler(VOCAB), compiling))
    scheduler.cache.on_free = engine.parts.store.poison
    for pool in [] if scheduler.cache.bounded is None else scheduler.cache.bounded.pools:
        pool.release = partial(give_poisoned, scheduler, pool, pool.release)
    outputs: dict[int, list[int]] = {uid: [] for uid in range(len(requests))}
    endings: dict[int, FinishReason] = {}
    todo = list(enumerate(requests))
    step = 0
    while todo or io.inbox or scheduler.is_busy:
        if todo and step % 2 == 0:
            for uid, (prompt, params) in todo[:3]:
                io.inbox.append(UserMsg(uid=uid, input_ids=ids_to_bytes(prompt), sampling_params=params))
            del todo[:3]
        if step in (9, 15, 21):
            io.inbox.extend(AbortMsg(uid) for uid in aborts)
        compiling.work()
        scheduler.step()
        step += 1
        while io.replies:
            msg = io.replies.popleft()
            uids = np.frombuffer(msg.uids, "<i8").tolist()
            for uid, token in zip(uids, ids_from_bytes(msg.tokens).tolist(), strict=True):
                outputs[uid].append(token)
            for end in msg.finished:
                assert end.uid not in endings
                assert end.failure is None, end.failure
                endings[end.uid] = end.reason
    assert len(endings) == len(requests)
    check_idle(scheduler)
    scheduler.save()
    for copy in engine.mover._newest.values():
        if isinstance(copy, LateCopy):
            copy.run()
    engine.shutdown()
    return outputs, scheduler


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, list[int]]:
    """What each request gets on a device that is never late."""
    # Seeds make the noise a function of the request alone; uid 0 of a solo run is not its uid elsewhere.
    return {
        uid: run(folder, CpuDevice(1), [request], page_size=8)[0][0] for uid, request in enumerate(make_requests(7))
    }


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 4, "max_prefill_length": 16},
        {"page_size": 1, "max_prefill_length": 24, "schedule_policy": "lpm"},
        {"page_size": 16, "max_prefill_length": 8192, "cache_type": "naive"},
        {"page_size": 4, "max_prefill_length": 32, "num_pages": 24, "max_running_requests": 6},
    ],
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_late_execution_changes_nothing(folder: Path, alone: dict[int, list[int]], options: dict[str, object]) -> None:
    late, scheduler = run(folder, LateDevice(1), make_requests(7), **options)
    assert scheduler.depth == 1
    assert late == alone
    if "num_pages" in options:
        assert scheduler.stats.preemptions > 0


@pytest.mark.parametrize(
    "options", [{"page_size": 4, "num_pages": 24}, {"page_size": 1, "kv_cache_dtype": "fp8"}], ids=str
)
@pytest.mark.parametrize("parts", ["large", "small"])
def test_pages_come_back_from_the_host_as_they_were(
    folder: Path, options: dict[str, object], parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moves run early or late and steps late, and each page of the pool is used many times."""
    if parts == "small":
        monkeypatch.setattr(tree, "PART", 1)
        monkeypatch.setattr(Pace, "load_budget", lambda *_: LoadBudget(0.0, 0.0))
    options = {"num_pages": 100, "max_running_requests": 6, "max_prefill_length": 32, **options}
    requests = make_requests(7)
    without, _ = run(folder, CpuDevice(1), requests, **options)
    late, scheduler = run(folder, LateDevice(1), requests, tiers={"host_kv": 1 << 18}, **options)
    (tier,) = scheduler.cache.prefix.tiers
    assert late == without
    assert tier.stored_pages > tier.loaded_pages > 10 and tier.lost_pages == 0


@pytest.mark.parametrize(
    ("depth", "options"),
    [
        (0, {"page_size": 4, "max_prefill_length": 16}),
        (1, {"page_size": 4, "max_prefill_length": 64, "speculate": "ngram"}),
        (1, {"page_size": 1, "max_prefill_length": 24, "kv_cache_dtype": "fp8"}),
        (1, {"page_size": 16, "max_prefill_length": 8192, "cache_type": "naive"}),
        (1, {"page_size": 4, "max_prefill_length": 32, "num_pages": 40, "max_running_requests": 12}),
    ],
    ids=str,
)
def test_pages_behind_windows_are_given_back(folder: Path, depth: int, options: dict[str, object]) -> None:
    requests, cache = make_requests(7), {"kv_cache_dtype": options.get("kv_cache_dtype", "auto")}
    whole, _ = run(folder, CpuDevice(1), requests, window=9, gives_back=False, page_size=8, **cache)
    other, _ = run(folder, CpuDevice(1), requests, page_size=8, **cache)
    found, scheduler = run(folder, LateDevice(1) if depth else CpuDevice(1), requests, window=9, **options)
    assert found == whole != other
    assert scheduler.depth == depth
    if "num_pages" in options:
        assert scheduler.stats.preemptions > 0
    if "cache_type" not in options:
        assert scheduler.stats.cached_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 16},
        {"page_size": 4, "max_prefill_length": 32, "kv_cache_dtype": "auto"},
        {"page_size": 16, "max_prefill_length": 32, "kv_cache_dtype": "fp8", "speculate": "ngram"},
        {"page_size": 16, "num_pages": 12, "max_running_requests": 4},
    ],
    ids=str,
)
def test_the_step_in_cpp_gives_pages_back(folder: Path, options: dict[str, object]) -> None:
    """It reads blocks of 64 keys, of which pages before the window may be another row's."""
    native = {"window": 9, "attention_backend": "auto", "kv_cache_dtype": options.get("kv_cache_dtype", "auto")}
    requests = make_requests(7)
    whole, _ = run(folder, CpuDevice(1), requests, gives_back=False, page_size=16, **native)
    found, scheduler = run(folder, CpuDevice(1), requests, **native | options)
    assert found == whole and scheduler.stats.cached_tokens > 0


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3.5."""
    sizes: dict[str, object] = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
    }
    sizes["layer_types"] = ["linear_attention", *["full_attention"] * 3]  # else a slot is as large as many texts
    sizes |= {f"linear_{name}_head_dim": 16 for name in ("key", "value")}
    names = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "max_position_embeddings": 128}
    folder = tmp_path_factory.mktemp("hybrid")
    (folder / "config.json").write_text(json.dumps(CONFIG | names | sizes))
    return folder


def test_gated_delta_in_cpp(hybrid: Path) -> None:
    """Texts are those of single requests, op by op, through chunks, prefix hits, preemption and drafts."""
    requests = make_requests(7)
    alone, _ = run(hybrid, CpuDevice(1), requests, max_running_requests=1, cache_type="naive", speculate="off")
    each: list[dict[str, object]] = [
        {"page_size": 4, "max_prefill_length": 16, "speculate": "off"},
        {"page_size": 16, "max_prefill_length": 32, "speculate": "ngram"},
        {"page_size": 4, "max_prefill_length": 32, "num_pages": 120, "max_running_requests": 12},
    ]
    for options in each:
        found, scheduler = run(hybrid, CpuDevice(1), requests, attention_backend="auto", **options)
        stats = scheduler.stats
        assert found == alone
        assert (stats.preemptions > 0) == ("num_pages" in options)
        assert stats.cached_tokens > 0
        assert (stats.accepted_tokens > 0) == (options.get("speculate") == "ngram")


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(
    ("depth", "options"),
    [
        (0, {"page_size": 4, "max_prefill_length": 16}),
        (1, {"page_size": 1, "max_prefill_length": 24}),
        (1, {"page_size": 16, "max_prefill_length": 8192, "cache_type": "naive"}),
        (1, {"page_size": 4, "max_prefill_length": 24, "speculate": "ngram"}),
        (
            1,
            {
                "page_size": 4,
                "max_prefill_length": 32,
                "num_pages": 96,
                "max_running_requests": 12,
            },
        ),
    ],
    ids=str,
)
def test_state_of_a_recurrent_layer_follows_its_text(
    folder: Path, window: int | None, depth: int, options: dict[str, object]
) -> None:
    """Through chunks, prefix hits, preemption, folds, rejected drafts and slots that other rows had."""
    options = {"speculate": "off", **options}
    requests = make_requests(7)
    alone, _ = run(folder, CpuDevice(1), requests, window=window, recurs=True, speculate="off", cache_type="naive")
    found, scheduler = run(
        folder, LateDevice(1) if depth else CpuDevice(1), requests, window=window, recurs=True, **options
    )
    assert found == alone and scheduler.depth == depth
    if "num_pages" in options:
        assert scheduler.stats.preemptions > 0
    if "cache_type" not in options:
        assert scheduler.stats.cached_tokens > 0
    if options["speculate"] != "off":
        assert 0 < scheduler.stats.accepted_tokens < scheduler.stats.drafted_tokens


@pytest.mark.parametrize(("window", "recurs"), [(9, False), (9, True)])
def test_snapshots_come_back_from_tiers_as_they_were(
    folder: Path, window: int | None, recurs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From host memory; from the file of an earlier process; and not where that is damaged."""
    monkeypatch.setattr(storage, "_page_seconds", lambda folder, size: 1e-9)
    model: dict[str, Any] = {"window": window, "recurs": recurs, "speculate": "off"}
    requests = make_requests(7)[:12]
    alone, _ = run(folder, CpuDevice(1), requests, cache_type="naive", **model)
    pages, size = (96, 1 << 20) if recurs else (40, 1 << 18)
    model |= {"page_size": 4, "num_pages": pages, "max_running_requests": 6, "max_prefill_length": 32}
    disk = {"disk_kv": (tmp_path / "kv", 2 * size)}
    counts = []
    for tiers in ({"host_kv": size}, disk, disk, "damage", disk):
        if isinstance(tiers, str):
            scramble(tmp_path / "kv" / "rank0.kv")
            continue
        found, scheduler = run(folder, LateDevice(1), requests, tiers=tiers, **model)
        assert found == alone
        (tier,) = scheduler.cache.prefix.tiers
        counts.append((tier.loaded_pages > 5, tier.lost_pages > 0, scheduler.stats.cached_tokens))
    assert [loaded for loaded, _, _ in counts[:3]] == [True] * 3
    assert [lost for _, lost, _ in counts] == [False, False, False, True]
    assert counts[2][2] > counts[1][2], "the file was of no use"


@pytest.mark.parametrize("recurs", [False, True])
def test_aborts_while_late_leave_the_others_untouched(folder: Path, recurs: bool) -> None:
    requests, options = make_requests(3), {"page_size": 4, "max_prefill_length": 16, "recurs": recurs}
    whole, _ = run(folder, CpuDevice(1), requests, **options)
    aborts = frozenset(range(0, 24, 3))
    late, _ = run(folder, LateDevice(1), requests, aborts, **options)
    for uid, tokens in late.items():
        assert tokens == whole[uid][: len(tokens)] if uid in aborts else tokens == whole[uid]
