"""The layers of a decoder. A layer owns its weights and says which tensors fill them; the maths is in `ops`.

Each rank has a shard of the heads, of the intermediate features and of the vocabulary, declared beside each weight. A
block (attention, MLP: `models/`) returns this rank's partial sum. The op that adds it to the residual sums it over the
ranks (`distributed/tensor_parallel.py`).
"""
