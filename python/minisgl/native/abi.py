"""The structures that Python and the C++ step share. Each is declared once, here or in `minisgl.core.layout`.

`python -m minisgl.native.abi` writes `cpp/layout.h` from the declarations. The layout version is a checksum of that
file. A library that was compiled from another version is refused when it is loaded.
"""

from __future__ import annotations

import ctypes
import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from minisgl.core.layout import (
    COPY,
    FOLD,
    HISTORY_HEAD,
    PAGE_WRITE,
    PROPOSAL,
    PROPOSED,
    ROW,
    ROW_STATE,
    SEQUENCE,
    SLOT_ID,
    STATE_LEN,
    Flag,
    fields,
)
from minisgl.settings.options import MAX_DRAFTS

HEADER: Final = Path(__file__).parent / "cpp" / "layout.h"

_Fields = tuple[tuple[str, str], ...]
"""Rows of (C++ type, names of the fields with that type). All types but structures have 8 bytes."""

LOW_RANK: Final[_Fields] = (  # what the slots have of a projection, with the letters of ops/adapters.py
    ("const void*", "a shift b ranks"),  # in the model's type, of the first slot; a and b are packed
    ("int64_t", "stride rank modules"),  # elements from slot to slot; r; P
    ("const int64_t*", "rows"),  # [num_rows, 3] of `ModuleRows`
    ("int64_t", "num_rows"),
)
PACKED: Final[_Fields] = (  # one matrix, or several of a shape, one after another
    ("const void*", "data"),
    ("int64_t", "bits rows cols"),  # bits: 8, 4, or 0 for the model's type; the rows are those of one matrix
    ("const float*", "bias"),  # [matrices, rows] or null
    ("const LowRank*", "adapter"),  # of the slots, or null
)
RECURRENCE: Final[_Fields] = (  # of gated DeltaNet, with the letters of ops/gated_delta.py
    ("const float*", "conv"),  # [W, C]
    ("const float*", "rate dt_bias norm"),  # [Hv] of the decay: -exp(A_log); [Hv]; [Dv]
    ("int64_t", "key_heads value_heads key_dim value_dim width tokens"),  # tokens: R
    ("int64_t", "stride"),  # bytes from slot to slot, of all:
    ("void*", "delta recent decay inputs"),  # `DeltaState`; null where a layer has attention
)
LAYER_WEIGHTS: Final[_Fields] = (
    ("Packed", "qkv o"),  # of a recurrence: q, k, v and z
    ("Packed", "up down shared_up shared_down"),  # of the MLP or all experts, and beside experts; up has the gate above
    ("Packed", "router"),  # in float32, or null; row `experts`: shared gate, and its adapter
    ("Packed", "gate"),  # of attention's output: [heads or heads * dim, hidden], or null
    ("Packed", "input_gate input_projection"),  # of the layer's own inputs, or null
    ("Packed", "beta_decay"),  # [2 Hv, hidden] of a recurrence
    ("Recurrence", "recurrence"),
    ("const float*", "rank_bias expert_scales"),  # [experts] for the choice only, and for weights, or null
    ("const float*", "input_norm attention_norm mlp_norm output_norm"),  # before and after both blocks, or null
    ("const float*", "router_norm dense_norm experts_norm mixed_norm"),  # of experts that are beside `shared`, or null
    ("const float*", "projection_norm"),  # after input_projection, or null
    ("const float*", "q_norm k_norm v_norm"),  # or null
    ("const float*", "cos_sin"),  # [positions, dim]
    ("int64_t", "heads kv_heads dim window"),  # window: 0 = none
    ("const int32_t*", "page_table"),  # [table_rows, table_width], of the layer's group; of STATE: slots
    ("int64_t", "cache_stride"),  # bytes from page to page, of both:
    ("void*", "cache"),  # [pages, 2, kv_heads, page, dim]
    ("float*", "cache_scale"),  # [pages, 2, kv_heads, page] of a cache in E4M3, or null
    ("const float*", "sinks q_scale"),  # [heads] and [positions], or null
    ("double", "scale softcap output_scale"),  # of scores, and of the layer's output; softcap: 0 = none
)
MODEL_SPEC: Final[_Fields] = (
    ("int64_t", "is_bf16 layers hidden vocab page threads is_tied"),
    ("int64_t", "is_parallel is_layer_norm norms_all_heads activation expert_activation gate_activation"),
    ("int64_t", "experts top_k groups top_groups is_sigmoid normalises"),
    ("double", "eps block_eps embedding_scale expert_scale router_cap logit_cap"),  # block_eps: of all other norms
    ("const LayerWeights*", "weights"),  # [layers]
    ("const void*", "embedding"),  # [vocab, hidden]; if it is tied, only the packed head is read
    ("Packed", "head"),
    ("const float*", "final_norm"),
    ("int64_t", "input_size"),  # of each layer's own inputs; 0: there are none, nor the fields of this kind
    ("const void*", "input_embedding"),  # [ids, layers * input_size]
    ("Packed", "input_projection"),
    ("const float*", "input_norm"),  # [input_size]
    ("double", "input_scale input_eps"),
    ("int32_t*", "page_tables"),  # [groups, table_rows, table_width]
    ("int64_t", "table_rows table_width"),
    ("int32_t*", "last_token"),  # this and the following are [rows]
    ("Row*", "rows"),
    ("int32_t*", "lengths drafts"),  # of `Drafting`, or null
    (
        "void*",
        "target",
    ),  # of a draft model: the model whose tokens it drafts; the fields below: of a head on its hidden states
    ("Packed", "fc"),  # [hidden, num_taps * hidden] in 8 bits; with an embedding_norm [hidden, 2 * hidden]
    ("const float*", "embedding_norm hidden_norm"),  # without the first, it is the layer's input_norm, as in EAGLE-3
    ("const int64_t*", "draft_ids taps"),  # [head's rows] token ids, or null; [num_taps] layers of the target
    ("int64_t", "num_taps"),
)
ACTIVATIONS: Final = ("silu", "gelu_tanh", "gelu", "relu2", "clamped", "sigmoid", "softplus")
STEP_PLAN: Final[_Fields] = (  # the arrays of a `core.BatchPlan`
    ("const Sequence*", "sequences"),
    ("const int32_t*", "tokens"),
    ("const PageWrite*", "page_writes"),
    ("const RowState*", "row_states"),
    ("const int32_t*", "histories"),
    ("const Proposal*", "proposals"),
    ("const Copy*", "captures"),
    ("const int32_t*", "masks"),  # null: the caller samples the sequences with masks
    ("int64_t", "num_sequences num_page_writes num_row_states num_history_words num_proposals num_captures"),
)

