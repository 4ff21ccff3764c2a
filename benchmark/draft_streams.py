"""What drafts gain or cost end to end on a GPU, where a given number of tokens is right: random weights, one engine.

    PYTHONPATH=python python benchmark/draft_streams.py --shape qwen3-8b --num-draft-tokens 4

Tokens per second of one request and of 64, without drafts (off), with drafts in every step (always), and with as many
as pay (auto). `accept N`: N tokens a step are confirmed on average when all drafts are computed (`minisgl bench
offline --accept-length`); 1 is the worst case, in which there are drafts and none is right.
"""

from __future__ import annotations

import argparse
from unittest.mock import patch

from minisgl import LLM
from minisgl.bench.offline import _measure, generate, remembered
from minisgl.bench.shapes import shape_options
from minisgl.bench.workloads import OfflineArgs, Workload, make_workloads

CASES = (("auto", 1.0), ("auto", 2.0), ("auto", 4.0), ("always", 1.0), ("always", 4.0))


def rate(llm: LLM, workload: Workload, repeats: int) -> tuple[float, int, int]:
    """The best tokens per second of several runs, and drafted and accepted tokens of the last."""
    runs = [_measure(llm, workload, 0.0) for _ in range(repeats)]
    return max(r["output_tok_s"] for r in runs), runs[-1]["drafted_tokens"], runs[-1]["accepted_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--quantization")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    options = {"speculate": "auto", "num_draft_tokens": args.num_draft_tokens, "quantization": args.quantization}
    with shape_options(args.shape, options) as given:
        llm = LLM(given.pop("model"), **given)
    scheduler, drafts = llm.scheduler, llm.scheduler.drafts
    assert drafts is not None
    print(f"{args.shape} {args.quantization or ''}: {scheduler.engine.step_costs()}", flush=True)
    sizes = OfflineArgs(workload="single,batch64", output_len=args.output_len)
    for workload in make_workloads(sizes, scheduler.engine.limits.vocab_size):
        with patch.object(scheduler, "drafts", None):
            generate(llm, workload, 0.0)
            off = rate(llm, workload, args.repeats)[0]
        line = f"{workload.name}: off {off:.0f} tok/s"
        for name, length in CASES:
            if length > args.num_draft_tokens + 1:
                continue
            guess = remembered(llm, workload, 0.0, length)
            settings = {"_adapts": name == "auto", "_asks_device": name == "auto", "guess": guess}
            with patch.multiple(drafts, **settings):
                on, drafted, accepted = rate(llm, workload, args.repeats)
            line += f" | {name}, accept {length:g}: {on / off:.3f} x ({accepted} of {drafted})"
        print(line, flush=True)


if __name__ == "__main__":
    main()
