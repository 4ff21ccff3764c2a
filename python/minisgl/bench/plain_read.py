"""Files read for the sake of reading: what the disk, or the page cache, can give."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

PIECE: Final = 8 << 20
SAMPLES: Final = 256  # places where a file is asked whether it is in the page cache


def read_all(files: Iterable[Path], threads: int) -> float:
    """Seconds in which `threads` threads read `files` into buffers of their own, used again and again."""
    descriptors = [os.open(path, os.O_RDONLY) for path in files]
    queue = ((fd, start) for fd in descriptors for start in range(0, os.fstat(fd).st_size, PIECE))
    lock = threading.Lock()

    def work() -> None:
        buffer = memoryview(bytearray(PIECE))
        while True:
            with lock:
                piece = next(queue, None)
            if piece is None:
                return
            (fd, start), done = piece, 0
            while done < PIECE and (count := os.preadv(fd, [buffer[done:]], start + done)):
                done += count

    workers = [threading.Thread(target=work) for _ in range(threads)]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - begin
    for fd in descriptors:
        os.close(fd)
    return seconds


def drop_cache(files: Iterable[Path]) -> float:
    """Ask the kernel to forget `files`; returns the share of samples that it still has in its page cache."""
    kept = samples = 0
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # what is not written yet cannot be forgotten
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            size = os.fstat(fd).st_size
            for i in range(SAMPLES):
                samples += 1
                with suppress(BlockingIOError):
                    kept += bool(os.preadv(fd, [bytearray(1)], size * i // SAMPLES, os.RWF_NOWAIT))
        finally:
            os.close(fd)
    return kept / max(samples, 1)
