"""Work on many pieces over threads, with the results in order."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")
Result = TypeVar("Result")


def default_jobs() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _threads(jobs: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(jobs, thread_name_prefix="qtool")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not live in a fork


def in_order(work: Callable[[Item], Result], items: Iterable[Item], jobs: int) -> Iterator[Result]:
    """work(item) of every item over that many threads, results in the order of the items.

    Twice as many items as threads are under way, so that memory is bounded and no thread waits.
    Work must not call for the same threads again.
    """
    if jobs == 1:
        yield from map(work, items)
        return
    pending: deque[Future[Result]] = deque()
    remaining = iter(items)
    pool = _threads(jobs)
    try:
        pending.extend(pool.submit(work, item) for item in islice(remaining, 2 * jobs))
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(work, item) for item in islice(remaining, 1))
    finally:
        for future in pending:
            future.cancel()
        wait(pending)


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
