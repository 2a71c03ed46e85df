"""A Dask cluster as an executor."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from qtool.errors import QtoolError, UsageError

TIMEOUT = 30  # seconds to reach the scheduler, and to see a worker


@contextmanager
def connected(address: str) -> Iterator[Executor]:
    """The cluster whose scheduler listens at tcp://HOST:PORT.

    A task whose worker is lost goes to another one.
    Raises QtoolError where it cannot be reached, has no workers, or workers keep dying.
    """
    try:
        import distributed
    except ModuleNotFoundError as error:
        raise QtoolError(
            "--scheduler", "needs the package distributed", "pip install 'qtool[cluster]'"
        ) from error
    try:
        client = distributed.Client(address, timeout=TIMEOUT, set_as_default=False)
    except ValueError as error:
        raise UsageError(
            "--scheduler", f"{address!r} is no address", "use tcp://HOST:PORT"
        ) from error
    except OSError as error:
        rule = f"{address} cannot be reached within {TIMEOUT} s"
        raise QtoolError("--scheduler", rule, "start `dask scheduler` there") from error
    try:
        _wait_for_worker(client, address)
        yield client.get_executor(pure=False)
    except distributed.KilledWorker as error:
        raise QtoolError("worker", "died again and again", "look for the cause") from error
    finally:
        client.close()


def _wait_for_worker(client: Any, address: str) -> None:
    try:
        client.wait_for_workers(1, timeout=TIMEOUT)
    except TimeoutError as error:
        rule = f"{address} has no worker within {TIMEOUT} s"
        raise QtoolError("--scheduler", rule, "start `dask worker` on some machine") from error
