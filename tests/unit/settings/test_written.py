"""Messages name the options of `LLM(...)` as keywords, as they were written."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl import LLM
from minisgl.core.errors import ConfigError
from minisgl.settings.sources import as_written


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 100000}, "max_model_len=100000 is more than the model's context of 4096 tokens; give less"),
        ({"max_seq_len": 100000}, "max_seq_len=100000 is more than"),
        ({"tensor_parallel_size": 512}, "tensor_parallel_size=512 is too much"),
        ({"dtype": "int3"}, "dtype='int3' is not one of auto, "),
        ({"quantization": "fp8"}, "quantization=fp8 is not for cpu"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be at least 1"),
        ({"chat_template": "/no/file"}, "chat_template=/no/file cannot be read"),
        ({"n_gpu_layers": -1}, "n_gpu_layers: a model runs wholly on the GPU"),
        ({"gpu_memory_utilization": 0.9}, "gpu_memory_utilization: use --memory-ratio"),
    ],
)
def test_keywords(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        LLM(device="cpu", **options)
    assert str(e.value).startswith(message)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("--tp 4 needs 4 GPUs", "TP=4 needs 4 GPUs"),
        ("take more GPUs (--tp)", "take more GPUs (TP)"),
        ("--tp needs", "TP needs"),
        ("give another --port (0 = any)", "give another port (0 = any)"),
        ("--port 1 is taken", "s.yaml, line 3: port=1 is taken"),
        ("--attn fi is unknown; --quantization int4", "--attention-backend fi is unknown; -q int4"),
        ("--tp-size 4, --xtp 4, x--tp 4", "TP=4, --xtp 4, x--tp 4"),
        ("--host 1.2.3.4 and --nonsense 1", "--host 1.2.3.4 and --nonsense 1"),
        ("--api-key-file /k and --api-key exclude", "--api-key-file /k and K exclude"),
    ],
)
def test_every_name_of_an_option_is_replaced_by_the_last_that_was_written(message: str, expected: str) -> None:
    given = [("tp", "--tp "), ("tensor_parallel_size", "TP="), ("port", "s.yaml, line 3: port="), ("api-key", "K=")]
    given += [("attention-backend", "--attention-backend "), ("q", "-q "), (3, "3="), ("nonsense", "N=")]
    assert as_written(message, given) == expected
