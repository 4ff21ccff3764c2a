"""The layers' own rules: rotary angles against transformers, merged weights, a tied head."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from contract.checkpoints import COMMON, LLAMA3_ROPE
from minisgl.kernel.ops import load_ops
from minisgl.layers.base import Builder, Source
from minisgl.layers.embedding import Embedding, LMHead
from minisgl.layers.linear import Linear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import RopeConfig, cos_sin_table

CPU = torch.device("cpu")


def builder(dtype: torch.dtype = torch.float32) -> Builder:
    return Builder(load_ops("cpu"), dtype, CPU)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        LLAMA3_ROPE,
    ],
    ids=lambda p: p["rope_type"],
)
def test_angles_are_those_of_transformers(parameters: dict):
    config = LlamaConfig(**COMMON, num_attention_heads=1, rope_parameters=parameters)
    positions = torch.arange(256)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    fields = {("theta" if k == "rope_theta" else "type" if k == "rope_type" else k): v for k, v in parameters.items()}
    table = cos_sin_table(RopeConfig(**fields), 64, 256, CPU)
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], rtol=0, atol=2e-5)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], rtol=0, atol=2e-5)


def test_merged_linear_is_its_parts_side_by_side():
    b = builder()
    layer = Linear(b, {"m.q": 5, "m.k": 2, "m.v": 2}, 4, bias=True)
    weight, bias = b.parameters
    assert weight.sources == (Source("m.q.weight", 0, 5), Source("m.k.weight", 5, 2), Source("m.v.weight", 7, 2))
    assert bias.sources[2] == Source("m.v.bias", 7, 2) and bias.tensor is layer.bias
    torch.nn.init.normal_(layer.weight), torch.nn.init.normal_(layer.bias)
    x = torch.randn(3, 4)
    torch.testing.assert_close(layer.forward(x), x @ layer.weight.T + layer.bias)


def test_a_tied_head_reads_the_embedding_behind_its_norm():
    b = builder()
    embedding = Embedding(b, "e", 11, 4)
    head, norm = LMHead(b, "h", 11, 4, tied=embedding), RMSNorm(b, "n", 4, 0.0)
    assert len(b.parameters) == 2 and head.weight is embedding.weight
    torch.nn.init.normal_(embedding.weight), torch.nn.init.ones_(norm.weight)
    x = embedding.forward(torch.tensor([3], dtype=torch.int32))
    logits = head.forward(x, x.clone(), norm)
    torch.testing.assert_close(logits, torch.nn.functional.rms_norm(2 * x, (4,)) @ embedding.weight.T)
