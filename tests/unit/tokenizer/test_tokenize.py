"""Prompts -> token ids, compared with transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from minisgl.api.parsers.output import OutputForms
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.core.errors import ConfigError, RequestError
from minisgl.core.message import EncodeMsg, TokenizeMsg, ids_to_bytes
from minisgl.core.params import Limits, SamplingParams
from minisgl.process import trials
from minisgl.tokenizer import tokenize as tokenize_module
from minisgl.tokenizer.template import MAX_MESSAGES, ChatTemplate
from minisgl.tokenizer.tokenize import TokenizeManager, model_limits

TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "description": "<b>größe & 'x'</b>",
        "parameters": {"type": "object", "properties": {}},
    },
}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "  Hi <|im_end|> there é🙂 "}]},
    {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "u"}], "tools": [TOOL]},
    {
        "messages": [
            {"role": "user", "content": "u"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "get", "arguments": {"a": "ü"}}}],
            },
            {"role": "tool", "content": "42", "tool_call_id": "1"},
        ]
    },
    {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False},
    {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer is "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
]


def msg(**fields: Any) -> TokenizeMsg:
    return TokenizeMsg(uid=1, sampling_params=SamplingParams(max_tokens=1), **fields)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("which", ["made", "demo"])
@pytest.mark.filterwarnings("default")
def test_chat_equals_transformers(folder: Path, chat: dict[str, Any], which: str) -> None:
    from transformers import AutoTokenizer

    path = folder if which == "made" else BUILTIN_MODEL
    judge = AutoTokenizer.from_pretrained(path)
    expected = judge.apply_chat_template(
        chat["messages"],
        tools=chat.get("tools"),
        add_generation_prompt=chat.get("add_generation_prompt", True),
        continue_final_message=chat.get("continue_final_message", False),
        tokenize=True,
        return_dict=False,
    )
    assert TokenizeManager(path).tokenize(msg(**chat)).tolist() == expected


def test_special_tokens_are_added_to_plain_prompts_only(folder: Path) -> None:
    manager = TokenizeManager(folder)
    assert manager.tokenize(msg(text="hello"))[0] == 0
    bare = manager.tokenize(msg(text="hello", add_special_tokens=False)).tolist()
    assert bare == manager.tokenize(msg(text="hello")).tolist()[1:]
    assert manager.tokenize(msg(messages=[{"role": "user", "content": "hello"}]))[0] == 1


def write_templates(folder: Path, files: dict[str, str], listed: dict[str, str] | None = None) -> None:
    """Chat templates as files and in tokenizer_config.json."""
    config: dict[str, Any] = {"bos_token": "<b>"}
    if listed is not None:
        config["chat_template"] = [{"name": name, "template": text} for name, text in listed.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("files", "listed"),
    [
        ({}, {"default": "plain{{ bos_token }}", "tool_use": "tools {{ tools | length }}"}),
        ({"chat_template.jinja": "file {{ x }}"}, {"default": "plain", "tool_use": "tools"}),
        ({"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "more {{ tools }}"}, None),
        ({"additional_chat_templates/default.jinja": "more"}, {"default": "plain"}),
    ],
)
def test_templates_are_found_where_transformers_finds_them(
    folder: Path, tmp_path: Path, files: dict[str, str], listed: dict[str, str] | None
) -> None:
    from transformers import AutoTokenizer

    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, tmp_path)
    write_templates(tmp_path, files, listed)
    judge, ours = AutoTokenizer.from_pretrained(tmp_path), ChatTemplate.of_folder(tmp_path)
    chat = [{"role": "user", "content": "u"}]
    for tools in (None, [TOOL]):
        assert ours.render(chat, tools, {"x": 3}) == judge.apply_chat_template(chat, tools=tools, x=3, tokenize=False)


def test_templates_of_processors_are_the_last_choice(folder: Path, tmp_path: Path) -> None:
    """transformers reads them with a multimodal model's processor, not with its tokenizer."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, tmp_path)
    of_processor = {"chat_template.json": json.dumps({"chat_template": "{{ messages[0].content }} seen"})}
    write_templates(tmp_path, of_processor)
    chat = [{"role": "user", "content": "u"}]
    assert ChatTemplate.of_folder(tmp_path).render(chat) == "u seen"
    write_templates(tmp_path, of_processor, {"default": "plain"})
    assert ChatTemplate.of_folder(tmp_path).render(chat) == "plain"


