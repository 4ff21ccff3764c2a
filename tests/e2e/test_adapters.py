"""Adapters through a real server and `LLM`: chosen by name, listed, loaded and unloaded while others run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import save_file

from e2e.harness import ServerProcess, eventually
from e2e.test_openapi import run_samples
from minisgl import LLM, SamplingParams
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.core.errors import ConfigError, RequestError
from minisgl.tools.chat.client import ChatClient
from minisgl.tools.chat.shell import Shell

PROMPT = "Once upon a time there was"
BASE, KEY = "minisgl-demo", "secret"


def make_adapter(folder: Path, seed: int, rank: int = 4, value: float | None = None, width: int = 0) -> Path:
    """A random adapter of the built-in model, in PEFT's layout; `value` and `width` break it."""
    folder.mkdir(parents=True)
    c = json.loads((BUILTIN_MODEL / "config.json").read_text())
    hidden, inner = c["hidden_size"] + width, c["intermediate_size"]
    heads = c["num_attention_heads"] * c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    sizes = {"self_attn.q_proj": (heads, hidden), "self_attn.o_proj": (hidden, heads), "mlp.up_proj": (inner, hidden)}
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(c["num_hidden_layers"]):
        for name, (outputs, inputs) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}.lora_"
            tensors[f"{prefix}A.weight"] = torch.randn(rank, inputs, generator=noise) * 0.2
            tensors[f"{prefix}B.weight"] = torch.randn(outputs, rank, generator=noise) * 0.2
    if value is not None:
        next(iter(tensors.values()))[0, 0] = value
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [n.split(".")[1] for n in sizes],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top: Path = tmp_path_factory.mktemp("adapters")
    for seed, (name, rank) in enumerate({"a": 4, "b": 20, "later/c": 8, "later/d": 4}.items()):
        make_adapter(top / name, seed, rank)
    make_adapter(top / "later" / "nan", 9, value=float("nan"))
    make_adapter(top / "later" / "narrow", 9, width=-8)
    (top / "later" / "out").symlink_to(top / "a")
    (top / "later" / "poems-v2").symlink_to(top / "later" / "c")
    (top / "later" / "links").mkdir()
    for file in (top / "a").iterdir():
        (top / "later" / "links" / file.name).symlink_to(file)
    return top


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    lora = ("--lora", f"a={folder / 'a'}", "--lora", f"b={folder / 'b'}", "--max-loras", "2", "--max-lora-rank", "32")
    dynamic = ("--lora-dynamic", str(folder / "later"), "--api-key", KEY, "--num-pages", "1024")
    with ServerProcess(*lora, *dynamic) as server:
        yield server


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client(headers={"authorization": f"Bearer {KEY}"}) as client:
        yield client


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    http = httpx.Client(trust_env=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, http_client=http) as client:
        yield client


def load(http: httpx.Client, name: str, path: str, route: str = "/v1/load_lora_adapter", **more: Any) -> httpx.Response:
    return http.post(route, json={"lora_name": name, "lora_path": path, **more})


def unload(http: httpx.Client, name: str, route: str = "/v1/unload_lora_adapter") -> httpx.Response:
    return http.post(route, json={"lora_name": name})


def complete(client: openai.OpenAI, model: str, tokens: int = 16) -> str:
    return client.completions.create(model=model, prompt=PROMPT, max_tokens=tokens, temperature=0).choices[0].text


def test_a_burst_gives_each_model_its_own_text(client: openai.OpenAI) -> None:
    models = [BASE, "a", f"{BASE}:b"]
    alone = [complete(client, model) for model in models]
    assert len({*alone}) == 3
    with ThreadPoolExecutor(9) as pool:
        assert [*pool.map(lambda model: complete(client, model), models * 3)] == alone * 3


def test_models_are_listed_with_their_parents(client: openai.OpenAI, folder: Path) -> None:
    cards = {card.id: card.model_dump() for card in client.models.list()}
    assert [*cards] == [BASE, "a", "b"]
    assert (cards[BASE]["parent"], cards["a"]["parent"], cards["a"]["root"]) == (None, BASE, str(folder / "a"))
    assert client.models.retrieve("b").id == "b"
    with pytest.raises(openai.NotFoundError, match="only 'minisgl-demo', 'a', 'b'") as e:
        complete(client, "c")
    assert (e.value.code, e.value.param) == ("model_not_found", "model")


def test_every_api_chooses_an_adapter(http: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "temperature": 0}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": chat,
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 4},
        "/v1/responses": {"input": PROMPT, "max_output_tokens": 16},
        "/v1/messages": chat,
    }
    for path, body in bodies.items():
        for chosen in ({"model": "a"}, {"model": BASE, "lora_path": "a"}, {"adapter_id": "a"}):
            assert http.post(path, json=body | chosen).json()["model"] == "a", path
        assert http.post(path, json=body | {"model": "a", "lora_path": "b"}).status_code == 400
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 16, "temperature": 0}}
    texts = {http.post("/generate", json=body | {"lora_path": name}).json()["text"] for name in (None, "a", "b")}
    assert len(texts) == 3
    assert http.post("/generate", json=body | {"model": "a"}).json()["text"] in texts
    for name in ("lora", "lora_request"):
        refused = http.post("/v1/completions", json=bodies["/v1/completions"] | {name: "a"})
        assert (refused.status_code, "use model" in refused.text) == (400, True)
    assert 'lora_generation_tokens_total{adapter="b",model_name="minisgl-demo"}' in http.get("/metrics").text


