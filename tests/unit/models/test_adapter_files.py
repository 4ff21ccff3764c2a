"""Each adapter that cannot be served as its files say is refused by one sentence, before it costs memory."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from minisgl.checkpoint.adapter import adapters_of, allowed_folder, contents_key, make_adapter, read_config
from minisgl.core.errors import ConfigError
from minisgl.layers.adapters import Adapted
from minisgl.layers.parameter import Source
from minisgl.models.adapters import open_adapter

Change = Callable[[Path, dict[str, Any], dict[str, Tensor]], None]

Q = "base_model.model.model.layers.0.self_attn.q_proj"
K = "base_model.model.model.layers.0.self_attn.k_proj"
SHAPES = {"model.layers.0.self_attn.q_proj.weight": (8, 4), "model.layers.0.self_attn.k_proj.weight": (2, 4)}
ADAPTED = [
    Adapted((Source(name, shape, (slice(0, shape[0]), slice(0, shape[1])), 0),), None, True)
    for name, shape in SHAPES.items()
]


def write(folder: Path, change: Change = lambda *_: None) -> Path:
    """An adapter of rank 2, after a change of its folder, configuration and tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj"]}
    tensors = {f"{Q}.lora_A.weight": torch.ones(2, 4), f"{Q}.lora_B.weight": torch.ones(8, 2)}
    tensors |= {f"{K}.lora_A.weight": torch.ones(2, 4), f"{K}.lora_B.weight": torch.ones(2, 2)}
    change(folder, config, tensors)
    if not (folder / "adapter_config.json").exists():
        (folder / "adapter_config.json").write_text(json.dumps(config))
    if tensors and not (folder / "adapter_model.safetensors").exists():
        save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def load(folder: Path) -> Any:
    return open_adapter(folder, make_adapter("a", folder).key, ADAPTED, 16, torch.float16)


def fields(**given: Any) -> Change:
    return lambda folder, config, tensors: config.update(given)


def tensors(new: dict[str, Tensor | None], **given: Any) -> Change:
    """Tensors to add, or to leave out (None), and fields of the configuration."""

    def change(folder: Path, config: dict[str, Any], found: dict[str, Tensor]) -> None:
        config.update(given)
        for name, tensor in new.items():
            if tensor is None:
                del found[name]
            else:
                found[name] = tensor

    return change


def config_file(data: bytes) -> Change:
    return lambda folder, config, tensors: (folder / "adapter_config.json").write_bytes(data)


def weights_file(data: bytes) -> Change:
    return lambda folder, config, tensors: (folder / "adapter_model.safetensors").write_bytes(data)


def header(entries: dict[str, Any], rest: bytes = b"") -> bytes:
    data = json.dumps(entries).encode()
    return struct.pack("<Q", len(data)) + data + rest