_CTYPES: Final[dict[str, Any]] = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}  # all others are pointers
_CPP_TYPES: Final = {"i4": "int32_t", "i8": "int64_t", "f4": "float"}
_RECORDS: Final = {
    "Sequence": SEQUENCE,
    "PageWrite": PAGE_WRITE,
    "Row": ROW,
    "RowState": ROW_STATE,
    "HistoryHead": HISTORY_HEAD,
    "Proposal": PROPOSAL,
    "Copy": COPY,
    "Fold": FOLD,
}


def _ctypes_fields(fields: _Fields) -> list[tuple[str, Any]]:
    return [(name, _CTYPES.get(kind, ctypes.c_void_p)) for kind, names in fields for name in names.split()]


class LowRank(ctypes.Structure):
    """Addresses and sizes of what adapters change of a projection."""

    _fields_ = _ctypes_fields(LOW_RANK)


class Packed(ctypes.Structure):
    """Address and sizes of one packed matrix, or of several stacked ones."""

    _fields_ = _ctypes_fields(PACKED)


_CTYPES["Packed"] = Packed


class Recurrence(ctypes.Structure):
    """Addresses and sizes of a layer's recurrence."""

    _fields_ = _ctypes_fields(RECURRENCE)


_CTYPES["Recurrence"] = Recurrence


