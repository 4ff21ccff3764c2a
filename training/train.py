"""Trains the model on generated text.

python -m training.train --model build/tokenizer --out build/demo --steps 9200
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from threading import Thread

import torch
from torch import Tensor

from training.data import Batch, batches
from training.export import export
from training.model import Model, Muon, Shape


def rate(step: int, steps: int, warmup: int = 200, decay: float = 0.4) -> float:
    """Learning-rate factor: up, level, then a linear fall to zero over the last ``decay`` of the steps."""
    return min(1.0, (step + 1) / warmup, (steps - step) / (decay * steps))


def on_device(source: Iterator[Batch], device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Batches as tensors on the device, copied ahead by a thread. An error of `source` is raised here."""
    ahead: Queue[tuple[Tensor, Tensor, Tensor, Tensor] | Exception | None] = Queue(4)

    def copy() -> None:
        try:
            for b in source:
                host = [torch.from_numpy(x) for x in (b.ids, b.positions, b.starts, b.targets.astype("int64"))]
                if device.type == "cuda":
                    host = [x.pin_memory() for x in host]
                ahead.put(tuple(x.to(device, non_blocking=True) for x in host))  # type: ignore[arg-type]
        except Exception as e:
            ahead.put(e)
        else:
            ahead.put(None)

    Thread(target=copy, daemon=True).start()
    while (item := ahead.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder that holds tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=9_200)
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens a step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--long-share", type=float, default=0.06, help="share of the documents that are long")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.004)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--save-every", type=int, default=2_000)
    parser.add_argument("--init", type=Path, help="checkpoint to start from")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    model = Model(Shape())
    if args.init:
        model.load_state_dict(torch.load(args.init, map_location="cpu"))
    model.to(device)
    matrices = model.matrices()
    known = {id(p) for p in matrices}
    vectors = [p for p in model.parameters() if id(p) not in known]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, args.muon_lr, weight_decay=0.02),
        torch.optim.AdamW(vectors, args.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    base = [args.muon_lr, args.adam_lr]
    loss_of = torch.compile(model.loss) if device.type == "cuda" else model.loss
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {args.workers} workers, {device}", flush=True)

    source = batches(
        args.model / "tokenizer.json",
        args.seed,
        args.steps,
        args.tokens,
        model.shape.context,
        args.long_share,
        args.workers,
    )
    start = last = time.perf_counter()
    total, waited = torch.zeros((), device=device), 0.0
    feed = on_device(source, device)
    for step in range(args.steps):
        before = time.perf_counter()
        ids, positions, starts, targets = next(feed)
        waited += time.perf_counter() - before
        factor = rate(step, args.steps)
        loss = loss_of(ids, positions, starts, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vectors, 1.0)
        for optimizer, lr in zip(optimizers, base, strict=True):
            optimizer.param_groups[0]["lr"] = lr * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
        every = 100 if step >= 100 else 10
        if (step + 1) % every == 0 or step + 1 == args.steps:
            count = step % every + 1
            value, now = total.item() / count, time.perf_counter()
            print(f"step {step + 1} loss {value:.4f} {count * args.tokens / (now - last) / 1e6:.2f} M tokens/s "
                  f"waited {waited:.1f} s of {now - start:.0f} s", flush=True)  # fmt: skip
            last = now
            total.zero_()
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            torch.save(model.state_dict(), args.out / "checkpoint.pt")
            export(model, args.model, args.out / "model")


if __name__ == "__main__":
    main()
