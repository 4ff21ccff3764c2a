"""The offline engine with the built-in model."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from minisgl import LLM, SamplingParams
from minisgl.api.protocol import ChatCompletionRequest
from minisgl.api.requests import SamplingDefaults, chat_message
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.core.errors import ConfigError, InvariantError, RequestError
from minisgl.core.params import Limits
from minisgl.core.plan import FinishReason
from support.bodies import parse_body

pytestmark = pytest.mark.usefixtures("fixed_costs")

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    engine = LLM(threads=1, num_pages=600, max_queued_requests=5)
    yield engine
    assert engine.scheduler.cache.available == 600, "pages are held after the last request"


def test_debug_level_prints_one_line_a_step(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    before = llm.scheduler.step_number
    with caplog.at_level(logging.DEBUG, logger="minisgl"):
        llm.generate([[5] * 40, [6] * 7], SamplingParams(max_tokens=4, ignore_eos=True))
    lines = [r.getMessage() for r in caplog.records if r.name == "minisgl.scheduler.scheduler"]
    assert lines[0].startswith(f"step {before + 1}: 47 prompt tokens of 2 requests, 0 requests decode, 0 wait; ")
    assert [line.partition(":")[2].partition(";")[0] for line in lines[1:]] == [
        " 0 prompt tokens of 0 requests, 2 requests decode, 0 wait"
    ] * 3


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_batch_gives_the_results_of_solo_runs_in_order(llm: LLM) -> None:
    prompts = [
        f"Once upon a time, there was a {animal}" for animal in ("cat", "dog", "fox", "cow", "owl", "bear", "pig")
    ]
    together = llm.generate(prompts, GREEDY)  # more than the queue takes at once
    assert [c.text for c in together] == [llm.generate(p, GREEDY)[0].text for p in prompts]
    assert {c.finish_reason for c in together} <= {FinishReason.LENGTH, FinishReason.STOP}
    assert all(c.prompt_token_ids for c in together)


def test_a_batch_takes_as_many_steps_as_its_longest_request(llm: LLM) -> None:
    lengths = [4, 40, 12, 33]
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=n) for n in lengths]
    prompts = [list(range(300 + i, 500 + i)) for i in range(4)]
    before = llm.scheduler.step_number
    together = llm.generate(prompts, params)
    assert [len(c.token_ids) for c in together] == lengths
    assert llm.scheduler.step_number - before <= max(lengths) + 2
    assert [c.token_ids for c in together] == [
        llm.generate(p, s)[0].token_ids for p, s in zip(prompts, params, strict=True)
    ]


def test_token_ids_and_text_of_a_prompt_give_the_same_result(llm: LLM) -> None:
    ids = llm.tokenizer.tokenizer.encode("Once upon a time").ids
    by_text, by_ids = llm.generate("Once upon a time", GREEDY)[0], llm.generate(ids, GREEDY)[0]
    assert by_text.token_ids == by_ids.token_ids
    assert by_ids.num_cached_tokens < len(by_ids.prompt_token_ids)


def test_chat_ends_with_eos_and_streams(llm: LLM) -> None:
    seen: list[tuple[int, str]] = []
    answer, other = llm.chat(
        [question("What is 12 + 30?"), question("Repeat exactly: grün 東京")],
        SamplingParams(temperature=0, max_tokens=60),
        on_token=lambda index, text: seen.append((index, text)),
    )
    assert "42" in answer.text and answer.finish_reason is FinishReason.STOP
    assert other.text == "grün 東京"
    assert "".join(t for i, t in seen if i == 0) == answer.text
    assert "".join(t for i, t in seen if i == 1) == other.text


def test_a_seed_fixes_the_text_in_any_batch(llm: LLM) -> None:
    story = question("Tell me a story about a fox named Lily.")
    mine = SamplingParams(temperature=1.0, seed=5, max_tokens=30)
    alone = llm.chat(story, mine)[0].text
    crowd = llm.chat([story] * 5, [SamplingParams(temperature=1.0, max_tokens=n) for n in (3, 9, 20, 30)] + [mine])
    assert crowd[4].text == alone
    assert len({c.text for c in llm.chat([story] * 4, SamplingParams(temperature=1.0, max_tokens=30))}) > 1


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=40))[0]
    stop = whole.text[20:24]
    cut = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=40, stop=(stop,)))[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason is FinishReason.STOP
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        ("", GREEDY, "prompt"),
        ([[1, 2, 999_999]], GREEDY, "prompt"),
        (["hello", [-1]], GREEDY, "prompt"),
        ([[1, 2**40]], GREEDY, "prompt"),
        ([[1.5]], GREEDY, "prompt"),
        ([["a"]], GREEDY, "prompt"),
        ([None], GREEDY, "prompt"),
        ([np.array([1.5])], GREEDY, "prompt"),
        (None, GREEDY, "prompt"),
        (5, GREEDY, "prompt"),
        (True, GREEDY, "prompt"),
        ([True], GREEDY, "prompt"),
        (["a", 5], GREEDY, "prompt"),
        ([5, "a"], GREEDY, "prompt"),
        (b"x", GREEDY, "prompt"),
        ({"a", "b"}, GREEDY, "prompt"),
        ({"text": "x"}, GREEDY, "prompt"),
        ({"prompt": None}, GREEDY, "prompt"),
        ({"prompt": "x", "multi_modal_data": {}}, GREEDY, "prompt"),
        ("hello", {"temperature": float("nan")}, "temperature"),
        ("hello", msgspec.structs.replace(GREEDY, stop="abc", n=0), "n"),  # which checks nothing
        ("hello", 5, "sampling_params"),
        ("hello", [GREEDY, GREEDY], "sampling_params"),
        ("hello", "greedy", "sampling_params"),
        ("hello", {"max_tokens": 2**31}, "max_tokens"),
        ([[5] * 4096], SamplingParams(), "prompt"),
        (["a", "b"], [GREEDY], "sampling_params"),
    ],
)
def test_invalid_requests_are_refused_with_their_field_before_any_step(
    llm: LLM, prompts: object, params: object, field: str
) -> None:
    with pytest.raises(RequestError) as refused:
        llm.generate(prompts, params)  # type: ignore[arg-type]
    assert refused.value.param == field
    assert not llm.scheduler.is_busy


CHAT = [{"role": "user", "content": "Hello"}]


def called(name: str, arguments: object) -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def refuse_over_http(body: bytes, limits: Limits) -> None:
    chat_message(parse_body(body, ChatCompletionRequest), SamplingDefaults(), limits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, None),
        ({"messages": [{"role": "usr", "content": "x"}]}, None),
        ({"messages": [{"content": "x"}]}, None),
        ({"messages": [{"role": "user", "content": 5}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
        ({"messages": [["role", "user"]]}, r"Expected `object`, got `str` at `messages\[0\]`"),
        ({"messages": [*CHAT, 5]}, None),
        ({"tools": {"name": "f"}}, None),
        ({"tools": [{"name": "f"}]}, None),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, None),
        ({"chat_template_kwargs": {"messages": 1}}, None),
        ({"chat_template_kwargs": [1]}, None),
        ({"messages": "Hello"}, "chat takes a list of messages"),
        ({"messages": ["Hello"]}, "chat takes a list of messages"),
        ({"messages": CHAT[0]}, "chat takes a list of messages"),
        ({"messages": None}, "chat takes a list of messages"),
        ({"messages": [CHAT, []]}, "messages is empty"),
        ({"messages": [{"role": "user", "content": object()}]}, "messages is not usable: Encoding objects of type"),
    ],
)
def test_a_chat_refuses_what_the_server_refuses_in_its_words(
    llm: LLM, fields: dict[str, object], message: str | None
) -> None:
    """Without a `message`, in the words of /v1/chat/completions."""
    fields = {"messages": CHAT, **fields}
    if message is None:
        with pytest.raises(RequestError) as wanted:
            refuse_over_http(json.dumps(fields).encode(), llm.tokenizer.limits)
        message = re.escape(wanted.value.message)
    with pytest.raises(RequestError, match=message):
        llm.chat(sampling_params=GREEDY, **fields)  # type: ignore[arg-type]
    assert not llm.scheduler.is_busy


def test_a_chat_prompts_as_the_server_does(llm: LLM) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " 12 + 30?"}]
    (want,) = llm.chat(question("What is 12 + 30?"), GREEDY)
    for messages in (({"role": "user", "content": parts},), [{"role": "user", "content": parts, "name": None}]):
        assert llm.chat(messages, GREEDY)[0].prompt_token_ids == want.prompt_token_ids
    text, mapping = (llm.chat([*CHAT, called("f", a)], GREEDY)[0] for a in ('{"a": 1}', {"a": 1}))
    assert text.prompt_token_ids == mapping.prompt_token_ids
    with pytest.warns(UserWarning, match="no effect: chat_template_kwargs.wibble"):
        llm.chat(CHAT, GREEDY, chat_template_kwargs={"wibble": 1})


@pytest.mark.parametrize(
    ("method", "keyword", "hint"),
    [
        ("generate", "temperature", "; write SamplingParams(temperature=...)"),
        ("chat", "max_tokens", "; write SamplingParams(max_tokens=...)"),
        ("generate", "prompt", "; did you mean prompts?"),
        ("chat", "tool", "; did you mean tools?"),
        ("stream", "n", "; write SamplingParams(n=...)"),
        ("embed", "dimension", "; did you mean dimensions?"),
        ("generate", "lora_request", '; write lora="NAME", an adapter of LLM(lora={"NAME": PATH})'),
    ],
)
def test_an_unknown_keyword_says_what_to_write(llm: LLM, method: str, keyword: str, hint: str) -> None:
    with pytest.raises(TypeError) as e:
        getattr(llm, method)("x", **{keyword: 1})
    assert str(e.value) == f"{method} has no parameter {keyword!r}{hint}"


def test_a_stream_gives_what_generate_gives(llm: LLM) -> None:
    for params in (GREEDY, SamplingParams(n=3, seed=1, max_tokens=6, logprobs=1, stop="zzz")):
        (whole,) = llm.generate("Once upon a time", params)
        pieces = [*llm.stream("Once upon a time", params)]
        for want in whole.outputs:
            mine = [piece for piece in pieces if piece.index == want.index]
            assert "".join(piece.text for piece in mine) == want.text
            assert [t for piece in mine for t in piece.token_ids] == want.token_ids
            assert (mine[-1].finish_reason, mine[-1].completion.logprobs) == (want.finish_reason, want.logprobs)


def test_leaving_a_stream_frees_its_pages(llm: LLM) -> None:
    endless = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
    for piece in llm.stream("Once upon a time", endless):
        if len(piece.completion.token_ids) > 3:
            break
    assert (llm.scheduler.is_busy, llm.scheduler.cache.available, llm.detokenizer.entries) == (False, 600, 0)
    stream = llm.stream("Once upon a time", endless)
    next(stream)
    for other in (lambda: llm.generate("x"), lambda: next(llm.stream("x"))):
        with pytest.raises(InvariantError, match="another call or stream of this LLM is open"):
            other()
    stream.close()
    assert llm.generate("x", GREEDY)[0].text
    with pytest.raises(RequestError, match="one prompt per call"):
        llm.stream(["a", "b"])
    with pytest.raises(RequestError, match="prompt is empty"):  # at once, not at the first piece
        llm.stream("")


def test_ctrl_c_costs_the_call_and_not_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.scheduler.step

    def interrupted() -> None:
        monkeypatch.setattr(llm.scheduler, "step", step)
        signal.raise_signal(signal.SIGINT)  # in the middle of a step
        step()

    for call in (llm.generate, lambda *given: [*llm.stream(*given)]):
        monkeypatch.setattr(llm.scheduler, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            call("Once upon a time", GREEDY)
        assert (llm.scheduler.is_busy, llm.scheduler.cache.available, llm.detokenizer.entries) == (False, 600, 0)
    assert llm.generate("Once upon a time", GREEDY)[0].text


def test_an_engine_is_not_used_after_its_end_or_in_a_forked_process() -> None:
    with LLM(Path(BUILTIN_MODEL), threads=1, num_pages=64) as llm:
        stream = llm.stream("Once", GREEDY)
        next(stream)
        assert repr(llm).startswith("LLM(model='model', dtype='float32', quantization='none', device='cpu (1 thread")
        assert "kv_tokens=1024" in repr(llm)
        if (child := os.fork()) == 0:
            try:
                llm.generate("x")
            except InvariantError as e:
                os._exit(7 if "belongs to a parent process" in str(e) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        llm.shutdown()
        llm.shutdown()
    assert repr(llm).endswith(", closed)")
    for call in (lambda: next(stream), lambda: llm.generate("x"), lambda: llm.stream("x"), lambda: llm.chat(CHAT)):
        with pytest.raises(InvariantError, match="this LLM was closed"):
            call()


def test_a_completion_is_shown_in_one_line(llm: LLM) -> None:
    (done,) = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=60, n=2))
    shown = f"Completion({done.text[:60] + '…'!r}, finish_reason=length, prompt_tokens=4, completion_tokens=60"
    assert repr(done) == f"{shown}, choices=2)"


ROOT = Path(__file__).parents[3]
SNIPPETS = [
    code
    for page in ("README.md", "docs/features.md")
    for code in re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.M | re.S)
]


@pytest.mark.parametrize("code", SNIPPETS, ids=range(len(SNIPPETS)))
def test_the_python_in_the_documentation_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "a page", "exec"), {"__name__": "__main__"})
    assert len(capsys.readouterr().out) > 40


def test_a_stop_token_may_be_shown(llm: LLM) -> None:
    whole = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8))[0]
    stop = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(whole.token_ids[5],))
    hidden = llm.generate("Once upon a time", stop)[0]
    shown = llm.generate("Once upon a time", msgspec.structs.replace(stop, include_stop_str_in_output=True))[0]
    assert hidden.token_ids == shown.token_ids == whole.token_ids[:6]
    assert shown.text.startswith(hidden.text) and len(shown.text) > len(hidden.text)
    assert whole.text.startswith(shown.text)


def test_a_prompt_may_fill_the_context_but_for_one_token(llm: LLM) -> None:
    done = llm.generate([[5] * 4095], SamplingParams(temperature=0))[0]
    assert len(done.token_ids) == 1


def test_an_exception_in_the_callback_aborts_all_requests(llm: LLM) -> None:
    def stop(index: int, text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Once upon a time"] * 3, GREEDY, on_token=stop)
    assert not llm.scheduler.is_busy
    assert llm.generate("Once upon a time", GREEDY)[0].text


def test_choices_follow_the_first_and_find_its_prompt_cached(llm: LLM) -> None:
    prompts, heard = [list(range(400, 440)), list(range(600, 640))], set()
    params = [SamplingParams(n=3, seed=2, max_tokens=6, stop="zzz"), SamplingParams(temperature=0, max_tokens=4)]
    three, one = llm.generate(prompts, params, on_token=lambda index, text: heard.add(index))
    assert heard == {0, 1, 2, 3}
    assert (len(three.outputs), one.outputs) == (3, [one])
    assert [c.num_cached_tokens for c in three.outputs[1:]] == [32, 32]
    alone = llm.generate([prompts[0]], SamplingParams(seed=2, max_tokens=6))[0]
    assert three.text == alone.text and len({c.text for c in three.outputs}) > 1


def test_results_read_as_those_of_vllm_and_sglang(llm: LLM) -> None:
    prompt = "Once upon a time"
    ids = llm.get_tokenizer().encode(prompt)
    whole = llm.generate(prompt, GREEDY)[0]
    stop = whole.text[20:24]
    (done,) = llm.generate({"prompt": prompt}, {"temperature": 0, "max_new_tokens": 24, "stop": stop})
    assert llm.generate([{"prompt_token_ids": ids}], GREEDY)[0].text == whole.text
    (output,) = done.outputs
    assert (output.text, output.token_ids, output.index) == (done.text, done.token_ids, 0)
    assert (output.finish_reason, output.stop_reason, done.finished) == ("stop", stop, True)
    assert (done.prompt, done.prompt_token_ids) == (prompt, ids)
    assert (done["text"], done["output_ids"]) == (done.text, done.token_ids)
    assert done["meta_info"] == {
        "id": done.request_id,
        "finish_reason": {"type": "stop", "matched": stop},
        "prompt_tokens": len(ids),
        "completion_tokens": len(done.token_ids),
        "cached_tokens": done.num_cached_tokens,
    }
    with pytest.raises(RequestError, match="max_new_token"):
        llm.generate(prompt, {"max_new_token": 1})


def test_the_tokenizer_writes_what_chat_computes(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    chat = question("What is 12 + 30?")
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    done = llm.chat(chat, GREEDY)[0]
    assert done.prompt_token_ids == ids
    assert isinstance(text, str) and tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(done.token_ids, skip_special_tokens=True) == done.text


def test_a_chat_template_and_its_variables_are_options(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ tone }}: {{ messages[0].content }}")
    options = {"chat_template": str(tmp_path / "t.jinja"), "default_chat_template_kwargs": {"tone": "kind"}}
    with LLM(threads=1, num_pages=64, max_model_len=128, enforce_eager=True, seed=1, **options) as llm:
        assert llm.tokenizer.limits.max_model_len == 128
        for kwargs, tone in ((None, "kind"), ({"tone": "stern"}, "stern")):
            done = llm.chat(question("Hi"), SamplingParams(max_tokens=1), chat_template_kwargs=kwargs)[0]
            assert llm.get_tokenizer().decode(done.prompt_token_ids) == f"{tone}: Hi"


def test_progress_is_shown_on_a_terminal_only(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.process.log.QUIET_S", 0.0)
    llm.generate(["a", "b"], GREEDY)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr().err
    assert shown.startswith("\rgenerate [") and shown.endswith("\n")
    assert re.search(r"2/2 requests, [\d,]+ tokens/s, \d", shown) and max(map(len, re.split("[\r\n]", shown))) < 80


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_size": 3}, "page_size=3 is not one of"),
        ({"page_size": 256}, "page_size=256 is not one of 1, 2, 4, 8, 16, 32, 64, 128"),
        ({"page_size": 0}, "page_size=0 is not one of"),
        ({"page_size": "16"}, "page_size='16' is not of type int"),
        ({"dtype": None}, "dtype=None is not of type str"),
        ({"max_seq_len": 10**9}, "max_seq_len=1000000000"),
        ({"num_pages": 0}, "num_pages=0"),
        ({"memory_ratio": 2.0}, "memory_ratio=2"),
        ({"memory_ratio": 1e-9}, "no memory"),
        ({"dtype": "int3"}, "dtype"),
        ({"cache_type": "magic"}, "radix"),
        ({"attention_backend": "magic"}, "reference"),
        ({"device": "tpu"}, "device"),
        ({"no_such_option": 1}, "no_such_option is not an option"),
        ({"model": "/no/such/folder"}, "does not exist"),
        ({"model_path": "/no/such/folder"}, "does not exist"),
        ({"tp_siz": 2}, "did you mean tp_size"),
        ({"gpu_memory_utilization": 0.9}, "use --memory-ratio"),
        ({"tp-size": 512}, "512 ranks|tp-size=512"),
        ({"num_pages": 10**8}, "num_pages=100000000"),
    ],
)
def test_invalid_settings_are_refused_with_advice(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(**options)  # type: ignore[arg-type]
