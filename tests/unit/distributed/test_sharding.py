"""Shards of heads, features and vocabulary, even memory, and noise that does not depend on the shards."""

from __future__ import annotations

import pytest
import torch

from contract.sampling import check_candidates, make_state
from minisgl.core.errors import ConfigError
from minisgl.distributed.communicator import Communicator, SoloCommunicator
from minisgl.distributed.info import DistributedInfo
from minisgl.distributed.tensor_parallel import VocabParallel
from minisgl.engine.memory import require_even
from minisgl.layers.builder import Builder
from minisgl.layers.linear import Linear
from minisgl.layers.parameter import Source
from minisgl.models.weight import fill_dummy
from minisgl.ops.sampling import gumbel_noise
from minisgl.ops.table import load_ops
from support.ranks import run_ranks

CPU = torch.device("cpu")


def ranks(size: int) -> list[DistributedInfo]:
    return [DistributedInfo(rank, size, size) for rank in range(size)]


def test_shards_partition_the_dimension() -> None:
    for size in (1, 2, 3, 4, 8):
        for count in (size, 3 * size, 8 * size):
            assert [i for info in ranks(size) for i in info.shard(count, "x")] == list(range(count))
        for count in (size, 97, 163, 4096):
            parts = [info.balanced_shard(count) for info in ranks(size)]
            assert [i for part in parts for i in part] == list(range(count))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_kv_heads_are_replicated_if_fewer_than_ranks() -> None:
    assert [list(info.shard_or_replicate(2, "KV heads")) for info in ranks(4)] == [[0], [0], [1], [1]]
    assert [list(info.shard_or_replicate(1, "KV heads")) for info in ranks(3)] == [[0], [0], [0]]
    assert [list(info.shard_or_replicate(4, "KV heads")) for info in ranks(2)] == [[0, 1], [2, 3]]
    for count, size in ((3, 2), (2, 3), (6, 4)):
        with pytest.raises(ConfigError, match=f"{count} KV heads cannot be divided among {size} ranks"):
            ranks(size)[0].shard_or_replicate(count, "KV heads")


def test_weight_loads_its_shard_of_each_tensor() -> None:
    builder = Builder(load_ops("cpu"), torch.float32, CPU, SoloCommunicator(ranks(2)[1], CPU))
    q, kv = builder.shard(4, "heads", unit=3), builder.shard_or_replicate(1, "KV heads", unit=3)
    layer = Linear(builder, {"q": q, "k": kv}, 5, bias=True)
    out = Linear(builder, {"o": 5}, q, bias=True)
    weight, bias, o_weight, o_bias = builder.parameters
    five, half = slice(0, 5), slice(6, 12)
    assert weight.sources == (
        Source("q.weight", (12, 5), (half, five), 0),
        Source("k.weight", (3, 5), (slice(0, 3), five), 6),
    )
    assert [s.slices for s in bias.sources] == [(half,), (slice(0, 3),)]
    assert layer.weight.shape == (9, 5) and layer.bias is bias.tensor
    assert o_weight.sources == (Source("o.weight", (5, 12), (five, half), 0),)
    assert out.weight.shape == (5, 6) and o_bias.sources[0].slices == (five,)
    assert out.bias is None, "only rank 0 adds it to the sum"


def test_dummy_weights_do_not_depend_on_the_ranks() -> None:
    def weights(info: DistributedInfo) -> torch.Tensor:
        builder = Builder(load_ops("cpu"), torch.float32, CPU, SoloCommunicator(info, CPU))
        Linear(builder, {"a": builder.shard(6, "rows"), "b": builder.shard(2, "rows")}, 4, bias=False)
        fill_dummy(tuple(builder.parameters))
        return builder.parameters[0].tensor

    whole, (left, right) = weights(DistributedInfo()), map(weights, ranks(2))
    assert torch.equal(whole, torch.cat([left[:3], right[:3], left[3:], right[3:]]))
    assert whole[0].std() > 0 and not torch.equal(whole[:2], whole[6:])


def test_noise_of_a_token_is_independent_of_shards() -> None:
    keys, positions = torch.tensor([5, -9]), torch.tensor([3, 4], dtype=torch.int32)
    whole = gumbel_noise(keys, positions, 100)
    assert torch.equal(gumbel_noise(keys, positions, 30, 70), whole[:, 70:])


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_best_candidate_equals_sampling_from_all_logits(parts: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 1201) * 4
    logits[3, 7], logits[4, 0], logits[5] = float("nan"), float("inf"), float("-inf")
    logits[6, :1000] = float("-inf")
    logits[7:9, [4, 700, 1200]] = 50.0  # equals in different parts
    state = make_state(70, "cpu", torch.tensor([0.0, 0.3, 1.0, 1.7, 1e-38]).repeat(14))
    positions = torch.arange(64, dtype=torch.int32)
    check_candidates(load_ops("cpu"), logits, state, positions, torch.randperm(70)[:64], parts)


def test_logits_are_gathered_in_order() -> None:
    whole = torch.arange(3 * 11.0).view(3, 11)

    def work(comm: Communicator) -> tuple[torch.Tensor, list[int]]:
        vocab = VocabParallel(comm, 11)
        own = whole[:, vocab.shard.start : vocab.shard.stop]
        return vocab.gather(own), comm.all_gather_int(10 * comm.info.rank)

    for gathered, numbers in run_ranks(3, work):
        assert torch.equal(gathered, whole)
        assert numbers == [0, 10, 20]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_reduce_is_bit_equal_on_all_ranks(dtype: torch.dtype) -> None:
    def work(comm: Communicator) -> torch.Tensor:
        x = torch.randn(7, 33, generator=torch.Generator().manual_seed(comm.info.rank)).to(dtype)
        return torch.cat([comm.sum(x.t()).t(), comm.sum(x[:0])])

    first, *others = run_ranks(3, work)
    parts = [torch.randn(7, 33, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(3)]
    torch.testing.assert_close(first, sum(p.float() for p in parts).to(dtype), rtol=0.02, atol=0.02)
    assert all(torch.equal(first, other) for other in others)


def test_uneven_memory_names_the_ranks() -> None:
    require_even([100 << 30, 80 << 30])
    with pytest.raises(ConfigError, match=r"rank 0 100.00 GiB, rank 1 30.00 GiB"):
        require_even([100 << 30, 30 << 30])


def test_all_gather_object() -> None:
    told = run_ranks(3, lambda comm: comm.all_gather_object((comm.info.rank, b"x" * comm.info.rank, {"why": None})))
    assert told == [[[rank, b"x" * rank, {"why": None}] for rank in range(3)]] * 3