GENERATION = (
    "{% set y = 'out' %}{% for m in messages %}{% if m.role == 'assistant' %}\n  {%- generation -%}\n"
    "{% set y = m.content %}{{ loop.index }}{{ m.content }}{{ y }}\n{% endgeneration %}\n{% else %}{{ m.content }}\n"
    "{% endif %}{{ y }}{% endfor %}{% generation %} {% if add_generation_prompt %}ok{% endif %}{% endgeneration %}"
)


@pytest.mark.filterwarnings("default")
def test_generation_blocks_are_text(folder: Path, tmp_path: Path) -> None:
    """Trainers' marks in published templates."""
    from transformers import AutoTokenizer

    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, tmp_path)
    write_templates(tmp_path, {"chat_template.jinja": GENERATION})
    chat = [{"role": role, "content": role[0]} for role in ("user", "assistant", "user", "assistant")]
    want = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate.of_folder(tmp_path).render(chat) == want
    assert "2aa" in want and want.endswith("ok")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% foo %}", "it does not compile: Encountered unknown tag 'foo'"),
        ("{% if x %}" * 3000 + "{% endif %}" * 3000, "it does not compile: maximum recursion depth"),
        ("{% for x in messages %}" * 30 + "{% endfor %}" * 30, "it does not compile: too many"),
        ("{{ 'a' * 10**10 }}", "trying it takes more than"),
        ("{{ 'a' | center(10**10) }}", "trying it takes more than"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "trying it takes more than"),
        ("{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "trying it takes more than"),
    ],
)
def test_an_unusable_template_costs_only_chats(folder: Path, tmp_path: Path, source: str, says: str) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, tmp_path)
    write_templates(tmp_path, {"chat_template.jinja": source, "additional_chat_templates/tool_use.jinja": "ok"})
    manager = TokenizeManager(tmp_path)
    assert says in manager.template.problems["default"]
    assert len(manager.tokenize(msg(text="hello"))) > 0
    with pytest.raises(RequestError, match="cannot be used") as e:
        manager.tokenize(msg(messages=[{"role": "user", "content": "u"}]))
    assert (e.value.status, e.value.code) == (400, "no_chat_template") and says in e.value.message
    assert manager.template.render([{"role": "user", "content": "u"}], [TOOL]) == "ok"
    assert OutputForms.of_model(manager.template, "auto", "auto") == OutputForms()


def test_a_trial_that_cannot_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_templates(tmp_path, {"chat_template.jinja": "{# tried here only #}"})
    monkeypatch.setattr(trials, "module_environment", lambda: {"PYTHONPATH": "", "PYTHONHOME": "/nowhere"})
    (problem,) = ChatTemplate.of_folder(tmp_path).problems.values()
    assert problem.startswith("trying it failed: ") and "\n" not in problem


def test_variables_reach_the_template_that_reads_them(tmp_path: Path) -> None:
    write_templates(tmp_path, {"chat_template.jinja": "{% set a = a | default(1) %}{{ a }}{{ self is defined }}"})
    template = ChatTemplate.of_folder(tmp_path)
    assert template.variables == {"a"}
    assert template.render([], variables={"a": 2, "self": 1, "messages": 1, "template": 1}) == "2True"


