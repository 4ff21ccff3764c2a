"""`minisgl bench offline`: the engine in this process, without server, sockets or tokenizing of text."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from minisgl.bench.probe import HostProbe, replaced
from minisgl.bench.report import (
    check_writable,
    format_table,
    percentiles,
    provenance,
    shown,
    spread,
    spread_percent,
)
from minisgl.bench.timeline import record_timeline
from minisgl.bench.workloads import Workload, make_workload
from minisgl.checkpoint.hf import resolve_model
from minisgl.errors import ConfigError, MinisglError
from minisgl.message import DetokenizeMsg, FlushCacheMsg
from minisgl.params import SamplingParams
from minisgl.settings.options import EngineConfig
from minisgl.tokenizer.tokenize import model_limits

if TYPE_CHECKING:
    from minisgl.llm.llm import LLM

PROFILE_SLACK = 64  # tokens generated beyond the profiled steps, so that those are in the steady middle


@dataclass(frozen=True, kw_only=True)
class OfflineSettings:
    """What to run; the defaults are the command line's. Sizes of None are the workload's own."""

    workloads: tuple[str, ...]
    num_prompts: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    temperature: float
    repeat: int
    profile_steps: int = 0
    timeline: str | None = None

    def __post_init__(self) -> None:
        """Raises `ConfigError` for a value that cannot work."""
        if self.repeat < 1:
            raise ConfigError("--repeat must be at least 1")
        if self.profile_steps < 0:
            raise ConfigError("--profile-steps must be 0 (off) or positive")
        if not 0 <= self.temperature <= 100:
            raise ConfigError("--temperature must be 0 to 100")
        check_writable(self.timeline, "--timeline")


class TokenClock:
    """When each token was confirmed: one entry a step, so that a step costs two list operations."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._uids: list[bytes] = []

    def record(self, msg: DetokenizeMsg) -> None:
        self._times.append(time.perf_counter())
        self._uids.append(msg.uids)

    def figures(self, start: float) -> dict[str, Any]:
        """TTFT (from `start`), gaps between tokens and time per output token, of all requests; milliseconds."""
        uids = np.frombuffer(b"".join(self._uids), "<i8")
        times = np.repeat(np.array(self._times), [len(u) // 8 for u in self._uids])
        order = np.argsort(uids, kind="stable")
        uids, times = uids[order], times[order]
        is_first = np.ones(len(uids), bool)
        is_first[1:] = uids[1:] != uids[:-1]
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], len(uids)) - 1
        many = lasts > firsts
        tpot = (times[lasts] - times[firsts])[many] / (lasts - firsts)[many]
        gaps = np.diff(times)[~is_first[1:]]
        return {
            "steps": len(self._times),
            "ttft_ms": percentiles(times[firsts] - start, scale=1e3),
            "itl_ms": percentiles(gaps, scale=1e3),
            "ms_per_token": percentiles(tpot, scale=1e3)["p50"],
        }


def check_workloads(settings: OfflineSettings, options: dict[str, Any]) -> list[Workload]:
    """The workloads, made for the model's vocabulary; raises `ConfigError` for one that its context cannot hold."""
    folder = resolve_model(options.get("model", ""), options.get("download_source", EngineConfig.download_source))
    limits = model_limits(folder, options.get("max_seq_len"))
    sizes = (settings.num_prompts, settings.input_len, settings.output_len)
    workloads = [make_workload(name, limits.vocab_size, *sizes) for name in settings.workloads]
    for workload in workloads:
        if workload.longest > limits.max_model_len:
            raise ConfigError(
                f"workload {workload.name} has a request of {workload.longest} tokens, but the context holds "
                f"{limits.max_model_len}; give a smaller --input-len or --output-len"
            )
    return workloads


def run_offline(settings: OfflineSettings, options: dict[str, Any]) -> dict[str, Any]:
    """Start an engine with `options`, run the workloads, and return everything measured, ready for JSON.

    Raises `ConfigError` for settings that cannot work and `MinisglError` when the engine returns something else than
    what was asked for.
    """
    workloads = check_workloads(settings, options)
    start = time.perf_counter()
    from minisgl.llm.llm import LLM

    llm = LLM(options.get("model", ""), **{name: value for name, value in options.items() if name != "model"})
    start_s = time.perf_counter() - start
    results = [_run_workload(llm, workload, settings) for workload in workloads]
    timeline = None
    if settings.timeline is not None:
        probe_run = workloads[0].truncated(PROFILE_SLACK)
        timeline = record_timeline(llm, lambda: _generate(llm, probe_run, settings.temperature), settings.timeline)
    return {
        "benchmark": "offline",
        "settings": asdict(settings) | {"options": options},
        "engine": llm.scheduler.describe(),
        "machine": provenance() | _torch_facts(),
        "engine_start_s": start_s,
        "results": results,
        "timeline": timeline,
    }