def test_adapters_come_and_go_while_a_stream_runs(http: httpx.Client, client: openai.OpenAI, folder: Path) -> None:
    assert load(http, "c", "c").text == "Success: LoRA adapter 'c' added successfully."
    whole = complete(client, "c", 200)
    stream = client.completions.create(model="c", prompt=PROMPT, max_tokens=200, temperature=0, stream=True)
    pieces = [next(stream).choices[0].text]
    assert unload(http, "c").text == "Success: LoRA adapter 'c' removed successfully."
    with pytest.raises(openai.NotFoundError):
        complete(client, "c")
    assert "".join(pieces + [chunk.choices[0].text for chunk in stream]) == whole
    assert eventually(lambda: 'adapter="c"' not in http.get("/metrics").text)
    assert unload(http, "c").status_code == 404
    reply = load(http, "c", str(folder / "later" / "c"), "/load_lora_adapter").json()
    assert (reply["success"], sorted(reply["loaded_adapters"])) == (True, ["a", "b", "c"])
    assert load(http, "c", "d").status_code == 400
    assert load(http, "c", "d", load_inplace=True).status_code == 200
    assert complete(client, "c") != whole[: len(complete(client, "c"))]
    assert unload(http, "c", "/unload_lora_adapter").json()["success"]


@pytest.mark.parametrize(
    ("name", "path", "status", "message"),
    [
        ("x", "nan", 400, "NaN|finite"),
        ("x", "narrow", 400, "is [4, 248]"),
        ("x", "../a", 400, "is not below"),
        ("x", "out", 400, "is not below"),
        ("x", "links", 400, "is not below"),
        ("x", "/etc", 400, "is not below"),
        ("x", "c\0", 400, "is not below"),
        ("x", "missing", 400, "is not a folder"),
        (BASE, "c", 400, "is the base's"),
        ("", "c", 400, "cannot name an adapter"),
        ("a", "c", 400, "is loaded already"),
    ],
)
def test_what_cannot_be_served_is_not_loaded(
    http: httpx.Client, name: str, path: str, status: int, message: str
) -> None:
    before = http.get("/v1/models").json()
    response = load(http, name, path)
    assert response.status_code == status, response.text
    assert any(part in response.json()["error"]["message"] for part in message.split("|")), response.text
    assert http.get("/v1/models").json() == before


def test_samples_run(server: ServerProcess, http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    for name in ("load_lora_adapter", "unload_lora_adapter"):
        (sample,) = paths[f"/v1/{name}"]["post"]["x-codeSamples"]
        source = sample["source"].replace("curl ", f"curl -H 'Authorization: Bearer {KEY}' ")
        assert run_samples(server.url, {"x-codeSamples": [sample | {"source": source}]})[0].startswith("Success: ")


def test_the_chat_in_a_terminal_chooses(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    shell = Shell(ChatClient(server.url, KEY), {"temperature": 0, "max_tokens": 8})
    assert {"/lora a", "/lora off"} <= {*shell.completions()}
    lines = iter(["/lora c", "Hello!", "/lora a", "/reset", "Hello!", "/lora off", "/reset", "Hello!", "/quit"])
    shell.run(lambda _: next(lines))
    out, err = capsys.readouterr()
    assert "there is no adapter 'c'" in err and "* a\n  b\n" in out
    base, adapted, again = re.sub(r"(?m)^([* ] \w|\(.*\))\n", "", out).splitlines()
    assert base == again != adapted


def test_changes_need_the_key(server: ServerProcess) -> None:
    with server.client() as anonymous:
        assert load(anonymous, "c", "c").status_code == 401
        assert unload(anonymous, "a").status_code == 401


def test_thousands_of_changes_leave_nothing(http: httpx.Client) -> None:
    for i in range(40):
        assert load(http, f"n{i}", "cd"[i % 2]).status_code == 200
        assert unload(http, f"n{i}").status_code == 200
    assert 'adapter="n' not in http.get("/metrics").text
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == [BASE, "a", "b"]


def test_llm_takes_a_name_for_each_prompt(folder: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8)
    with LLM(lora={"a": folder / "a", "b": str(folder / "b")}, num_pages=256) as llm:
        names = [None, "a", "b"]
        alone = [llm.generate(PROMPT, greedy, lora=name)[0].text for name in names]
        assert len({*alone}) == 3
        assert [done.text for done in llm.generate([PROMPT] * 6, greedy, lora=names * 2)] == alone * 2
        assert "".join(piece.text for piece in llm.stream(PROMPT, greedy, lora="a")) == alone[1]
        chat = [{"role": "user", "content": PROMPT}]
        assert llm.chat(chat, greedy, lora="a")[0].text != llm.chat(chat, greedy)[0].text
        with pytest.raises(RequestError, match="lora='c' is not an adapter of this LLM: a, b"):
            llm.generate(PROMPT, lora="c")
        with pytest.raises(RequestError, match="lora has 2 names for 1 prompts"):
            llm.generate([PROMPT], lora=["a", "b"])
    with pytest.raises(ConfigError, match="several adapters named a"):
        LLM(lora=[f"a={folder / 'a'}", f"a={folder / 'b'}"])
