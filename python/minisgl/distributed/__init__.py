"""Tensor parallelism: the ranks of one model, how they meet, and their collectives.

- `info`: DistributedInfo (rank, size, shards) and where the ranks meet
- `group`: how the ranks find each other
- `control`: plans from rank 0 to the other ranks
- `communicator`, `pynccl`: the collectives by gloo, torch's NCCL and NCCL itself
- `peer`: all-reduce through the memory of the GPUs of one host
- `tensor_parallel`: where collectives enter the model and sampling
"""
