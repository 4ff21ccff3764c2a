"""The contract tests of the ops, with the interpreted kernels as the table."""

from contract.test_ops import *  # noqa: F403