class LayerWeights(ctypes.Structure):
    """Addresses of one layer's weights and K/V pages; biases and norms are float32."""

    _fields_ = _ctypes_fields(LAYER_WEIGHTS)


class ModelSpec(ctypes.Structure):
    """Sizes and addresses of a model and the state of its rows."""

    _fields_ = _ctypes_fields(MODEL_SPEC)


class StepPlan(ctypes.Structure):
    """Addresses and lengths of a plan's arrays."""

    _fields_ = _ctypes_fields(STEP_PLAN)


def _header() -> Iterator[str]:
    """Yield the lines of `cpp/layout.h` without the version."""
    yield "namespace minisgl {"
    yield ""
    flags = {name: value for name, value in vars(Flag).items() if name.isupper()}
    yield f"enum Flag : int32_t {{ {', '.join(f'k{_camel(name)} = {value}' for name, value in flags.items())} }};"
    yield ""
    yield f"enum Activation : int64_t {{ {', '.join('k' + _camel(name) for name in ACTIVATIONS)} }};"
    yield f"constexpr int kMaxDrafts = {MAX_DRAFTS}, kProposed = {PROPOSED};"
    yield f"constexpr int kSlotId = {SLOT_ID}, kStateLen = {STATE_LEN};"
    yield ""
    yield "// Records of a plan: 32-bit words, without padding."
    yield "#pragma pack(push, 4)"
    for name, record in _RECORDS.items():
        yield from _record(name, record)
    yield "#pragma pack(pop)"
    yield ""
    structures = {"LowRank": LOW_RANK, "Packed": PACKED, "Recurrence": RECURRENCE, "LayerWeights": LAYER_WEIGHTS}
    structures |= {"ModelSpec": MODEL_SPEC, "StepPlan": STEP_PLAN}
    for name, rows in structures.items():
        yield f"struct {name} {{"
        yield from (f"    {_declaration(kind, names.split())};" for kind, names in rows)
        yield "};"
    yield ""
    yield "}  // namespace minisgl"


def _declaration(kind: str, names: list[str]) -> str:
    star = "*" if kind.endswith("*") else ""
    return f"{kind.removesuffix('*')} " + ", ".join(star + name for name in names)


def _record(name: str, record: np.dtype[Any]) -> Iterator[str]:
    yield f"struct {name} {{"
    for kind, members in itertools.groupby(fields(record).items(), lambda member: _cpp_type(member[1][0].base)):
        names = (field + "".join(f"[{n}]" for n in of[0].shape) for field, of in members)
        yield f"    {kind} {', '.join(names)};"
    if padding := record.itemsize - sum(of[0].itemsize for of in fields(record).values()):
        yield f"    char padding[{padding}];"
    yield "};"
    yield f"static_assert(sizeof({name}) == {record.itemsize});"


def _cpp_type(dtype: np.dtype[Any]) -> str:
    nested = [name for name, record in _RECORDS.items() if record == dtype]
    return nested[0] if nested else _CPP_TYPES[dtype.str[1:]]


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


LAYOUT_VERSION: Final = zlib.crc32("\n".join(_header()).encode())


def header() -> str:
    """Return the text of `cpp/layout.h`."""
    return "\n".join(
        [
            "// Written by `python -m minisgl.native.abi`; what the fields mean stands in layout.py and native/abi.py.",
            "#pragma once",
            "#include <cstdint>",
            "",
            f"constexpr int64_t kLayoutVersion = {LAYOUT_VERSION};",
            "",
            *_header(),
            "",
        ]
    )


if __name__ == "__main__":
    HEADER.write_text(header())
