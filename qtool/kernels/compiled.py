"""How kernels are compiled: without the GIL, IEEE arithmetic in the order written, kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import numba
from numba.core import event
from numba.core.caching import FunctionCache
from numpy.typing import NDArray

Array = NDArray[Any]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])


class _Cache(FunctionCache):
    """numba's cache, in the package's folder or else the user's cache folder, as a convenience:
    what cannot be read or written, for whatever reason, is compiled again."""

    def load_overload(self, *args: Any) -> Any:
        cache: Any = super()
        try:
            return cache.load_overload(*args)
        except Exception:  # a damaged file can raise anything
            return None

    def save_overload(self, *args: Any) -> None:
        cache: Any = super()
        try:
            cache.save_overload(*args)
        except Exception:  # a full disk, a folder that vanished
            return


def compiled(function: Kernel) -> Kernel:
    """numba.njit as every kernel uses it."""
    kernel: Any = numba.njit(nogil=True, error_model="numpy")(function)
    cache: Any = _Cache
    with suppress(RuntimeError):  # no folder can be written
        kernel._cache = cache(function)
    return cast(Kernel, kernel)


class _FirstTime(event.Listener):
    def __init__(self, note: Callable[[str], None]) -> None:
        self._note: Callable[[str], None] | None = note

    def on_start(self, event: Any) -> None:
        if self._note is not None:
            self._note("compiling kernels, once for this machine...")
            self._note = None

    def on_end(self, event: Any) -> None: ...


@contextmanager
def announced(note: Callable[[str], None]) -> Iterator[None]:
    """Say so where a kernel has to be compiled."""
    with event.install_listener("numba:compile", _FirstTime(note)):
        yield
