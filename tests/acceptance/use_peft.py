"""An adapter that PEFT trains on the built-in model, in one batch with the base, and merged.

The server is not asked: `minisgl.LLM` reads the folders, in the environment of the runner (`MINISGL_PYTHON`).
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from checks import MODEL_FOLDER, check, run, user
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ("What is the capital of France?", "Who are you?", "What is 12 + 30?", "Tell me a joke.")
ANSWER = "Ahoy! Ask the captain, not me."
STEPS, TOKENS, BATCH = 60, 12, 64
OURS = """
import json, sys
from minisgl import LLM, SamplingParams
model, lora, names, prompts, tokens = json.load(sys.stdin)
llm = LLM(model, dtype="float32", lora=lora, num_pages=512, max_running_requests=len(prompts))
params = SamplingParams(max_tokens=tokens, temperature=0)
print(json.dumps([o.text for o in llm.generate(prompts, params, lora=names)]))
"""


def ours(model: str, lora: dict[str, str], names: list[str | None], prompts: list[str]) -> list[str]:
    """The greedy texts of minisgl, all in one batch."""
    given = json.dumps([model, lora, names, prompts, TOKENS])
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    command = [os.environ["MINISGL_PYTHON"], "-c", OURS]
    done = subprocess.run(command, input=given, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    texts: list[str] = json.loads(done.stdout)
    return texts


@check
def a_trained_adapter_beside_its_base() -> None:
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
    chats = [tokenizer.apply_chat_template(user(q), tokenize=False, add_generation_prompt=True) for q in QUESTIONS]
    model = AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(STEPS):
        losses = []
        for chat in chats:
            prompt, text = (tokenizer(t, add_special_tokens=False).input_ids for t in (chat, chat + ANSWER))
            labels = torch.tensor([[-100] * len(prompt) + text[len(prompt) :]])
            losses.append(model(input_ids=torch.tensor([text]), labels=labels).loss)
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f} after {STEPS} steps", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        adapter, merged = f"{folder}/adapter", f"{folder}/merged"
        model.save_pretrained(adapter)
        model.merge_and_unload().save_pretrained(merged)
        tokenizer.save_pretrained(merged)
        prompts = [chats[i // 2 % len(chats)] for i in range(BATCH)]
        texts = ours(MODEL_FOLDER, {"pirate": adapter}, ["pirate", None] * (BATCH // 2), prompts)
        alone = ours(merged, {}, [None] * len(chats), chats)
        base = ours(MODEL_FOLDER, {}, [None] * len(chats), chats)
    assert all(text.startswith("Ahoy! Ask the") for text in alone), alone
    assert texts[::2] == [alone[i % len(chats)] for i in range(BATCH // 2)]
    assert texts[1::2] == [base[i % len(chats)] for i in range(BATCH // 2)]
    assert not {*base} & {*alone}


run("peft")
