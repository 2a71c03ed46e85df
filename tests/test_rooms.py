"""Which module may import which: the arrows between qtool's rooms and to libraries."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import unmeasured

import qtool

PACKAGE = Path(qtool.__file__).parent

# room -> the rooms that it may import, besides itself and, but for the first four, COMMON
COMMON = {"memory", "errors", "dtypes", "spec"}
ROOMS: dict[str, set[str]] = {
    "memory": set(),
    "errors": set(),
    "dtypes": {"errors"},
    "spec": {"errors", "dtypes"},
    "packing": set(),
    "pool": set(),
    "ops": {"packing"},
    "kernels": set(),
    "stats": {"kernels"},
    "scales": {"ops", "kernels"},
    "rounding": {"ops", "kernels", "scales", "pool"},
    "tensor": {"ops", "stats"},
    "engine": {"scales", "rounding", "kernels", "ops", "packing", "pool", "stats", "tensor"},
    "formats": {"packing"},
    "layouts": {"ops", "packing", "formats", "tensor"},
    "presets": set(),
    "recipe": {"presets"},
    "plan": {"recipe", "formats", "layouts"},
    "report": {"stats", "recipe"},
    "runtime": set(),
    "jobs": {
        "packing", "pool", "ops", "kernels", "stats", "scales", "rounding", "tensor", "engine",
        "formats", "layouts", "presets", "recipe", "plan", "report", "runtime",
    },
    "render": {"report"},
    "cli": {"presets", "jobs", "render", "report"},
    "__main__": {"cli"},
}  # fmt: skip

# library -> beginnings of the modules that may import it
LIBRARIES = {
    "typer": ("cli.",),
    "click": (),
    "rich": ("render.",),
    "jinja2": ("render.page.",),
    "markupsafe": ("render.page.",),
    "matplotlib": ("render.page.",),
    "onnx": ("formats.onnx", "layouts.onnx"),
    "google": ("formats.onnx", "layouts.onnx"),
    "onnxruntime": ("runtime.",),
    "numba": ("kernels.",),
    "llvmlite": ("kernels.",),
    "xxhash": ("formats.onnx.", "jobs.fingerprint.", "kernels."),
    "distributed": ("jobs.cluster.",),
    "dask": (),
    "pickle": (),
    "torch": (),
    "safetensors": (),
}  # fmt: skip

FILES = sorted(PACKAGE.rglob("*.py"))
IDS = [str(path.relative_to(PACKAGE)) for path in FILES]


def module(path: Path) -> str:
    """Name of a file's module inside the package: "formats.npy", "ops." for a folder's own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join("" if part == "__init__" else part for part in parts)


def imports(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports, wherever in it the statement stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            if node.module == "qtool":
                yield from (f"qtool.{alias.name}" for alias in node.names)
            else:
                yield node.module


def rooms(path: Path) -> set[str]:
    """The rooms that a file imports."""
    parts = [name.split(".") for name in imports(path)]
    return {p[1] for p in parts if p[0] == "qtool" and len(p) > 1} - {"__version__"}


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_a_module_imports_only_the_rooms_below_it(path: Path) -> None:
    room = module(path).split(".")[0]
    if room == "":
        return  # qtool itself gives every public name its home
    allowed = ROOMS[room] | {room} | (set() if room in COMMON else COMMON)
    assert rooms(path) - allowed == set()


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_a_library_is_imported_only_where_it_belongs(path: Path) -> None:
    name = module(path) + ("" if module(path).endswith(".") else ".")
    for library in {imported.split(".")[0] for imported in imports(path)} & set(LIBRARIES):
        assert name.startswith(LIBRARIES[library]), library


def test_the_table_has_no_circles() -> None:
    order: list[str] = []
    while len(order) < len(ROOMS):
        free = [r for r, below in ROOMS.items() if r not in order and below <= set(order)]
        assert free
        order += free


def test_the_names_of_the_rooms_are_those_of_the_package() -> None:
    found = {module(path).split(".")[0] for path in FILES} - {""}
    assert found == set(ROOMS)


STATEMENTS = {
    "import qtool": "import qtool",
    "python -m qtool --help": "import sys; sys.argv = ['qtool', '--help']\n"
    "from qtool.cli import main\ntry: main()\nexcept SystemExit: pass",
    "qtool.QuantSpec": "import qtool; qtool.QuantSpec('int8', qtool.PerTensor())",
    "a small array": "import numpy, qtool; x = numpy.ones((64, 64), 'f4')\n"
    "qtool.quantize(x, qtool.QuantSpec('int8', qtool.PerTensor()))\n"
    "qtool.quantize_linear(x, numpy.float32(0.1))",
}


HEAVY = ("onnx", "numba", "llvmlite", "onnxruntime", "google.protobuf")


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """The modules that are loaded after a statement."""
    show = "\nimport sys; print('loaded', *sys.modules)"
    found = {}
    for name, statement in STATEMENTS.items():
        done = subprocess.run(
            [sys.executable, "-c", statement + show],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env=unmeasured(),
        )
        found[name] = set(done.stdout.rpartition("loaded")[2].split())
    return found


@pytest.mark.parametrize(
    ("statement", "library"),
    [
        *[(s, n) for s in list(STATEMENTS)[:2] for n in ("numpy", "ml_dtypes", "onnx", "numba")],
        *[
            (s, n)
            for s in STATEMENTS
            for n in ("onnx", "numba", "llvmlite", "onnxruntime", "google.protobuf")
        ],
        ("import qtool", "typer"),
        ("import qtool", "rich"),
        ("import qtool", "json"),
    ],
)
def test_a_library_is_loaded_only_when_it_is_needed(
    statement: str, library: str, loaded: dict[str, set[str]]
) -> None:
    assert "qtool" in loaded[statement]
    assert library not in loaded[statement]


def test_the_library_never_prints() -> None:
    calls = [
        (module(path), node.lineno)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("print", "input", "eval", "exec")
        and module(path) != "__main__"  # the program's last words
    ]
    assert calls == []
