"""The binary layout of a plan, stated once: the scheduler writes it, ranks replay it, graphs and the C++ step read it.

A record is a numpy structured dtype of 32-bit words (a 64-bit field takes two). `native/cpp/layout.h` is generated from
this file (`python -m minisgl.native.abi`), and a library that was compiled from another layout is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int32]
    Records = npt.NDArray[np.void]


class Flag:
    """Bits of a sequence's flags."""

    SAMPLES: Final = 1  # a token is sampled from the logits of the last position
    FROM_DEVICE: Final = 2  # the one input token is the row's newest, which only the device knows
    PENALIZED: Final = 4  # penalties and logit bias apply (a penalty record came with the row)
    FILTERED: Final = 8  # top-k, top-p or min-p exclude tokens
    LOGPROBS: Final = 16  # the log-probability of the sampled token is wanted
    PROMPT_LOGPROBS: Final = 32  # log-probabilities of the tokens that follow the sequence's tokens are wanted
    MASKED: Final = 64  # a mask says which tokens may be sampled
    ADAPTED: Final = 256  # an adapter changes the projections (the row table has its slot)
    DRAFTS: Final = 128  # the tokens are the row's newest and drafts; the device knows them, and the true positions


# One sequence in a step: the tokens at positions [start, stop) of the sequence in `row`. With DRAFTS these are upper
# bounds: the true start is the row's length on the device less one, and each of the stop - start tokens samples.
SEQUENCE: Final = np.dtype([("row", "<i4"), ("start", "<i4"), ("stop", "<i4"), ("flags", "<i4")])

# A group is state with one lifetime; its pages have ids of their own. FULL pages live as long as the text. A row has
# those of WINDOW only for the last tokens of its text, and one of STATE, its slot: a recurrent state.
FULL, WINDOW, STATE = range(3)
GROUPS: Final = ("full", "window", "state")

# One entry of a group's page table. In STATE, a row has two: its slot, and the number of tokens whose state is there
# after the step's chunks.
PAGE_WRITE: Final = np.dtype([("group", "<i4"), ("row", "<i4"), ("index", "<i4"), ("page", "<i4")])
SLOT_ID, STATE_LEN = range(2)

# A copy between a row's own page of WINDOW, or its slot, and that of a snapshot: what the text in `row` needs to go on
# after its first `position` tokens.
COPY: Final = np.dtype([("source", "<i4"), ("target", "<i4"), ("row", "<i4"), ("position", "<i4")])

# A slot whose state moves on from its first `start` tokens to `stop`, as multiples of FOLD_TOKENS. It has what these
# tokens add apart until then, since drafts among them may be rejected.
FOLD: Final = np.dtype([("slot", "<i4"), ("start", "<i4"), ("stop", "<i4")])
FOLD_TOKENS: Final = 16

# A copy of a unit, a page or a part of one, between the device's memory and a slot of a tier (`kvcache/storage.py`).
# `name` identifies the text that it belongs to, so that a slot with something else is noticed.
MOVE: Final = np.dtype([("unit", "<i4"), ("tier", "<i4"), ("slot", "<i4"), ("kind", "<i4"), ("name", "<i8")])
STORE, LOAD = range(2)  # kinds of moves


class RowField(NamedTuple):
    """A number that steps read for each row."""

    name: str
    type: str
    of: str  # the attribute of `Req` with its value


