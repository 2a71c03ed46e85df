"""Running qtool's commands, and reading their files with other readers than qtool's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import ml_dtypes
import numpy as np
import onnx
import safetensors
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from typer.testing import CliRunner

from qtool.cli import app

Array = NDArray[Any]

PYTHON = [sys.executable, "-m", "qtool"]
DTYPES = {
    "I8": np.int8, "U8": np.uint8, "I16": np.int16, "U16": np.uint16, "I32": np.int32,
    "U32": np.uint32, "I64": np.int64, "F64": np.float64, "F32": np.float32, "F16": np.float16,
    "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip


def float32(values: Any) -> Array:
    return np.asarray(values, np.float32)


def float16(values: Any) -> Array:
    return np.asarray(values, np.float16)


def int8(values: Any) -> Array:
    return np.asarray(values, np.int8)


def uint8(values: Any) -> Array:
    return np.asarray(values, np.uint8)


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: bytes
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must be one strict JSON document."""
        return strict(self.out.decode())


def qtool(*args: str | Path, stdin: bytes = b"") -> Done:
    """Run a command in this process. A traceback fails the test that causes it."""
    done = CliRunner().invoke(app, list(map(str, args)), input=stdin, prog_name="qtool")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Done(done.exit_code, done.stdout_bytes, done.stderr)


def ok(*args: str | Path, stdin: bytes = b"") -> Done:
    """Run a command that must succeed."""
    done = qtool(*args, stdin=stdin)
    assert done.code == 0, done.err
    return done


def refused(*args: str | Path, code: int = 1, stdin: bytes = b"") -> str:
    """Run a command that must fail with one line on standard error; that line."""
    done = qtool(*args, stdin=stdin)
    assert (done.code, done.out) == (code, b""), done
    assert done.err.endswith("\n")
    line = done.err[:-1]
    assert line.isprintable(), line
    assert line.startswith("qtool: ")
    return line.removeprefix("qtool: ")


def process(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a process of its own; readline, in ours, sets COLUMNS."""
    options.setdefault("env", {k: v for k, v in os.environ.items() if k != "COLUMNS"})
    return subprocess.run([*PYTHON, *args], capture_output=True, timeout=60, check=False, **options)


def unmeasured() -> dict[str, str]:
    """The environment, but for what has coverage.py run, write and import in child processes."""
    return {k: v for k, v in os.environ.items() if k != "COLUMNS" and "COVERAGE" not in k}


def strict(text: str) -> Any:
    """JSON without the tokens that JSON does not have."""

    def refuse(token: str) -> NoReturn:
        raise AssertionError(f"{token} is no JSON")

    return json.loads(text, parse_constant=refuse)


def report(path: Path) -> Any:
    """The report beside an output."""
    return strict(path.with_suffix(".report.json").read_text(encoding="utf-8"))


def stored(source: Path | bytes) -> dict[str, Array]:
    """The tensors of a .safetensors file, as the safetensors package and ml_dtypes read them."""
    data = source if isinstance(source, bytes) else source.read_bytes()
    return {
        name: np.frombuffer(bytes(t["data"]), DTYPES[t["dtype"]]).reshape(t["shape"])
        for name, t in safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    }


def metadata(source: Path | bytes) -> dict[str, str]:
    """The metadata of a .safetensors file."""
    data = source if isinstance(source, bytes) else source.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]).get("__metadata__", {})  # type: ignore[no-any-return]


def unsigned(path: Path) -> Any:
    """All that a .safetensors, .npz or ONNX file holds, but for the recipe that it was made by."""
    if path.suffix == ".onnx":
        model = onnx.load(path)
        (made,) = (entry for entry in model.metadata_props if entry.key == "qtool")
        made.value = json.dumps(_unsigned(made.value))
        return model
    if path.suffix == ".npz":
        with np.load(path) as file:
            arrays = {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in file.items()}
        return arrays | {"__qtool__": _unsigned(arrays["__qtool__"][2])}
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    header["__metadata__"]["qtool"] = _unsigned(header["__metadata__"]["qtool"])
    return header, data[size:]


def _unsigned(text: str | bytes) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(text)
    assert said.pop("recipe")
    return said


def described(path: Path) -> dict[str, Any]:
    """qtool's own metadata of the tensors in a .safetensors file."""
    return json.loads(metadata(path)["qtool"])["tensors"]  # type: ignore[no-any-return]


def unpacked(packed: Array, dtype: str, *shape: int) -> list[Any]:
    """Packed codes below 8 bits, as the onnx package reads them."""
    tensor = TensorProto(
        data_type=TensorProto.DataType.Value(dtype.upper()), dims=shape, raw_data=packed.tobytes()
    )
    return numpy_helper.to_array(tensor).astype(np.float32).tolist()  # type: ignore[no-any-return]


def initializers(path: Path) -> dict[str, Array]:
    """The initializers of an ONNX model that passes the checker."""
    onnx.checker.check_model(str(path), full_check=True)
    return {
        t.name: numpy_helper.to_array(t, str(path.parent))
        for t in onnx.load_model(str(path), load_external_data=False).graph.initializer
    }


def leftovers(folder: Path) -> list[str]:
    """Temporary files that a command left behind."""
    return [p.name for p in folder.iterdir() if ".qtool-" in p.name]
