"""Multi-head latent attention (arXiv:2405.04434): the mixer of layers that keep a latent of each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.core.layout import FULL

if TYPE_CHECKING:
    from minisgl.attention.backend import MixerSpec
    from minisgl.core.plan import Batch
    from minisgl.core.specs import Latent
    from minisgl.ops.quantized import Pages
    from minisgl.ops.reference import LatentTransform
    from minisgl.ops.table import OpTable


class LatentMixer:
    """Attention to latents by the op table: slow, but correct on every device."""

    name, group, captures_decodes, captures_prompts = "latent", FULL, False, False

    def __init__(self, spec: MixerSpec[Latent], ops: OpTable) -> None:
        self.kind, self.spec, self.ops = spec.kind, spec, ops

    def prepare(self, batch: Batch, page_table: Tensor, out_loc: Tensor) -> LatentStep:
        """Do what `engine.runner.Mixer.prepare` says."""
        return LatentStep(self, batch, page_table, out_loc, whole_prompts(batch))


@dataclass(frozen=True, slots=True)
class LatentStep:
    """One step. A prompt from its first token on attends with keys and values made of its own latents: that takes
    less than a third of the arithmetic. All other queries attend to the latents in pages.

    `prompts` are the tokens [start, stop) of such prompts, in order.
    """

    mixer: LatentMixer
    batch: Batch
    page_table: Tensor
    out_loc: Tensor
    prompts: list[tuple[int, int]]

    def attend(self, q: Tensor, latents: Tensor, heads: LatentTransform, pages: Pages) -> Tensor:
        """Store the latents [T, C + R] and attend: q [T, Hq, N + R] -> [T, Hq, V]. May overwrite both.

        Letters are those of `LatentTransform`.
        """
        self.mixer.ops.store_latents(q, latents, heads, self.batch.positions, pages, self.out_loc)
        kind, tokens = self.mixer.kind, len(q)
        out = q.new_empty(tokens, kind.heads, kind.v_dim)
        if sum(stop - start for start, stop in self.prompts) < tokens:
            q_nope, q_rope = torch.split(q, [kind.nope_dim, kind.rope_dim], 2)
            k_weight, v_weight = torch.split(heads.kv_weight, [kind.nope_dim, kind.v_dim], 1)
            absorbed = q.new_empty(tokens, kind.heads, kind.rank)
            torch.bmm(q_nope.transpose(0, 1), k_weight, out=absorbed.transpose(0, 1))
            mixed = self.read(absorbed, q_rope, pages)
            torch.bmm(mixed.transpose(0, 1), v_weight.transpose(1, 2), out=out.transpose(0, 1))
        for start, stop in self.prompts:
            out[start:stop] = whole_prompt(q[start:stop], latents[start:stop], heads.kv_weight, kind)
        return out

    def read(self, q: Tensor, q_rope: Tensor, pages: Pages) -> Tensor:
        """Attend to the latents in pages, as `reference.latent_attention` says. `prompts` may be left out."""
        layout, scale = self.batch.layout, self.mixer.kind.scale
        return self.mixer.ops.latent_attention(q, q_rope, pages, self.page_table, layout, scale)


def whole_prompts(batch: Batch) -> list[tuple[int, int]]:
    """Return the tokens [start, stop) of the step's prompts that begin in it."""
    sequences = batch.sequences[batch.shape.decodes :] if batch.shape.chunks else batch.sequences[:0]
    lens = batch.sequences["stop"] - batch.sequences["start"]
    stops = lens.cumsum()[len(lens) - len(sequences) :]
    found = zip(sequences["start"].tolist(), stops.tolist(), lens[len(lens) - len(sequences) :].tolist(), strict=True)
    return [(stop - n, stop) for position, stop, n in found if position == 0]


def whole_prompt(q: Tensor, latents: Tensor, kv_weight: Tensor, kind: Latent) -> Tensor:
    """Attend among the tokens of one prompt: q [n, Hq, N + R] and latents [n, C + R] -> [n, Hq, V].

    Heads of q, k and v are padded to one size, for which there are kernels.
    """
    latent, k_rope = torch.split(latents, [kind.rank, kind.rope_dim], 1)
    kv = F.linear(latent, kv_weight.flatten(0, 1)).view(len(q), kind.heads, -1)
    k_nope, v = torch.split(kv, [kind.nope_dim, kind.v_dim], 2)
    k = torch.cat([k_nope, k_rope[:, None].expand(-1, kind.heads, -1)], 2)
    width = max(k.shape[2], kind.v_dim)
    q, k, v = (F.pad(x, (0, width - x.shape[2])).transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=kind.scale)
    return out[0, :, :, : kind.v_dim].transpose(0, 1)
