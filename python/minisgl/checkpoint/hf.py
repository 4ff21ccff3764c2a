"""Finds model folders in Hugging Face's layout, and reads their small files. Imports no torch."""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from minisgl.checkpoint.gguf_folder import gguf_files, gguf_model_folder, gguf_name
from minisgl.checkpoint.quantization import method_of
from minisgl.core.errors import ConfigError

BUILTIN_MODEL: Final = Path(__file__).resolve().parent.parent / "demo" / "model"
BUILTIN_NAME: Final = "minisgl-demo"
# Hub -> (the module with `snapshot_download(id, allow_patterns=...)`, the package that has it).
HUBS: Final = {
    "huggingface": ("huggingface_hub", "huggingface_hub"),
    "modelscope": ("modelscope", "'minisgl[modelscope]'"),
}
# A file with the settings of quantized weights -> their method, if the file does not show it.
QUANTIZATION_FILES: Final = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
PIECE_BYTES: Final = 4096  # read from each tensor for the fingerprint of a model
# The names of the context length and of the hidden size, older ones last.
LENGTHS: Final = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
WIDTHS: Final = ("hidden_size", "n_embd", "d_model")
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_OTHER_FORMATS: Final = {
    "adapter_config.json": "a LoRA adapter",
    "*.bin": "PyTorch's pickled weights",
    "*.npz": "MLX weights",
}
# What is given as a model and is neither a folder nor a hub's id -> the way forward.
_OTHER_NAMES: Final = {
    r"(?:https?://)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+).*": r"is an address; give the id \1",
    r"(?i).*\.gguf": "does not exist; give an existing GGUF file",
    r"[\w./-]+:[\w.-]+": "is a name for Ollama or llama.cpp; give the original model's hub id, like Qwen/Qwen3-8B",
    r".*": "does not exist; give an existing folder or a hub id like owner/name",
}
_SMALL_FILES: Final = ["*.json", "*.jinja"]
_WEIGHTS: Final = ["*.safetensors"]
# Fields of a multimodal model that count, and not those of its text part.
OF_WHOLE: Final = ("architectures", "tie_word_embeddings", "quantization_config", "compression_config")


def resolve_model(model: str, source: str = "huggingface", weights: bool = True, revision: str | None = None) -> Path:
    """Return the folder of `model`: "" for the built-in model, else a local folder, a GGUF file or an id of `source`.

    Models of a hub are downloaded once, at `revision` if given: the small files first, then, with `weights`, the
    weights. Raises `ConfigError` if the model does not exist.
    """
    if not model:
        if not (BUILTIN_MODEL / "config.json").is_file():
            raise ConfigError(f"the built-in demo model is missing from {BUILTIN_MODEL}; give --model FOLDER")
        return BUILTIN_MODEL
    path = Path(model).expanduser()
    if files := gguf_files(path):
        return gguf_model_folder(files)
    if path.is_dir():
        _require_config(path, str(path))
        return path
    if path.exists():
        hint = f", such as {path.parent}" if (path.parent / "config.json").is_file() else ""
        raise ConfigError(f"{path} is a file; --model takes a folder with config.json and safetensors{hint}")
    if path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(model):
        found = ((re.fullmatch(pattern, model, re.DOTALL), way) for pattern, way in _OTHER_NAMES.items())
        raise ConfigError(next(f"model {model} {match.expand(way)}" for match, way in found if match))
    folder = _download(model, source, revision, _SMALL_FILES)
    _require_config(folder, model)
    return _download(model, source, revision, _SMALL_FILES + _WEIGHTS) if weights else folder


