"""Work on many pieces over threads, with the results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def default_jobs() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_order(work: Callable[[Item], Result], items: Iterable[Item], jobs: int) -> Iterator[Result]:
    """work(item) of every item over that many threads, results in the order of the items.

    Twice as many items as threads are under way, so that memory is bounded and no thread waits.
    """
    if jobs == 1:
        yield from map(work, items)
        return
    pending: deque[Future[Result]] = deque()
    remaining = iter(items)
    with ThreadPoolExecutor(jobs, thread_name_prefix="qtool") as pool:
        try:
            pending.extend(pool.submit(work, item) for item in islice(remaining, 2 * jobs))
            while pending:
                yield pending.popleft().result()
                pending.extend(pool.submit(work, item) for item in islice(remaining, 1))
        finally:
            for future in pending:
                future.cancel()