def test_developer_becomes_system_for_templates_without_it(folder: Path) -> None:
    template = ChatTemplate.of_folder(folder)
    chat = [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}]
    assert "<|im_start|>system\nd" in template.render(chat)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{{ raise_exception('no system please') }}", "no system please"),
        ("{{ messages[0].content + 1 }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{% for a in range(99999) %}{{ messages[0].content * 100 }}{% endfor %}", "too large"),
        ("{{ messages.append(1) }}", "refuses"),
    ],
)
def test_template_errors_are_request_errors(tmp_path: Path, source: str, word: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(RequestError, match=word) as e:
        ChatTemplate.of_folder(tmp_path).render([{"role": "user", "content": "long"}])
    assert e.value.param == "messages"
    assert e.value.status == 400


def test_conversations_have_limits(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="the limit is"):
        ChatTemplate.of_folder(folder).render([{"role": "user", "content": ""}] * (MAX_MESSAGES + 1))
    with pytest.raises(RequestError, match="no chat template"):
        ChatTemplate.of_folder(tmp_path).render([])


@pytest.mark.parametrize("extra", [-1, 0, 1, 1000])
def test_the_context_boundary_is_exact(folder: Path, extra: int) -> None:
    manager = TokenizeManager(folder)
    ids = [5] * (manager.limits.max_model_len - 1 + extra)
    if extra <= 0:
        assert len(manager.tokenize(msg(input_ids=ids_to_bytes(ids)))) == len(ids)
    else:
        with pytest.raises(RequestError, match=f"prompt is too long: .* length is 256 tokens, .* {len(ids)} and") as e:
            manager.tokenize(msg(input_ids=ids_to_bytes(ids)))
        assert e.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"text": "x" * 10_000_000}, "prompt is too long: .* length is 256 tokens, .* 10000000 characters"),
        ({"input_ids": b""}, "prompt is empty"),
        ({"input_ids": ids_to_bytes([512])}, "outside 0 to 511"),
        ({}, "no prompt"),
    ],
)
def test_invalid_prompts_are_refused(folder: Path, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        TokenizeManager(folder).tokenize(msg(**fields))


def test_a_folder_without_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        TokenizeManager(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a readable tokenizer"):
        TokenizeManager(tmp_path)


def test_long_texts_cost_no_more_than_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = TokenizeManager(BUILTIN_MODEL, Limits(max_model_len=2048, vocab_size=4096))
    text = "Once upon a time there was a fox. " * 1000
    monkeypatch.setattr(tokenize_module, "EXACT_CHARS", 10_000)
    monkeypatch.setattr(tokenize_module, "PIECE_CHARS", 4096)
    pieces: list[str] = []
    encode = manager.tokenizer.encode_batch_fast

    def counted(texts: list[str], **options: Any) -> Any:
        pieces.extend(texts)
        return encode(texts, **options)

    monkeypatch.setattr(manager, "tokenizer", SimpleNamespace(encode_batch_fast=counted))
    with pytest.raises(RequestError, match=r"at least \d+ tokens in 34000 characters") as e:
        manager.tokenize(TokenizeMsg(uid=1, sampling_params=SamplingParams(), text=text))
    assert (e.value.status, e.value.code) == (400, "context_length_exceeded")
    assert 2 <= len(pieces) <= 4 and set(map(len, pieces)) == {4096}
    pieces.clear()
    monkeypatch.setattr(tokenize_module, "MAX_CONTEXTS", 2)
    with pytest.raises(RequestError, match="at least"):
        manager.encode(EncodeMsg(uid=1, prompt=TokenizeMsg(uid=1, sampling_params=SamplingParams(), text=text)))
    assert 4 <= len(pieces) < 8


SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Be brief. Who are you?"}


@pytest.mark.parametrize(
    ("chat", "end"),
    [
        ({"messages": [SYSTEM, USER]}, "Be brief.<|im_end|>\n<|im_start|>user\n"),
        ({"messages": [SYSTEM | {"role": "developer"}, USER]}, "Be brief.<|im_end|>\n<|im_start|>user\n"),
        ({"messages": [SYSTEM, SYSTEM, USER, SYSTEM, USER]}, "Be brief.<|im_end|>\n<|im_start|>user\n"),
        ({"messages": [USER], "tools": [TOOL]}, "<|im_start|>user\n"),
        ({"messages": [USER]}, None),
        ({"messages": [SYSTEM]}, None),
        ({"text": "Be brief."}, None),
    ],
)
def test_the_end_of_the_system_prompt_is_found(folder: Path, chat: dict[str, Any], end: str | None) -> None:
    """Where other conversations with the same one part from this one."""
    manager = TokenizeManager(folder, msgspec.structs.replace(model_limits(folder), has_snapshots=True))
    for _ in range(2):
        ids = manager.tokenize(msg(**chat))
        count = manager.system_tokens(msg(**chat), ids)
        head = manager.tokenizer.decode(ids[:count].tolist(), skip_special_tokens=False)
        assert head.endswith(end) and "Who" not in head if end else count == 0
    for i in range(20):
        manager.system_tokens(msg(messages=[SYSTEM | {"content": str(i)}, USER]), ids)
    assert len(manager._heads) <= 16


def test_a_template_may_refuse_a_system_prompt_alone(folder: Path) -> None:
    template = ChatTemplate.of_folder(
        folder, "{% if not messages[1].content %}{{ raise_exception('no') }}{% endif %}text"
    )
    manager = TokenizeManager(folder, msgspec.structs.replace(model_limits(folder), has_snapshots=True), template)
    ids = manager.tokenize(msg(messages=[SYSTEM, USER]))
    assert manager.system_tokens(msg(messages=[SYSTEM, USER]), ids) == 0
