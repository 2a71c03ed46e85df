"""How kernels are compiled: IEEE arithmetic in the order written, inlined, without Python objects.

Kernels see memory as C does: a pointer, where to begin, how many elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic
from numpy.typing import NDArray

Pointer = NDArray[Any]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])

_OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False}
# without what Python needs to call it
ALONE = _OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


@intrinsic
def prefetch(typing: Any, pointer: Any, index: Any) -> Any:
    """Have the cache line of pointer[index] fetched, wherever it is: it may lie beyond the memory
    that is ours. What the processor fetches by itself comes too late for short loops."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.gep(arguments[0], [arguments[1]])
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        read, keep, data = (ir.Constant(word, number) for number in (0, 3, 1))
        builder.call(function, [place, read, keep, data])
        return context.get_dummy_value()

    return numba.void(pointer, numba.intp), generate


def inlined(function: Kernel) -> Kernel:
    """A part of kernels. It cannot raise: what could is no part of compiled code."""
    return cast(Kernel, numba.njit(**_OPTIONS, forceinline=True)(function))
