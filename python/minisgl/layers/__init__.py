"""The parts of a decoder. A layer owns its weights and the rule that fills them; the maths is in `kernel`."""