# The device's row table has these columns; those of 8 bytes come first, so that they are aligned.
ROW_FIELDS: Final = (
    RowField("noise_key", "<i8", "noise_key"),
    RowField("temperature", "<f4", "sampling_params.effective_temperature"),
    RowField("top_k", "<i4", "sampling_params.top_k"),
    RowField("top_p", "<f4", "sampling_params.top_p"),
    RowField("min_p", "<f4", "sampling_params.min_p"),
    RowField("adapter", "<i4", "adapter_slot"),
)
# A record of the row table, padded to a multiple of 8 bytes.
ROW: Final = np.dtype(
    {
        "names": [field.name for field in ROW_FIELDS],
        "formats": [field.type for field in ROW_FIELDS],
        "itemsize": -(-sum(int(field.type[2:]) for field in ROW_FIELDS) // 8) * 8,
    }
)

# The fields of a newly filled row.
ROW_STATE: Final = np.dtype([("row", "<i4"), ("fields", ROW)])

# The head of a penalty record. After it come four lists of 32-bit words: the biased token ids (~id where the token
# ends the request), their biases (float32), the prompt's token ids, the token ids generated so far.
PENALTY_HEAD: Final = np.dtype(
    [
        ("words", "<i4"),  # of the whole record
        ("row", "<i4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("repetition", "<f4"),
        ("first_end", "<i4"),  # the first position at which the request may end
        ("num_biases", "<i4"),
        ("num_prompt", "<i4"),
        ("num_generated", "<i4"),
    ]
)

# The head of a history record, which tells the device of a row that begins to draft what it cannot know. After it
# come the tokens at positions [first, first + words - 4). The row's newest token, at length - 1, may be in flight.
HISTORY_HEAD: Final = np.dtype([("words", "<i4"), ("row", "<i4"), ("first", "<i4"), ("length", "<i4")])

# What the host proposes for a row whose sequence has DRAFTS: the tokens that may stand at positions [first, first +
# PROPOSED). The device drafts those after the row's length, which the host may not know yet, and not what its drafter
# has found.
PROPOSED: Final = 17  # the most drafts of a step, and as many tokens as such a step in flight may confirm
PROPOSAL: Final = np.dtype([("row", "<i4"), ("first", "<i4"), ("tokens", "<i4", (PROPOSED,))])

# The head of a record that loads an adapter into a slot of the device's memory, for steps of later plans. After it
# comes `params.Adapter.source` in UTF-8, padded to whole words.
ADAPTER_HEAD: Final = np.dtype([("words", "<i4"), ("slot", "<i4"), ("bytes", "<i4")])

NEWEST: Final = -1  # in place of a token id: the row's newest token, which only the device knows
NOT_DRAFTED: Final = -1  # in place of a token's index among the newest and the drafts: its row does not draft

MAX_DRAFT_MASKS: Final = 64  # tokens of a step that are sampled after drafts with a mask
MAX_DRAFT_TOKENS: Final = 1280  # of a step with drafts, besides those of prompts

WORD: Final = np.dtype("<i4")
NO_INTS: Final[Ints] = np.empty(0, WORD)
NO_MASKS: Final[Ints] = np.empty((0, 0), WORD)
NO_SEQUENCES: Final[Records] = np.empty(0, SEQUENCE)
NO_PAGE_WRITES: Final[Records] = np.empty(0, PAGE_WRITE)
NO_MOVES: Final[Records] = np.empty(0, MOVE)
NO_COPIES: Final[Records] = np.empty(0, COPY)
NO_FOLDS: Final[Records] = np.empty(0, FOLD)
NO_ROW_STATES: Final[Records] = np.empty(0, ROW_STATE)
NO_PROPOSALS: Final[Records] = np.empty(0, PROPOSAL)

# The arrays of a packed plan, in order, and what each holds; `masks` [M, words of a mask] are packed flat.
PLAN_ARRAYS: Final = (
    ("sequences", SEQUENCE),
    ("tokens", WORD),
    ("page_writes", PAGE_WRITE),
    ("row_states", ROW_STATE),
    ("penalties", WORD),
    ("masks", WORD),
    ("prompt_logprob_ids", WORD),
    ("histories", WORD),
    ("proposals", PROPOSAL),
    ("moves", MOVE),
    ("restores", COPY),
    ("captures", COPY),
    ("folds", FOLD),
    ("adapters", WORD),
)
# The head of a packed plan: the number of elements of each array stands under its name.
PLAN_HEAD: Final = np.dtype([("step", "<i4"), ("mask_words", "<i4"), *((name, "<i4") for name, _ in PLAN_ARRAYS)])


def adapter_load(slot: int, source: str) -> Ints:
    """Return the record that loads an adapter into a slot."""
    data = source.encode(errors="surrogateescape")
    padded = np.frombuffer(data + bytes(-len(data) % WORD.itemsize), WORD)
    head = np.array([(words(ADAPTER_HEAD) + len(padded), slot, len(data))], ADAPTER_HEAD)
    return np.concatenate([head.view(WORD), padded])


def adapter_loads(records: Ints) -> Iterator[tuple[int, str]]:
    """Yield (slot, source) of each record that loads an adapter."""
    while len(records):
        head = records[: words(ADAPTER_HEAD)].view(ADAPTER_HEAD)[0]
        data = records[words(ADAPTER_HEAD) : head["words"]].tobytes()[: head["bytes"]]
        yield int(head["slot"]), data.decode(errors="surrogateescape")
        records = records[head["words"] :]


def words(record: np.dtype[Any]) -> int:
    """32-bit words of one record."""
    return record.itemsize // WORD.itemsize


def fields(record: np.dtype[Any]) -> Mapping[str, Any]:
    """Return (dtype, offset in bytes) of each field of a record."""
    assert record.fields is not None, f"the record {record} has no fields"
    return record.fields


def columns(record: np.dtype[Any]) -> dict[str, int]:
    """The word at which each field of a record begins: its column in `as_words`."""
    return {name: offset // WORD.itemsize for name, (_, offset, *_) in fields(record).items()}


def as_words(records: Records) -> Ints:
    """A contiguous array of records [n] as int32 [n, words of a record]: a view."""
    return records.view(WORD).reshape(len(records), words(records.dtype))
