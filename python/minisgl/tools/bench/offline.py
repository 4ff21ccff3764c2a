"""`minisgl bench offline`: measures the engine in this process, without server, sockets or tokenization."""

from __future__ import annotations

import gc
import math
import textwrap
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from minisgl.checkpoint.adapter import adapters_of
from minisgl.checkpoint.hf import resolve_model
from minisgl.core.errors import ConfigError, MinisglError
from minisgl.core.layout import NO_PROPOSALS, PROPOSAL, PROPOSED
from minisgl.core.message import DetokenizeMsg, FlushCacheMsg, ids_to_bytes
from minisgl.core.params import SamplingParams
from minisgl.settings.options import EngineConfig
from minisgl.tokenizer.tokenize import model_limits
from minisgl.tools.bench.report import format_table, origin, percentiles_ms, provenance, spread, spread_percent
from minisgl.tools.bench.workloads import OfflineArgs, Workload, make_workloads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from minisgl.core.layout import Ints
    from minisgl.llm.completions import Completion
    from minisgl.llm.llm import LLM

    Guess = Callable[[Any], Ints]


class TokenClock:
    """Records when each token was confirmed, with one entry per step: a step costs two list operations."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._uids: list[bytes] = []

    def record(self, msg: DetokenizeMsg) -> None:
        """Record the tokens of a step."""
        self._times.append(time.perf_counter())
        self._uids.append(msg.uids)

    def figures(self, start: float) -> dict[str, Any]:
        """Return TTFT (from `start`), ITL and the median time per output token over all requests, in milliseconds."""
        uids = np.frombuffer(b"".join(self._uids), "<i8")
        times = np.repeat(np.array(self._times), [len(u) // 8 for u in self._uids])
        order = np.argsort(uids, kind="stable")
        uids, times = uids[order], times[order]
        is_first = np.ones(len(uids), bool)
        is_first[1:] = uids[1:] != uids[:-1]
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(uids)) - 1
        has_gaps = lasts > firsts
        tpot = (times[lasts] - times[firsts])[has_gaps] / (lasts - firsts)[has_gaps]
        gaps = np.diff(times)[~is_first[1:]]
        return {
            "steps": len(self._times),
            "ttft_ms": percentiles_ms(times[firsts] - start),
            "itl_ms": percentiles_ms(gaps),
            "ms_per_token": percentiles_ms(tpot)["p50"],
        }


def run_offline(args: OfflineArgs, options: dict[str, Any]) -> dict[str, Any]:
    """Start an engine with `options`, run the workloads, and return the report, ready for JSON.

    Raises `ConfigError` for settings that cannot work, and `MinisglError` if the engine generates a wrong number of
    tokens.
    """
    start = time.perf_counter()
    if args.accept_length is not None:
        kind = str(options.get("speculate"))
        if kind not in ("auto", "mtp") and ":" not in kind:
            options = options | {"speculate": "tree"}  # drafts from the host in every step
    llm, workloads = start_engine(args, options)
    start_s = time.perf_counter() - start
    return {
        "benchmark": "offline",
        "settings": asdict(args) | {"options": options},
        "engine": llm.scheduler.describe(),
        "machine": provenance() | _torch_facts(),
        "engine_start_s": start_s,
        "results": [_run_workload(llm, workload, args) for workload in workloads],
    }


def start_engine(args: OfflineArgs, options: dict[str, Any]) -> tuple[LLM, list[Workload]]:
    """Start an engine with `options`, and make the workloads for its vocabulary.

    Raises `ConfigError` before the engine starts if a workload exceeds the model's context.
    """
    source = options.get("download_source", EngineConfig.download_source)
    folder = resolve_model(options.get("model", ""), source, weights=False, revision=options.get("revision"))
    limits = model_limits(folder, options.get("max_seq_len"))
    workloads = make_workloads(args, limits.vocab_size)
    if not args.adapters_unused and (adapters := adapters_of(options.get("lora"))):
        workloads = [workload.with_adapters(adapters) for workload in workloads]
    for workload in workloads:
        if workload.longest > limits.max_model_len:
            raise ConfigError(
                f"workload {workload.name} has a request of {workload.longest} tokens, but the context holds "
                f"{limits.max_model_len}; give a smaller --input-len or --output-len"
            )
    from minisgl.llm.llm import LLM

    return LLM(options.get("model", ""), **{k: v for k, v in options.items() if k != "model"}), workloads


def _torch_facts() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}


def _run_workload(llm: LLM, workload: Workload, args: OfflineArgs) -> dict[str, Any]:
    generate(llm, workload.warm_up(llm.scheduler.engine.limits.vocab_size), args.temperature)
    guess = None if args.accept_length is None else make_guess(llm, workload, args.temperature, args.accept_length)
    with nullcontext() if guess is None else simulated(llm, guess):
        repeats = [_measure(llm, workload, args.temperature) for _ in range(args.repeat)]
    names = [name for name, value in repeats[0].items() if isinstance(value, int | float)]
    return {
        "workload": workload.name,
        "headline": workload.headline,
        "requests": len(workload.requests),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "input_lens": spread([len(r.prompt) for r in workload.requests]),
        "output_lens": spread([r.output_len for r in workload.requests]),
        "repeats": repeats,
        "summary": {name: spread([repeat[name] for repeat in repeats]) for name in names},
    }


@contextmanager
def simulated(llm: LLM, guess: Guess) -> Iterator[None]:
    """Let `guess` make the drafts, in steps with the costs of the drafter: its model, if there is one, drafts in vain.

    Raises `ConfigError` for a model on several ranks, of which only the first knows.
    """
    scheduler: Any = llm.scheduler
    drafts, drafting = scheduler.drafts, scheduler.engine.parts.drafting
    if drafting.model is None:
        with patch.multiple(drafts, guess=guess, _has_model=False, _asks_device=False):
            yield
        return
    if scheduler.engine.spec.info.size > 1:
        raise ConfigError("--accept-length with a drafter that has a model is for one rank")
    plan, collect = drafts.plan, drafts.collect

    def plan_guessed(step: int, running: Any, max_tokens: int) -> Any:
        if (planned := plan(step, running, max_tokens)) is None:
            return None
        found = scheduler.rows.holders(running[planned.counts > 0])
        proposals = [(r.row, scheduler.rows.confirmed_len[r.row], np.resize(guess(r), PROPOSED)) for r in found]
        return replace(planned, proposals=np.array(proposals, PROPOSAL))

    def collect_as_drafted(step: int, done: Any, result: Any) -> Any:
        return collect(step, replace(done, proposals=NO_PROPOSALS), result)

    patches = patch.multiple(drafts, _asks_tree=False, _looks_up=False), patch.object(drafting, "drafts_always", True)
    with patch.multiple(drafts, plan=plan_guessed, collect=collect_as_drafted), patches[0], patches[1]:
        yield


def make_guess(llm: LLM, workload: Workload, temperature: float, length: float) -> Guess:
    """Return a `Drafts.guess` for `workload` with which a step confirms `length` tokens of a request on average.

    It proposes the answers of a first run, in which each token is replaced by a wrong one with the same probability.
    Raises `ConfigError` if a step cannot have so many tokens.
    """
    assert llm.scheduler.drafts is not None, "there is no drafter"
    max_drafts, vocab_size = llm.scheduler.drafts.max_drafts, llm.scheduler.engine.limits.vocab_size
    if length > max_drafts + 1:
        raise ConfigError(f"--accept-length {length:g} needs --num-draft-tokens of {math.ceil(length) - 1} or more")
    rates = np.linspace(0, 1, 1001)
    acceptance = np.interp(length, (rates[:, None] ** np.arange(max_drafts + 1)).sum(1), rates)
    noise, texts = np.random.default_rng(0), {}
    for r, done in zip(workload.requests, complete(llm, workload, temperature), strict=True):
        text = np.array([*r.prompt, *done.token_ids], np.int32)
        is_wrong = noise.random(len(text)) >= acceptance
        texts[ids_to_bytes(r.prompt)] = np.where(is_wrong, (text + 1) % vocab_size, text).astype(np.int32)

    def guess(req: Any) -> Ints:
        first = int(llm.scheduler.rows.confirmed_len[req.row])
        return texts[ids_to_bytes(req.ids[: req.prompt_len])][first : first + PROPOSED]

    return guess


def generate(llm: LLM, workload: Workload, temperature: float) -> int:
    """Run `workload` with an empty prefix cache; return the number of prompt tokens that requests shared by it.

    Raises `MinisglError` if a request gets another number of tokens than it asks for.
    """
    return sum(done.num_cached_tokens for done in complete(llm, workload, temperature))


def complete(llm: LLM, workload: Workload, temperature: float) -> list[Completion]:
    """Run `workload` as `generate` does; return the completions, which are the same in every run."""
    llm.scheduler.handle(FlushCacheMsg())
    requests = workload.requests
    params = [
        SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=r.output_len, seed=i, adapter=r.adapter)
        for i, r in enumerate(requests)
    ]
    completions = llm.generate([r.prompt for r in requests], params)
    for r, done in zip(requests, completions, strict=True):
        if (len(r.prompt), r.output_len) != (len(done.prompt_token_ids), len(done.token_ids)):
            raise MinisglError(
                f"{workload.name}: asked for {len(r.prompt)} tokens in and {r.output_len} out, "
                f"but the engine says {len(done.prompt_token_ids)} and {len(done.token_ids)}"
            )
    return completions


def _measure(llm: LLM, workload: Workload, temperature: float) -> dict[str, Any]:
    """Time one call of `generate`, detokenization included; return the figures."""
    clock = TokenClock()
    stats = llm.scheduler.stats
    preemptions, drafted, accepted = stats.preemptions, stats.drafted_tokens, stats.accepted_tokens
    send = llm.scheduler.io.send

    def timed_send(msg: DetokenizeMsg) -> None:
        clock.record(msg)
        send(msg)

    gc.collect()  # or this run would pay for the garbage of the last one
    with patch.object(llm.scheduler.io, "send", timed_send):
        start = time.perf_counter()
        cached = generate(llm, workload, temperature)
        wall = time.perf_counter() - start
    return {
        "wall_s": wall,
        "output_tok_s": workload.output_tokens / wall,
        "input_tok_s": workload.prompt_tokens / wall,
        "total_tok_s": (workload.prompt_tokens + workload.output_tokens) / wall,
        "cached_tokens": cached,
        "preemptions": stats.preemptions - preemptions,
        "drafted_tokens": stats.drafted_tokens - drafted,
        "accepted_tokens": stats.accepted_tokens - accepted,
        **clock.figures(start),
    }


def offline_table(report: dict[str, Any]) -> str:
    """Format a report as text: medians of the repeats, and the spread of the headline figure."""
    columns = []
    for result in report["results"]:
        summary = {name: value["median"] for name, value in result["summary"].items()}
        ttft = result["repeats"][0]["ttft_ms"]
        headline = result["summary"].get(result["headline"])
        spread_cell = spread_percent(headline) if headline and len(result["repeats"]) > 1 else None
        lengths = [
            "-".join(f"{n:,}" for n in sorted({result[name]["min"], result[name]["max"]}))
            for name in ("input_lens", "output_lens")
        ]
        figures = [summary[name] for name in ("wall_s", "output_tok_s", "input_tok_s", "total_tok_s")]
        times = summary.get("ms_per_token"), ttft["p50"], ttft["p99"]
        columns.append([result["requests"], *lengths, *figures, *times, spread_cell])
    labels = ["requests", "tokens in of each", "tokens out of each", "wall s", "out tok/s", "in tok/s", "all tok/s"]
    labels += ["ms/token", "TTFT p50 ms", "TTFT p99 ms", "spread %"]
    headers = ["workload", *(result["workload"] for result in report["results"])]
    engine = report["engine"]
    formats = [engine["quantization"], f"the rest in {engine['dtype']}"]
    weights = engine["dtype"] if engine["quantization"] == "none" else ", ".join(formats)
    head = (
        f"minisgl bench offline · {engine['architecture']} · {engine['parameters'] / 1e9:.3g} B parameters · "
        f"weights in {weights} · {engine['device']} · "
        f"attention {engine['attention']} · start {report['engine_start_s']:.1f} s"
    )
    lines = [textwrap.fill(line, 80) for line in (head, origin(report["machine"]))]
    return "\n".join([*lines, format_table(headers, [*zip(labels, *columns, strict=True)])])