def _require_config(folder: Path, name: str) -> None:
    if not (folder / "config.json").is_file():
        found = _other_formats(folder, name)
        # Such as the hub's cache, with its snapshots/HASH, or a folder of several models.
        inner = min([*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json")], default=None)
        hint = "" if inner is None else f", such as {inner.parent}"
        raise ConfigError(f"{name} has no config.json{found}; --model takes a folder in Hugging Face's layout{hint}")


def _other_formats(folder: Path, name: str) -> str:
    """Return the part of a message that says what the folder has instead of safetensors; "" if nothing."""
    found = [what for pattern, what in _OTHER_FORMATS.items() if any(folder.glob(pattern))]
    if "gguf" in name.lower() and not found:  # such files are not downloaded from a hub
        found = ["GGUF weights (download a file and give its path)"]
    return f", but {' and '.join(found)}, which cannot be served" if found else ""


def _download(hub_id: str, source: str, revision: str | None, patterns: list[str]) -> Path:
    if source not in HUBS:
        raise ConfigError(f"--download-source {source!r} is not one of {', '.join(HUBS)}")
    module, package = HUBS[source]
    try:
        download = import_module(module).snapshot_download
    except ImportError:
        raise ConfigError(
            f"there is no folder {hub_id}; to download the model from {source}, `pip install {package}`, "
            "or give the path of a local model folder"
        ) from None
    try:
        return Path(download(hub_id, revision=revision, allow_patterns=patterns))
    except Exception as e:  # errors of hubs have no common base: HTTP, file system, missing repository, offline mode
        cause = str(e).strip().partition("\n")[0]
        raise ConfigError(
            f"could not download {hub_id} from {source} ({type(e).__name__}: {cause}); "
            "download it elsewhere and give --model its local path"
        ) from e


def model_name(model: str) -> str:
    """Return the name under which `model` is served."""
    if not model:
        return BUILTIN_NAME
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name
    return gguf_name(path) if gguf_files(path) else model


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`. Raises `ConfigError` if that fails."""
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def read_json_value(path: Path) -> Any:
    """Read the JSON value in `path`. Raises `ConfigError` if that fails."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is not valid JSON ({e}); is the download complete?") from e


def load_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Its `quantization_config` gets the fields that only a file of QUANTIZATION_FILES has.

    Of a multimodal model, return the configuration of the text part; the architecture stays that of the whole.
    """
    config = text_part(read_json(folder / "config.json"))
    settings = config.get("quantization_config", config.get("compression_config"))  # the name of early llm-compressors
    for name, method in QUANTIZATION_FILES.items():
        if (settings is None or isinstance(settings, dict)) and (folder / name).is_file():
            found = read_json(folder / name)
            found = found.get("quantization", found)
            if isinstance(found, dict):
                given = {field: value for field, value in (settings or {}).items() if value is not None}
                settings = {"quant_method": method_of(found, method)} | found | given
            else:
                settings = settings or found
    return config if settings is None else config | {"quantization_config": settings}


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a multimodal model's decoder; `config` itself if the model has no other parts."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    whole = {name: value for name, value in config.items() if not name.endswith("_config") and value is not None}
    of_whole = {name: config[name] for name in OF_WHOLE if config.get(name) is not None}
    # transformers ties the head of a multimodal model by default, and not if the checkpoint has another.
    return {"tie_word_embeddings": True} | whole | text | of_whole


def load_generation_config(folder: Path) -> dict[str, Any]:
    """Read generation_config.json; {} if the folder has none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def first_of(config: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Return the first of the fields `names` that `config` has; None if it has none."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def max_model_len(config: dict[str, Any]) -> int:
    """Return the model's context length in tokens.

    LongRoPE's context ends at the original length: beyond it, the frequencies of all positions would change.
    """
    longest = first_of(config, LENGTHS)
    if not isinstance(longest, int) or not 2 <= longest < 2**31:
        raise ConfigError(f"config.json has max_position_embeddings={longest!r:.60}; a number of tokens is needed")
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, dict) and "short_factor" in rope:
        key = "original_max_position_embeddings"
        original = config.get(key) or rope.get(key)
        return min(longest, original) if isinstance(original, int) else longest
    return longest


def tensor_names(path: Path) -> list[str]:
    """Return the names of the tensors in a safetensors file, which `require_complete` checks; none for a GGUF file."""
    from safetensors import SafetensorError, safe_open  # not before a command speaks

    if path.suffix == ".gguf":
        return []
    try:
        with safe_open(path, framework="np") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as e:
        raise ConfigError(f"{path} cannot be read ({e}); is the download complete?") from None


def require_complete(path: Path) -> None:
    """Raise `ConfigError` unless the safetensors file `path` is as long as its header says.

    A GGUF file was checked when its folder was made.
    """
    tensor_names(path)


def fingerprint(folder: Path, *, has_weights: bool) -> str:
    """Return a digest that identifies the model: of config.json and, with `has_weights`, a piece of each tensor.

    Of a GGUF file, config.json has what identifies the file.
    """
    digest = blake2b(json.dumps(load_config(folder), sort_keys=True).encode(), digest_size=16)
    files = weight_files(folder) if has_weights else []
    for path in (file for file in files if file.suffix != ".gguf"):
        add_pieces(digest, path)
    return digest.hexdigest()


def add_pieces(digest: blake2b, path: Path) -> None:
    """Add to a digest the header of a safetensors file, and a piece of each tensor."""
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        digest.update(header)
        for name, tensor in sorted(json.loads(header).items()):
            if name != "__metadata__":
                start, end = tensor["data_offsets"]
                file.seek(8 + len(header) + (start + end) // 2)
                digest.update(file.read(min(PIECE_BYTES, (end - start) // 2)))


def weight_files(folder: Path) -> list[Path]:
    """Return the checkpoint's safetensors or GGUF files, sorted by name.

    The choice is that of transformers: model.safetensors, else the files in the index, else model* or all files.
    """
    if (single := folder / "model.safetensors").is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        patterns = ("model*.safetensors", "*.safetensors", "*.gguf")
        files = next(filter(None, (sorted(folder.glob(pattern)) for pattern in patterns)), [])
        if not files:
            raise ConfigError(f"{folder} has no *.safetensors weights{_other_formats(folder, folder.name)}")
        return files
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ConfigError(f"{index} names {name}, which is not in {folder}; is the download complete?")
    return [folder / name for name in names]