def pickled(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors.clear()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x02")


def no_weights(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors.clear()


def sparse(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    data = header({"a": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}})
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(data)
        file.truncate(len(data) + 2**40)


def pipe(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    os.mkfifo(folder / "adapter_model.safetensors")


A = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}
HALF = {f"{Q}.lora_A.weight": torch.ones(2, 4), f"{Q}.lora_B.weight": torch.ones(8, 2)}
EXPERT = "base_model.model.model.layers.0.mlp.experts.3.gate_proj"
REFUSED: dict[str, tuple[Change, str]] = {
    # kinds
    "kind": (fields(peft_type="IA3"), "its peft_type is 'IA3', and only LORA is supported"),
    "no kind": (fields(peft_type=None), "its peft_type is None"),
    "dora": (fields(use_dora=True), "its 'use_dora' is set: DoRA also scales .* merge it into the base"),
    "pissa": (
        fields(init_lora_weights="pissa_niter_4"),
        "init_lora_weights 'pissa_niter_4' changed .* which makes it plain",
    ),
    "loftq": (fields(init_lora_weights="loftq"), "init_lora_weights 'loftq'"),
    "transposed": (fields(fan_in_fan_out=True), "its 'fan_in_fan_out' is set"),
    "saved modules": (fields(modules_to_save=["lm_head"]), "its 'modules_to_save' is set: it replaces whole modules"),
    "tokens": (fields(trainable_token_indices=[1]), "its 'trainable_token_indices' is set"),
    "replicated": (fields(layer_replication=[[0, 2]]), "its 'layer_replication' is set"),
    "activated": (fields(alora_invocation_tokens=[3]), "its 'alora_invocation_tokens' is set"),
    "experts": (fields(target_parameters=["mlp.experts.up"]), "experts cannot be changed by an adapter here"),
    "unknown": (
        fields(new_thing={"a": 1}),
        "its 'new_thing' is set: it may change the result, and is not supported here",
    ),
    # values
    "rank 0": (fields(r=0), r"has a wrong value: Expected `int` >= 1 - at `\$.r`"),
    "rank of a billion": (fields(r=10**9), r"Expected `int` <= 1024 - at `\$.r`"),
    "rank of text": (fields(r="8"), r"Expected `int`, got `str` - at `\$.r`"),
    "large alpha": (fields(lora_alpha=10**400), "has a wrong value"),
    "targets": (fields(target_modules=[3]), r"Expected `str`, got `int` - at `\$.target_modules"),
    "pattern": (fields(alpha_pattern={"(": 2}), r"the pattern '\(' is not a regular expression"),
    "long search": (
        fields(rank_pattern={"(a+)+b": 2}),
        r"the pattern '\(a\+\)\+b' repeats more than 3 parts, or a group",
    ),
    # the file of fields
    "not JSON": (config_file(b"{"), "adapter_config.json is not valid JSON"),
    "a list": (config_file(b"[]"), "adapter_config.json is not a JSON object"),
    "deep": (config_file(b"[" * 10**5), "adapter_config.json is not valid JSON"),
    "huge": (config_file(b" " * (5 << 20)), "adapter_config.json has more than 4 MB"),
    # the file of weights
    "pickle": (pickled, "it has no adapter_model.safetensors, only adapter_model.bin, a pickle, which may run code"),
    "terabytes of zeros": (sparse, "has more than the .* bytes of the largest adapter that fits the slots"),
    "no weights": (no_weights, "it has no adapter_model.safetensors$"),
    "pipe": (pipe, "it has no adapter_model.safetensors$"),
    "empty file": (weights_file(b""), "safetensors cannot be read"),
    "large header": (weights_file(struct.pack("<Q", 10**15) + b"{}"), "safetensors cannot be read"),
    "damaged header": (
        weights_file(struct.pack("<Q", 2) + b"{]"),
        "safetensors cannot be read",
    ),
    "terabytes": (
        weights_file(header({f"{Q}.lora_A.weight": A | {"data_offsets": [0, 10**13]}})),
        "safetensors cannot be read",
    ),
    "negative": (weights_file(header({"a": A | {"data_offsets": [-8, 0]}})), "safetensors cannot be read"),
    "truncated": (weights_file(header({f"{Q}.lora_A.weight": A}, b"0" * 31)), "safetensors cannot be read"),
    # tensors
    "no tensors": (weights_file(header({})), "adapter_model.safetensors has no tensors"),
    "half": (tensors({f"{Q}.lora_B.weight": None}), "model.layers.0.self_attn.q_proj lacks lora_B.weight"),
    "other half": (tensors({f"{Q}.lora_A.weight": None}), "model.layers.0.self_attn.q_proj lacks lora_A.weight"),
    "another's bias": (
        tensors({f"{Q}.bias": torch.ones(8)}, bias="all"),
        "q_proj.bias cannot be changed by an adapter",
    ),
    "embedding": (
        tensors({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 9)}),
        "embed_tokens.lora_embedding_A cannot be changed by an adapter here",
    ),
    "copied head": (
        tensors({"base_model.model.lm_head.base_layer.weight": torch.ones(9, 4)}),
        "lm_head.base_layer.weight cannot be changed by an adapter here.*save_embedding_layers=False",
    ),
    "expert": (
        tensors({f"{EXPERT}.lora_A.weight": torch.ones(2, 4), f"{EXPERT}.lora_B.weight": torch.ones(8, 2)}),
        r"model.layers.0.mlp.experts.3.gate_proj cannot be changed by an adapter here: .* is it for this base\?",
    ),
    "many": (
        tensors({f"base_model.model.layers.{i}.x.weight": torch.ones(1) for i in range(7)}),
        r"layers.0.x.weight, .*layers.4.x.weight and 2 more cannot be changed by an adapter here",
    ),
    "two adapters": (
        tensors({f"{Q}.lora_A.other.weight": torch.ones(2, 4)}),
        "has lora_A.weight of model.layers.0.self_attn.q_proj twice",
    ),
    "not a target": (
        fields(target_modules=["k_proj"]),
        "q_proj are in .*, and the target_modules of .* leave them out",
    ),
    "target without tensors": (
        tensors(dict.fromkeys(HALF)),
        "q_proj are among the target_modules of .*, and adapter_model.safetensors has nothing of them",
    ),
    "other base": (
        tensors({f"{Q}.lora_A.weight": torch.ones(2, 6)}),
        r"lora_A.weight of \S*q_proj is \[2, 6\]; its rank of 2 in .* and the model's weight \[8, 4\] need \[2, 4\]",
    ),
    "other rank": (
        tensors({f"{Q}.lora_B.weight": torch.ones(8, 3)}),
        r"lora_B.weight of \S*q_proj is \[8, 3\]; its rank of 2 .* need \[8, 2\]",
    ),
    "scalar": (tensors({f"{Q}.lora_A.weight": torch.tensor(1.0)}), r"lora_A.weight of \S*q_proj is \[\]; "),
    "rank of the configuration": (
        fields(r=3),
        r"is \[2, 4\]; its rank of 3 in .* need \[3, 4\]|is \[., 2\]; its rank of 3",
    ),
    "rank of a pattern": (
        fields(rank_pattern={"k_proj": 1}),
        r"k_proj is \S+ \S+ its rank of 1 in adapter_config.json",
    ),
    "above the slots": (
        tensors(
            {
                f"{n}.lora_{h}.weight": torch.ones(*s)
                for n, rows in ((Q, 8), (K, 2))
                for h, s in (("A", (17, 4)), ("B", (rows, 17)))
            },
            r=17,
        ),
        "its rank of 17 is above the 16 of the slots: give --max-lora-rank 17",
    ),
    "bias": (fields(lora_bias=True), "_proj lacks lora_B.bias"),
    "bias that is not used": (
        tensors({f"{Q}.lora_B.bias": torch.ones(8)}),
        "q_proj has also lora_B.bias",
    ),
    "integers": (
        tensors({f"{Q}.lora_A.weight": torch.ones(2, 4).int()}),
        "is torch.int32, not a float of 16 bits or more",
    ),
    "NaN": (
        tensors({f"{Q}.lora_A.weight": torch.full((2, 4), torch.nan)}),
        "q_proj has values that are not finite in float16",
    ),
    "no number": (fields(lora_alpha=float("nan")), "_proj has values that are not finite in float16"),
    "overflow": (fields(lora_alpha=1e6), "_proj has values that are not finite in float16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_adapters_are_refused_with_a_reason(tmp_path: Path, name: str):
    change, message = REFUSED[name]
    folder = write(tmp_path / "bad", change)
    with pytest.raises(ConfigError, match=message) as caught:
        load(folder)
    assert str(caught.value).startswith(f"the adapter in {folder} cannot be ") and "\n" not in str(caught.value)


def test_harmless_fields_are_accepted_and_all_tensors_used(tmp_path: Path):
    """As PEFT writes them; the parts of a name around the model's are left out."""

    def change(folder: Path, config: dict[str, Any], found: dict[str, Tensor]) -> None:
        config |= {"bias": "none", "init_lora_weights": True, "lora_dropout": 0.1, "megatron_core": "megatron.core"}
        config |= {"auto_mapping": None, "use_dora": False, "loftq_config": {}, "modules_to_save": None, "other": None}
        config |= {"use_rslora": True, "alpha_pattern": {"k_proj": 6, "^model.*q_proj": 8}, "lora_bias": True}
        for name in [*found]:
            inner = name.replace("model.model.layers", "model.model.language_model.layers")
            found[inner.replace(".weight", ".default.weight")] = found.pop(name).to(torch.bfloat16)
        for name, rows in ((Q, 8), (K, 2)):
            found[f"{name.replace('model.layers', 'model.language_model.layers')}.lora_B.bias"] = torch.ones(rows)

    adapter = load(write(tmp_path / "good", change))
    assert {name.split(".")[-1]: (*low.a.shape, *low.b.shape) for name, low in adapter.items()} == {
        "q_proj": (2, 4, 8, 2),
        "k_proj": (2, 4, 2, 2),
    }
    assert sorted(low.scale for low in adapter.values()) == pytest.approx([6 / 2**0.5, 8 / 2**0.5])
    assert all(low.bias is not None for low in adapter.values())


@pytest.mark.parametrize("given", [{"layers_to_transform": [0], "layers_pattern": "layers"}, {"exclude_modules": "v"}])
def test_modules_that_fields_choose_are_those_of_the_file(tmp_path: Path, given: dict[str, Any]):
    folder = write(tmp_path / "a", tensors(dict.fromkeys(HALF), **given))
    assert [*load(folder)] == ["model.layers.0.self_attn.k_proj"]


def test_a_folder_that_is_none(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "missing", Path("/proc/1/root\0")):
        with pytest.raises(ConfigError, match="cannot be"):
            make_adapter("a", path)


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def denied(self: Path, *args: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    folder = write(tmp_path / "a")
    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(ConfigError, match=r"the adapter in \S+ cannot be read: \S+: Permission denied"):
        make_adapter("a", folder)


def test_keys_follow_the_contents(tmp_path: Path):
    """A file that has changed since the adapter was made is not read as that adapter."""
    one, same = write(tmp_path / "one"), write(tmp_path / "same")
    other = write(tmp_path / "other", tensors({f"{Q}.lora_B.weight": torch.full((8, 2), 2.0)}))
    third = write(tmp_path / "third", fields(lora_alpha=5))
    keys = [contents_key(folder) for folder in (one, same, other, third)]
    assert keys[0] == keys[1] and len({*keys}) == 3
    adapter = make_adapter("a", one)
    (other / "adapter_model.safetensors").rename(one / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="its files have changed since it was loaded; load it again"):
        open_adapter(one, adapter.key, ADAPTED, 16, torch.float32)


def test_adapters_of_the_option(tmp_path: Path):
    folder = write(tmp_path / "all" / "one").parent
    write(folder / "two")
    (folder / "other").mkdir()
    named = {
        f"a={folder}/one,b={folder}/two": ["a", "b"],
        f"{folder}, c={folder}/one": ["one", "two", "c"],
        f"{folder}/one": ["one"],
    }
    for asked, names in named.items():
        assert [adapter.name for adapter in adapters_of(asked)] == names
    refused = {
        f"a={folder}/one,a={folder}/two": "several adapters named a",
        f"{folder}/other": "is not NAME=PATH, and neither it nor a folder in it has adapter_config.json",
        f"a b={folder}/one": "'a b' cannot name an adapter",
        f"a:b={folder}/one": "cannot name an adapter",
        f"={folder}/one": "'' cannot name an adapter",
        f"a={folder}/none": f"the adapter in {folder}/none cannot be served: it is not a folder",
    }
    for asked, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            adapters_of(asked)
    write(folder / "bad", fields(use_dora=True))
    with pytest.raises(ConfigError, match=f"the adapter in {folder}/bad cannot be served: its 'use_dora'"):
        adapters_of(str(folder))


def test_folders_outside_the_root_are_refused(tmp_path: Path):
    root, outside = tmp_path / "root", write(tmp_path / "outside")
    inside = write(root / "inside")
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    (root / "files").mkdir()
    (root / "files" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    (tmp_path / "alias").symlink_to(root)
    assert [allowed_folder(str(root), p) for p in ("inside", str(inside), "x/../inside")] == [inside] * 3
    assert allowed_folder(str(tmp_path / "alias"), str(inside)) == inside
    for path in ("link", "../outside", str(outside), "files", "/", "a\0b"):
        with pytest.raises(ConfigError, match=r"is not below \S+root, the only folder"):
            allowed_folder(str(root), path)


def test_one_read_of_each_configuration(tmp_path: Path):
    assert read_config(write(tmp_path / "a", fields(rank_pattern={"x": 9}, lora_bias=True))).largest_rank == 10
