"""Trains the byte-level BPE on generated text and writes the tokenizer's files, the chat template among them.

python -m training.tokenizer --out build/tokenizer
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from training import skills
from training.words import CITIES, COMMON, GENERAL, NAMES

VOCAB_SIZE = 4096
END_OF_TEXT, IM_START, IM_END = 0, 1, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CONTEXT = 4096

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content is not none and content is defined -%}
{%- for part in content -%}{%- if part.text is defined -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set has_system = messages and messages[0].role in ("system", "developer") -%}
{%- if tools -%}
{{- "<|im_start|>system\\n" -}}
{%- if has_system and messages[0].content -%}{{- text(messages[0].content) + "\\n\\n" -}}{%- endif -%}
{{- HEAD -}}
{%- for tool in tools -%}{{- "\\n" + (tool | tojson) -}}{%- endfor -%}
{{- TAIL + "<|im_end|>\\n" -}}
{%- elif has_system -%}
{{- "<|im_start|>system\\n" + text(messages[0].content) + "<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == "user" or (message.role in ("system", "developer") and not loop.first) -%}
{{- "<|im_start|>" + message.role + "\\n" + text(message.content) + "<|im_end|>\\n" -}}
{%- elif message.role == "assistant" -%}
{{- "<|im_start|>assistant\\n" + text(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function or call -%}
{%- if message.content or not loop.first -%}{{- "\\n" -}}{%- endif -%}
{%- set arguments = call.arguments if call.arguments is string else call.arguments | tojson -%}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + arguments + "}\\n</tool_call>" -}}
{%- endfor -%}
{{- "<|im_end|>\\n" -}}
{%- elif message.role == "tool" -%}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" -%}{{- "<|im_start|>user" -}}{%- endif -%}
{{- "\\n<tool_response>\\n" + text(message.content) + "\\n</tool_response>" -}}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" -%}{{- "<|im_end|>\\n" -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""


def chat_template() -> str:
    """The Jinja template, with the two fixed texts around the tools filled in."""
    from training.conversation import TOOLS_HEAD, TOOLS_TAIL

    return CHAT_TEMPLATE.replace("HEAD", json.dumps(TOOLS_HEAD)).replace("TAIL", json.dumps(TOOLS_TAIL)).rstrip("\n")


def _corpus(seed: int, documents: int) -> Iterator[str]:
    rng = Random(f"tokenizer {seed}")
    for i in range(documents):
        yield "".join(text for text, _ in skills.document(rng, long=i % 20 == 0))
    for words in (COMMON, GENERAL, NAMES, CITIES):  # each word with and without a blank before it
        for word in words:
            yield from (
                f"{word}\n{word} {word}, {word}. {word.capitalize()}\n{word.capitalize()} {word.capitalize()}",
            ) * 8


def train(seed: int, documents: int = 16_000) -> Tokenizer:
    """A byte-level BPE whose digits stand alone and that can write every string."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*(AddedToken(t, special=True, normalized=False) for t in SPECIAL),
                        *(AddedToken(t, special=False, normalized=False) for t in TAGS)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=12,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(_corpus(seed, documents), trainer)
    return tokenizer


def write(tokenizer: Tokenizer, out: Path) -> None:
    """``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``, as ``AutoTokenizer`` reads them."""
    out.mkdir(parents=True, exist_ok=True)
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] in SPECIAL  # the tags stay visible when special tokens are skipped
    (out / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": chat_template(),
    }
    (out / "tokenizer_config.json").write_text(
        json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8"
    )
    (out / "chat_template.jinja").write_text(chat_template(), encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    write(train(args.seed), args.out)


if __name__ == "__main__":
    main()
