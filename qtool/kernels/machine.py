"""The kernels as machine code: compiled once by numba, kept on disk, loaded without numba.

Importing numba and having it load what it has compiled takes longer than quantizing a gigabyte.
So the code of all kernels is kept as one object file, which LLVM's own loader takes in.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import llvmlite  # type: ignore[import-untyped]
import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np
import xxhash
from numpy.typing import NDArray

from qtool import memory
from qtool.errors import QtoolError
from qtool.kernels.signatures import SIGNATURES

Array = NDArray[Any]
Note = Callable[[str], None]

_FOLDER = Path(__file__).parent
_SETTINGS = ".numba_config.yaml"  # of whatever the current folder is
_DIGEST = xxhash.xxh3_128().digest_size
# Before its own parameters a function takes where to put a result and an exception; it has neither.
_unused = ctypes.create_string_buffer(8)

_SCALARS = {"i": ctypes.c_int64, "d": ctypes.c_double}

# LLVM ends the process where it finds no memory: bytes that it takes to load and to compile.
_LOADING, _COMPILING = 16 << 20, 512 << 20

# What compiled code may call: all that a processor without such instructions needs.
_PLAIN = {"memcpy", "memset", "rint", "rintf", "sqrt"}


class Kernel:
    """A compiled function, by its name; call it with numbers and address() of arrays."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *words: float) -> None:
        """Run it without Python's global lock."""
        functions = _loaded or load()
        functions[self._name](_unused, _unused, *words)


def address(array: Array, dtype: str) -> int:
    """Where the elements of an array are, which must stay alive meanwhile.

    Raises TypeError unless they are of that type and in C order.
    """
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise TypeError(f"{array.dtype}, but {dtype} in C order is expected")
    return int(array.ctypes.data)


_lock = threading.RLock()
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)
_loaded: dict[str, Any] = {}


def load(note: Note | None = None) -> dict[str, Any]:
    """The kernels as functions by name, compiled where no code of them can be read.

    note: told in words where they are compiled. Raises MemoryError where there is too little.
    """
    with _lock:
        if not _loaded:
            _loaded.update(_functions(_stored_code() or _compiled_code(note)))
    return _loaded


def is_kept() -> bool:
    """Whether load() need not compile, as far as can be told without reading the code."""
    if _loaded:
        return True
    for folder in _folders():
        with suppress(OSError):
            if _is_safe((folder / _file_name()).stat()):
                return True
    return False


def _functions(code: bytes) -> dict[str, Any]:
    memory.check(_LOADING)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    functions: dict[str, Any] = {"engine": engine}  # which owns their memory
    for name, (_, signature) in SIGNATURES.items():
        words: list[Any] = [_SCALARS.get(word, ctypes.c_void_p) for word in signature.split()]
        address = engine.get_function_address(_symbol(name))
        prototype = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 2, *words)
        functions[name] = prototype(address)
    return functions


def _target() -> Any:
    """A new description of the processor; an engine owns the one that it is made with."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple = llvm.Target.from_triple(llvm.get_process_triple())
    cpu, features = _cpu()
    return triple.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)


@cache
def _cpu() -> tuple[str, str]:
    """Name and features of the processor, or of the one that numba's variables name.

    Vectors of 512 bits are used where there are any: a tenth faster, whatever LLVM thinks.
    """
    name, features = (os.environ.get(f"NUMBA_CPU_{what}") for what in ("NAME", "FEATURES"))
    if features is None:
        features = "" if name else llvm.get_host_cpu_features().flatten()
    if "+avx512f" in features.split(","):
        features += ",-prefer-256-bit"
    return name or llvm.get_host_cpu_name(), features


def _symbol(name: str) -> str:
    return f"qtool_{name}"


def _file_name() -> str:
    """Names the code by all that it depends on."""
    digest = xxhash.xxh3_128("\n".join((llvmlite.__version__, *_cpu())).encode())
    for path in sorted(_FOLDER.glob("*.py")):
        digest.update(path.read_bytes())
    return f"kernels-{digest.hexdigest()[:16]}.o"


def _folders() -> Iterator[Path]:
    """Where the code may be kept: in the package, or else in the user's cache. A relative path,
    which would be one in the current folder, is none (XDG Base Directory Specification)."""
    yield _FOLDER / "__pycache__"
    named = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(RuntimeError):  # there is no home
        place = Path(named if os.path.isabs(named) else "~/.cache").expanduser()
        if place.is_absolute():
            yield place / "qtool"


def _is_safe(file: os.stat_result) -> bool:
    """Whether nobody wrote a file but this user, or who could change qtool itself."""
    writers = (os.getuid(), _FOLDER.stat().st_uid, 0)
    return file.st_uid in writers and not file.st_mode & stat.S_IWOTH


def _stored_code() -> bytes | None:
    """What _store() has kept; None where nothing is there, it is damaged or another user's."""
    for folder in _folders():
        with suppress(OSError), (folder / _file_name()).open("rb") as file:
            if not _is_safe(os.fstat(file.fileno())):
                continue
            content = file.read()
            digest, code = content[:_DIGEST], content[_DIGEST:]
            if xxhash.xxh3_128(code).digest() == digest:
                return code
    return None


def _store(code: bytes) -> bool:
    """Keep the code in the first folder that can be written; False where there is none."""
    for folder in _folders():
        temporary = folder / f"kernels-{os.urandom(8).hex()}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(xxhash.xxh3_128(code).digest() + code)
            temporary.replace(folder / _file_name())
        except OSError:
            with suppress(OSError):
                temporary.unlink()
        else:
            return True
    return False


def _compiled_code(note: Note | None) -> bytes:
    """The kernels as an object file, which is kept where a folder can be written."""
    if note is not None:
        note("compiling kernels, once for this machine...")
    memory.check(_COMPILING)
    if "numba" not in sys.modules and Path(_SETTINGS).exists():
        rule = "numba would take it for settings, and kernels are to be compiled"
        raise QtoolError(_SETTINGS, rule, "run qtool in another folder")
    import numba

    config: Any = numba.config
    config.CPU_NAME, config.CPU_FEATURES = _cpu()
    config.DISABLE_JIT = False  # what the environment says of others' functions

    from qtool.kernels.compiled import ALONE

    _check_arrays_in_loops()
    linked = llvm.parse_assembly("")
    for name, (module_name, signature) in SIGNATURES.items():
        python = getattr(import_module(f"qtool.kernels.{module_name}"), name)
        arguments = [_numba_type(numba, word) for word in signature.split()]
        function = numba.njit(numba.void(*arguments), **ALONE)(python)
        module = llvm.parse_assembly(function.inspect_llvm(tuple(arguments)))
        (body,) = (f for f in module.functions if not f.is_declaration)
        body.name = _symbol(name)
        linked.link_in(module)
    missing = {f.name for f in linked.functions if f.is_declaration and "llvm." not in f.name}
    assert missing <= _PLAIN, missing
    code = bytes(_target().emit_object(linked))
    if not _store(code) and note is not None:
        places = " or ".join(str(folder) for folder in _folders())
        note(f"the kernels cannot be kept in {places}: every large run compiles them again")
    return code


def _numba_type(numba: Any, word: str) -> Any:
    if word in "id":
        return numba.int64 if word == "i" else numba.float64
    return numba.types.CPointer(numba.from_dtype(np.dtype(word[:-1])))


@cache
def _check_arrays_in_loops() -> None:
    """Have LLVM vectorize loops over many arrays, after checks that they do not overlap."""
    llvm.set_option("qtool", "-runtime-memory-check-threshold=128")
