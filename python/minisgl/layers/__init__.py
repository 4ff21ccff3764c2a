"""The parts of a decoder. A layer owns its weights and the rule that fills them; the maths is in `kernel`.

With several ranks each has a share of the heads, of the intermediate features and of the vocabulary, which the layer
says beside the weight. What a block returns is then this rank's part of a sum. The op that adds it to the residual
takes the sum, or a norm in front of that (`distributed/tensor_parallel.py`).
"""
