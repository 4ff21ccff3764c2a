"""The parts of a decoder. A layer owns its weights and the rule that fills them; the maths is in `ops`.

Each rank holds a shard of the heads, of the intermediate features and of the vocabulary, declared beside each weight. A
block of them (attention, MLP: `models/`) returns this rank's partial sum, and the op that adds it to the residual sums
over the ranks (`distributed/tensor_parallel.py`).
"""
