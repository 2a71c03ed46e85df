"""Work on many pieces over threads, with the results in order."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from qtool import memory
from qtool.errors import QtoolError

Item = TypeVar("Item")
Result = TypeVar("Result")

_THREAD = 32 << 20  # bytes: most of it for the stack


def default_jobs() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def started(jobs: int, name: str) -> ThreadPoolExecutor:
    """That many threads. Raises MemoryError where there is none for them: later on one that finds
    too little while it starts would be waited for without end. Raises QtoolError where the system
    has too many already."""
    pool = ThreadPoolExecutor(jobs, name)
    go = threading.Event()
    try:
        for _ in range(jobs):
            memory.check(_THREAD)
            pool.submit(go.wait)
    except RuntimeError as error:
        raise QtoolError(
            "threads", f"{error}", "raise the limit on processes (ulimit -u)"
        ) from error
    finally:
        go.set()
    return pool


@cache
def _threads(jobs: int) -> ThreadPoolExecutor:
    return started(jobs, "qtool")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not live in a fork


def in_order(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    jobs: int,
    take: Callable[[Result], object],
) -> None:
    """take(work(item)) of every item: work over that many threads, take in the order of the items
    and in the calling thread.

    Twice as many items as threads are under way, so that memory is bounded and no thread waits.
    However it ends, no thread is at work any more. Work must not call for the same threads again.
    """
    if jobs == 1:
        for item in items:
            take(work(item))
        return
    pending: deque[Future[Result]] = deque()
    remaining = iter(items)
    pool = _threads(jobs)
    try:
        pending.extend(pool.submit(work, item) for item in islice(remaining, 2 * jobs))
        while pending:
            take(pending[0].result())
            pending.popleft()
            pending.extend(pool.submit(work, item) for item in islice(remaining, 1))
    finally:
        _finish(pending)


def _finish(futures: Collection[Future[Any]]) -> None:
    """Cancel what has not begun and wait for the rest, whatever signals arrive meanwhile."""
    signal: BaseException | None = None
    for future in futures:
        future.cancel()
    while not all(future.done() for future in futures):
        try:
            wait(futures)
        except BaseException as error:  # Ctrl-C again, or SIGTERM
            signal = error
    if signal is not None:
        raise signal


_memory = threading.local()


def buffer(name: str, dtype: np.dtype[Any], size: int) -> NDArray[Any]:
    """Memory of the calling thread's own, which its next call with that name overwrites.

    The first touch of fresh memory can cost more than what is done with it.
    """
    nbytes = size * dtype.itemsize
    held = getattr(_memory, name, None)
    if held is None or held.size < nbytes:
        held = np.empty(nbytes, np.uint8)
        setattr(_memory, name, held)
    return held[:nbytes].view(dtype)
