"""Trains an EAGLE-3 draft head (arXiv:2503.01840) for a model that ``training.export`` wrote.

python -m training.head --model python/minisgl/demo/model --out build/head --steps 3000

The head reads the outputs of three layers at token p and the embedding of token p + 1, and drafts token p + 2. For the
drafts behind it reads its own hidden states, so training unrolls it over as many drafts ("training-time test").
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.data import batches, make_batch
from training.evaluate import print_acceptance
from training.export import config, load, save
from training.model import Model, Muon, Shape, rms_norm, rotate
from training.train import on_device, rate

LAYERS = (0, 2, 4)  # of the model; the first tells which token was there, so that the head finds a text to copy
HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, DRAFT_VOCAB = 2, 1, 64, 128, 2048  # 0.98 M weights: less than 2 MB in bf16
WINDOW = 1024  # slots that attend to each other in training; the states of the model see the whole document
DECAY = 0.8  # weight of each draft in the loss, relative to the draft before


class Head(nn.Module):
    """The head; its parameters have the names of the published layout. ``draft_ids`` [V] are the drafts' token ids."""

    def __init__(self, model: Model, draft_ids: Tensor) -> None:
        super().__init__()
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.eps, d = model.shape.eps, model.shape.hidden

        def matrix(out: int, into: int) -> nn.Linear:
            return nn.Linear(into, out, bias=False)

        self.fc = matrix(d, len(LAYERS) * d)
        attention = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        self.midlayer = nn.ModuleDict({
            "self_attn": nn.ModuleDict({f"{name}_proj": matrix(out, 2 * d) for name, out in attention.items()}),
            "mlp": nn.ModuleDict({f"{name}_proj": matrix(INTERMEDIATE, d) for name in ("gate", "up")}),
            **{name: nn.RMSNorm(d) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        })  # fmt: skip
        self.midlayer["self_attn"]["o_proj"] = matrix(d, HEADS * HEAD_DIM)
        self.midlayer["mlp"]["down_proj"] = matrix(d, INTERMEDIATE)
        self.norm, self.lm_head = nn.RMSNorm(d), matrix(len(draft_ids), d)
        with torch.no_grad():  # the model's states are large, and the layer must count beside them
            self.fc.weight.mul_(0.1)
            self.norm.weight.fill_(0.1)
            self.lm_head.weight.copy_(model.embed[draft_ids])

    def normed(self, x: Tensor, norm: nn.Module) -> Tensor:
        """``x`` with the weight of ``norm``, as the model computes its norms."""
        return rms_norm(x, norm.weight, self.eps)  # type: ignore[arg-type]

    def unrolled(
        self, states: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, starts: Tensor, count: int
    ) -> Iterator[Tensor]:
        """Hidden states [T, hidden] of ``count`` drafts, the first from ``states`` [T, 3 · hidden] of the model.

        ``embedded`` [T, hidden] are the embeddings of the next tokens. Those of draft ``k`` are valid from slot ``k``
        of a document: the drafts before were made in the slots before, each with the true tokens.
        """
        layer, slots = self.midlayer, torch.arange(len(states), device=states.device)
        attention, mlp = layer["self_attn"], layer["mlp"]
        document = torch.searchsorted(starts, slots.to(starts.dtype), right=True).view(-1, 1, min(WINDOW, len(slots)))
        together = document[..., None] == document[..., None, :]  # [windows, 1, W, W]
        x, keys, values = self.fc(states), [], []
        embedded = self.normed(embedded, layer["input_layernorm"])
        for k in range(count):
            joined = torch.cat((embedded, self.normed(x, layer["hidden_norm"])), -1)
            q, key, value = (
                attention[name](joined).unflatten(-1, (-1, HEAD_DIM)) for name in ("q_proj", "k_proj", "v_proj")
            )
            keys.append(rotate(key, cos, sin))
            values.append(value)
            x = x + attention["o_proj"](attend(rotate(q, cos, sin), keys, values, together.tril(-k)).flatten(1))
            y = self.normed(x, layer["post_attention_layernorm"])
            x = x + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))
            yield x
            x = x.roll(1, 0)  # the next slot reads it

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [T, V] of the draft vocabulary."""
        return self.lm_head(self.normed(hidden, self.norm)).float()

    def loss(
        self, model: Model, ids: Tensor, positions: Tensor, starts: Tensor, targets: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """Cross entropy against the model's probabilities, and how many of each draft [count] are its likeliest token.

        Taken where the model was trained. What the draft vocabulary lacks has no part in the loss.
        """
        with torch.no_grad():
            outputs = model.outputs(ids, positions, starts)
            slots = ((targets.roll(-1) >= 0) & (positions.roll(-1) > 0)).nonzero()[:, 0]
            final = rms_norm(outputs[-1][slots + 1], model.norm, self.eps)
            logits = F.linear(final, model.embed.to(final.dtype)).float()
            wanted, likeliest = logits.softmax(-1)[:, self.draft_ids], logits.argmax(-1)
            embedded = model.embed[ids.roll(-1)].to(final.dtype)
            states = torch.cat([outputs[i] for i in LAYERS], -1)
        loss, right = torch.zeros((), device=ids.device), []
        cos, sin = model.cos[positions], model.sin[positions]  # type: ignore[index]
        for k, hidden in enumerate(self.unrolled(states, embedded, cos, sin, starts, count)):
            valid = positions[slots] >= k
            trained = valid.sum().clamp(min=1)  # a batch may be a part of a long question
            drafted = self.logits(hidden[slots])
            each = -(wanted * drafted.log_softmax(-1)).sum(-1)
            loss = loss + DECAY**k * (each * valid).sum() / trained
            right.append(((self.draft_ids[drafted.argmax(-1)] == likeliest) & valid).sum() / trained)
        return loss, torch.stack(right).detach()


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor) -> Tensor:
    """Attention [T, H, D] of the newest draft: ``q`` [T, H, D]; ``keys`` and ``values`` [T, G, D] of all drafts so far.

    A slot attends to the slots of the first draft that ``mask`` [windows, 1, W, W] names, and to its chain: of each
    later draft, the slot that is as many slots before as the draft is older.
    """
    width, groups, old = mask.shape[-1], q.shape[1] // keys[0].shape[1], len(keys) - 1

    def windows(x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, width)).transpose(1, 2)  # [windows, H, W, D]

    chain_k, chain_v = ([x[0]] + [t.roll(old - j, 0) for j, t in enumerate(x[1:], 1)] for x in (keys, values))
    keys, values = ([windows(t.repeat_interleave(groups, 1)) for t in x] for x in (chain_k, chain_v))
    q = windows(q)
    scores = [(q @ keys[0].mT).masked_fill(~mask, float("-inf"))] + [(q * k).sum(-1, keepdim=True) for k in keys[1:]]
    weights = (torch.cat(scores, -1).float() * HEAD_DIM**-0.5).softmax(-1).to(q.dtype)
    first, *chain = weights.split((width, *[1] * old), -1)
    out = first @ values[0]
    for weight, value in zip(chain, values[1:], strict=True):
        out = out + weight * value
    return out.transpose(1, 2).flatten(0, 1)


def draft_vocabulary(path: Path, seed: int, context: int, tokens: int = 1 << 20) -> Tensor:
    """The token ids [V] int64 that occur most in what the model was trained to say, in ascending order."""
    targets = make_batch(Tokenizer.from_file(str(path)), Random(f"vocabulary {seed}"), tokens, context, 0.06).targets
    counts = np.bincount(targets[targets >= 0])
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:DRAFT_VOCAB]))


def head_config(shape: Shape, draft_vocab: int) -> dict[str, Any]:
    """``config.json`` of the head."""
    return config(shape) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": False,
        "draft_vocab_size": draft_vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)},
    }


def export(head: Head, shape: Shape, out: Path) -> None:
    """Writes the head in the published layout."""
    out.mkdir(parents=True, exist_ok=True)
    ids = head.draft_ids.cpu()
    offered = torch.zeros(shape.vocab, dtype=torch.bool).index_fill(0, ids, True)
    save(head.state_dict() | {"d2t": ids - torch.arange(len(ids)), "t2d": offered}, out)
    (out / "config.json").write_text(json.dumps(head_config(shape, len(ids)), indent=2) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens a step, a multiple of the window of 1,024")
    parser.add_argument("--drafts", type=int, default=4, choices=range(1, 9), help="how many drafts training unrolls")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--muon-lr", type=float, default=0.03)
    parser.add_argument("--adam-lr", type=float, default=0.006)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--items", type=int, default=20, help="held-out items of each skill that are drafted at the end"
    )
    args = parser.parse_args()
    if args.tokens % WINDOW:
        parser.error(f"--tokens is {args.tokens:,}, not a multiple of {WINDOW:,}")
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    model, tokenizer = load(args.model), args.model / "tokenizer.json"
    if model.shape.layers < LAYERS[-1] + 2:
        parser.error(f"the model has {model.shape.layers} layers, and the head reads layer {LAYERS[-1]} below the last")
    head = Head(model, draft_vocabulary(tokenizer, args.seed, model.shape.context)).to(device)
    model.to(device).requires_grad_(False)
    matrices = [p for name, p in head.named_parameters() if p.ndim == 2 and name != "lm_head.weight"]
    vectors = [p for p in head.parameters() if p.ndim == 1]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, args.muon_lr, weight_decay=0.02),
        torch.optim.AdamW([*vectors, head.lm_head.weight], args.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    base = [args.muon_lr, args.adam_lr]
    print(f"{sum(p.numel() for p in head.parameters()):,} parameters, {args.workers} workers, {device}", flush=True)
    source = batches(tokenizer, args.seed, args.steps, args.tokens, model.shape.context, 0.06, args.workers)
    begin, totals = time.perf_counter(), torch.zeros(1 + args.drafts, device=device)
    every = max(1, args.steps // 20)
    for step, batch in enumerate(on_device(source, device)):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, right = head.loss(model, *batch, count=args.drafts)
        loss.backward()
        for optimizer, lr in zip(optimizers, base, strict=True):
            optimizer.param_groups[0]["lr"] = lr * rate(step, args.steps, min(200, args.steps // 10 + 1))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        totals += torch.cat((loss.detach()[None], right))
        if (step + 1) % every == 0 or step + 1 == args.steps:
            value, *shares = (totals / (step % every + 1)).tolist()
            text = " ".join(f"{100 * share:.1f}" for share in shares)
            print(f"step {step + 1} loss {value:.4f} right {text} % {time.perf_counter() - begin:.0f} s", flush=True)
            totals.zero_()
            export(head, model.shape, args.out)
    if args.items:
        print_acceptance(str(args.model), f"eagle3:{args.out}", args.seed, args.items, args.drafts)


if __name__ == "__main__":
    main()
