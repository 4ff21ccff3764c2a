"""NCCL through ctypes: two collectives on the current stream, without torch's process groups.

torch's process groups add events, a watchdog thread and bookkeeping to every call. Here a call is one library call,
both eagerly and during graph capture.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_size_t, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from minisgl.core.errors import ConfigError, RankError
from minisgl.distributed.communicator import Communicator, bind_nccl

if TYPE_CHECKING:
    from minisgl.distributed.communicator import Store
    from minisgl.distributed.info import DistributedInfo

_log = logging.getLogger("minisgl.distributed")

UNIQUE_ID_BYTES: Final = 128
CLOSE_S: Final = 5.0
SUM: Final = 0  # ncclSum
# ncclDataType_t (nccl.h)
DTYPES: Final = {
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", c_char * UNIQUE_ID_BYTES),)


@functools.cache
def load_nccl() -> ctypes.CDLL:
    """Load the library that torch uses: from its wheel's package, else from the loader's search path.

    Raises `ConfigError` if there is none.
    """
    spec = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    candidates = [str(Path(folder) / "lib" / "libnccl.so.2") for folder in folders] + ["libnccl.so.2"]
    reasons = []
    for candidate in candidates:
        try:
            return _declare(ctypes.CDLL(candidate))
        except OSError as e:
            reasons.append(str(e))
    raise ConfigError(f"NCCL cannot be loaded ({'; '.join(reasons)}); try --disable-pynccl")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    signatures = {
        "ncclGetUniqueId": [POINTER(_UniqueId)],
        "ncclCommInitRank": [POINTER(c_void_p), c_int, _UniqueId, c_int],
        "ncclAllReduce": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
        "ncclAllGather": [c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p],
        "ncclCommAbort": [c_void_p],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = [c_int], c_char_p
    return library


class PyNcclCommunicator(Communicator):
    """NCCL on the current stream, with one GPU per rank."""

    name = "pynccl"
    is_nccl = True
    needs_abort = True

    def __init__(self, info: DistributedInfo, device: torch.device, store: Store, host: str) -> None:
        """Block until all ranks have joined. Rank 0 sends NCCL's id to the others through `store`."""
        super().__init__(info, device)
        bind_nccl(host)
        self._library = load_nccl()
        unique = _UniqueId()
        if info.rank == 0:
            self._call("ncclGetUniqueId", byref(unique))
            store.set("nccl-id", bytes(unique).hex())
        else:
            unique = _UniqueId.from_buffer_copy(bytes.fromhex(store.get("nccl-id").decode()))
        self._comm: c_void_p | None = c_void_p()
        with torch.cuda.device(device):
            self._call("ncclCommInitRank", byref(self._comm), info.size, unique, info.rank)

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        pointer = x.data_ptr()
        self._call("ncclAllReduce", pointer, pointer, x.numel(), DTYPES[x.dtype], SUM, self._comm, self._stream)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(self.info.size, *x.shape)
        self._call("ncclAllGather", x.data_ptr(), out.data_ptr(), x.numel(), DTYPES[x.dtype], self._comm, self._stream)
        return out

    def close(self) -> None:
        """Abort the communicator: destroying it would wait for collectives that lost ranks never join.

        Aborting waits for CUDA graphs that have a collective, so the wait is limited.
        """
        if self._comm is not None:
            abort = threading.Thread(target=self._library.ncclCommAbort, args=(self._comm,), daemon=True)
            abort.start()
            abort.join(CLOSE_S)
            if abort.is_alive():
                _log.warning("rank %d: NCCL does not shut down; a CUDA graph still holds it", self.info.rank)
            self._comm = None

    @property
    def _stream(self) -> int:
        stream: int = torch.cuda.current_stream(self.device).cuda_stream
        return stream

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._library, name)(*args)
        if code != 0:
            cause = self._library.ncclGetErrorString(code).decode()
            raise RankError(f"rank {self.info.rank}: {name} failed: {cause}; set NCCL_DEBUG=WARN for details")