def _torch_facts() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}


def _run_workload(llm: LLM, workload: Workload, settings: OfflineSettings) -> dict[str, Any]:
    vocab_size = llm.scheduler.engine.limits.vocab_size
    _generate(llm, workload.warm_up(vocab_size), settings.temperature)
    repeats = [_measure(llm, workload, settings.temperature) for _ in range(settings.repeat)]
    names = [name for name, value in repeats[0].items() if isinstance(value, int | float)]
    result: dict[str, Any] = {
        "workload": workload.name,
        "headline": workload.headline,
        "requests": len(workload.items),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "repeats": repeats,
        "summary": {name: spread([repeat[name] for repeat in repeats]) for name in names},
    }
    if settings.profile_steps:
        probe = HostProbe(llm.scheduler, settings.profile_steps)
        with probe:
            _generate(llm, workload.truncated(settings.profile_steps + PROFILE_SLACK), settings.temperature)
        result["host"] = probe.figures()
    return result


def _generate(llm: LLM, workload: Workload, temperature: float) -> int:
    """Run it on an empty prefix cache; returns how many prompt tokens were found in the cache nevertheless.

    Raises `MinisglError` unless each request got exactly the tokens that it asked for.
    """
    llm.scheduler.handle(FlushCacheMsg())
    params = [
        SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=item.output_len) for item in workload.items
    ]
    completions = llm.generate([item.prompt for item in workload.items], params)
    for item, done in zip(workload.items, completions, strict=True):
        if (len(item.prompt), item.output_len) != (done.prompt_tokens, len(done.token_ids)):
            raise MinisglError(
                f"{workload.name}: asked for {len(item.prompt)} tokens in and {item.output_len} out, "
                f"but the engine says {done.prompt_tokens} and {len(done.token_ids)}"
            )
    return sum(done.cached_tokens for done in completions)


def _measure(llm: LLM, workload: Workload, temperature: float) -> dict[str, Any]:
    """One timed run: everything from the call of `generate` to its return, detokenizing included."""
    clock = TokenClock()
    preemptions = llm.scheduler.stats.preemptions
    send = llm.scheduler.io.send

    def timed_send(msg: DetokenizeMsg) -> None:
        clock.record(msg)
        send(msg)

    gc.collect()  # what the last run has left is not this run's time
    with replaced(llm.scheduler.io, "send", timed_send):
        start = time.perf_counter()
        cached = _generate(llm, workload, temperature)
        wall = time.perf_counter() - start
    return {
        "wall_s": wall,
        "output_tok_s": workload.output_tokens / wall,
        "input_tok_s": workload.prompt_tokens / wall,
        "total_tok_s": (workload.prompt_tokens + workload.output_tokens) / wall,
        "cached_tokens": cached,
        "preemptions": llm.scheduler.stats.preemptions - preemptions,
        **clock.figures(start),
    }


def offline_table(report: dict[str, Any]) -> str:
    """The report for people: medians of the repeats, the spread of the headline figure."""
    rows = []
    for result in report["results"]:
        summary = {name: value["median"] for name, value in result["summary"].items()}
        ttft = result["repeats"][0]["ttft_ms"]
        names = ("wall_s", "output_tok_s", "input_tok_s", "total_tok_s")
        figures = [summary[name] for name in names]
        head = result["summary"].get(result["headline"])
        off = spread_percent(head) if head and len(result["repeats"]) > 1 else None
        size = f"{result['requests']} x {result['prompt_tokens']:,}/{result['output_tokens']:,}"
        rows.append([result["workload"], size, *figures, summary.get("ms_per_token"), ttft["p50"], ttft["p99"], off])
    headers = ["workload", "requests x in/out", "wall s", "out tok/s", "in tok/s", "all tok/s"]
    headers += ["ms/token", "TTFT p50", "p99 ms", "spread %"]
    engine = report["engine"]
    lines = [
        f"{engine['architecture']} · {engine['parameters'] / 1e9:.3g} B parameters · {engine['dtype']} · "
        f"{engine['device']} · attention {engine['attention']} · start {report['engine_start_s']:.1f} s",
        format_table(headers, rows),
    ]
    for result in report["results"]:
        if host := result.get("host"):
            parts = ", ".join(f"{name.removesuffix('_us')} {shown(host[name])}" for name in HostProbe.PARTS)
            lines.append(
                f"{result['workload']}: host work {shown(host['host_us'])} us a step of {shown(host['step_us'])} us "
                f"({host['steps']} steps, {shown(host['rows'])} rows; {parts})"
            )
    return "\n".join(lines)
