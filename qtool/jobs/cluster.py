"""A Dask cluster as an executor."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import CancelledError, Executor
from contextlib import contextmanager
from typing import Any

from qtool.errors import QtoolError, UsageError

TIMEOUT = 30  # seconds to reach the scheduler, and to see a worker
_OPTION = "--scheduler"


@contextmanager
def connected(address: str) -> Iterator[Executor]:
    """The cluster whose scheduler listens at tcp://HOST:PORT.

    A task whose worker is lost goes to another one.
    Raises QtoolError where it cannot be reached, has no workers, workers keep dying, or it goes.
    """
    try:
        import distributed
    except ModuleNotFoundError as error:
        rule = "needs the package distributed"
        raise QtoolError(_OPTION, rule, "pip install 'qtool[cluster]'") from error
    with _silenced("distributed", "tornado"):
        client = _client(distributed, address)
        try:
            _wait_for_worker(client, address)
            yield client.get_executor(pure=False)
        except distributed.KilledWorker as error:
            rule = "workers died, each with the same shard"
            raise QtoolError(_OPTION, rule, "see their logs; --resume goes on") from error
        except CancelledError as error:
            raise QtoolError(_OPTION, f"{address} has gone away", "--resume goes on") from error
        finally:
            client.close()


def _client(distributed: Any, address: str) -> Any:
    try:
        return distributed.Client(address, timeout=TIMEOUT, set_as_default=False)
    except ValueError as error:
        raise UsageError(_OPTION, f"{address!r} is no address", "use tcp://HOST:PORT") from error
    except OSError as error:
        rule = f"{address} cannot be reached within {TIMEOUT} s"
        raise QtoolError(_OPTION, rule, "start `dask scheduler` there") from error


def _wait_for_worker(client: Any, address: str) -> None:
    try:
        client.wait_for_workers(1, timeout=TIMEOUT)
    except TimeoutError as error:
        rule = f"{address} has no worker within {TIMEOUT} s"
        raise QtoolError(_OPTION, rule, "start `dask worker` on some machine") from error


@contextmanager
def _silenced(*packages: str) -> Iterator[None]:
    """Without what packages log: errors are raised."""
    names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] in packages]
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    try:
        for logger in levels:
            logger.setLevel(logging.CRITICAL + 1)
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
