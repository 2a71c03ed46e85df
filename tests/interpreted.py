"""The kernels as plain Python functions, run line by line in place of their machine code."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.kernels.machine import SIGNATURES

_COMPILED = "qtool.kernels.compiled"


def _imported() -> dict[str, ModuleType]:
    """The modules of the kernels, by the names of these, without numba."""
    compiled = _take_out()
    plain: Any = SimpleNamespace(
        Pointer=NDArray[Any], inlined=lambda part: part, prefetch=lambda pointer, index: None
    )
    sys.modules[_COMPILED] = plain
    try:
        return {
            name: import_module(f"qtool.kernels.{module}")
            for name, (module, _) in SIGNATURES.items()
        }
    finally:
        _take_out()
        sys.modules.update(compiled)


def _take_out() -> dict[str, Any]:
    """Have the modules of kernels imported anew; returns those that were there."""
    names = [n for n in sys.modules if n.startswith("qtool.kernels.")]
    return {n: sys.modules.pop(n) for n in names if hasattr(sys.modules[n], "Pointer")}


def _called(kernel: Callable[..., None], signature: str) -> Callable[..., None]:
    """A function that is called as machine code is: with numbers and addresses."""
    words = signature.split()

    def call(result: object, error: object, *given: float) -> None:
        pairs = zip(given, words, strict=True)
        with np.errstate(all="ignore"):
            kernel(*(value if word in "id" else _memory(value, word) for value, word in pairs))

    return call


def _memory(place: Any, word: str) -> NDArray[Any]:
    """Memory from an address on, which no one says the end of; an index < 0 is no place in it."""
    dtype = np.dtype(word[:-1])
    room = (ctypes.c_char * (dtype.itemsize << 32)).from_address(place)
    return np.frombuffer(room, dtype)


MODULES = _imported()
# What machine.load() gives.
FUNCTIONS = {
    name: _called(getattr(MODULES[name], name), signature)
    for name, (_, signature) in SIGNATURES.items()
}
