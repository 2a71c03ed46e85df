"""Runs commands in a folder in several ways, and prints what they made.

    python determinism.py WAYS

WAYS: a JSON list of objects with "jobs", "kernels", whether they are used for everything, and
"tile", elements of all tiles, 0: as they are. Standard output: a list of objects by command: hashes
by the names of files and of standard output, of all but the seconds that a command took.
KEPT, a variable: the folder where compiled kernels are kept, in place of the usual ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from command import ok

from qtool import engine
from qtool.engine import restore_plain, searching, stream, tiling
from qtool.jobs import verify_tensors
from qtool.kernels import machine
from qtool.layouts import onnx_dynamic, reordered
from qtool.rounding import factor, hessian
from qtool.scales import entropy, search

TILES = (
    (tiling, ("TILE", "_SMALL_TILE", "LARGEST_WINDOW")), (searching, ("_TILE",)),
    (stream, ("_LONGEST_SPAN",)), (restore_plain, ("TILE",)), (search, ("_BOX",)),
    (entropy, ("_PIECE", "_TOGETHER")), (reordered, ("_TILE",)), (onnx_dynamic, ("_PIECE",)),
    (verify_tensors, ("_PIECE",)),
)  # fmt: skip

COMMANDS = """
quantize x.npy -o absmax.safetensors --dtype int8 --axis 0 --method absmax
quantize x.npy -o minmax.npz --dtype uint4 --block-size 32 --asymmetric --method minmax
quantize x.npy -o mse.safetensors --dtype int4 --block-size 32 --method mse
quantize x.npy -o mse8.npy --dtype float8e4m3fn --method mse
quantize w.safetensors -o optimal.safetensors --dtype int4 --block-size 64 --method optimal
quantize w.safetensors -o entropy.safetensors --dtype uint8 --axis 0 --asymmetric --method entropy
quantize w.safetensors -o percentile.safetensors --dtype int8 --method percentile:99.5
quantize w.safetensors -o mxfp4.safetensors --preset mxfp4
quantize w.safetensors -o nvfp4.safetensors --preset nvfp4 --layout modelopt
quantize w.safetensors -o ct.safetensors --preset w4a16 --block-size 32 --layout compressed-tensors
quantize w.safetensors -o mlx.safetensors --dtype uint4 --block-size 32 --asymmetric --layout mlx
quantize w.safetensors -o tile.safetensors --dtype float8e5m2 --tile 16x32
quantize w.safetensors -o mixed.safetensors --target-sqnr 25 --candidates int8,int4
quantize w.safetensors -o weighted.safetensors --dtype int4 --block-size 32 --importance i.npz
quantize w.safetensors -o second.safetensors --dtype int4 --block-size 32 --hessian h.npz
quantize w.safetensors -o rows.safetensors --dtype int4 --block-size 32 --activations a.npz
quantize m.onnx -o qdq.onnx --dtype int4 --block-size 32
quantize m.onnx -o nbits.onnx --dtype int4 --block-size 32 --layout matmul-nbits
quantize folder -o folder.q --preset fp8 --layout compressed-tensors
dynamic x.npy -o dynamic.npz
dynamic m.onnx -o graph.onnx --graph
dequantize mse.safetensors -o mse.back.safetensors
dequantize minmax.npz -o minmax.back.npz --dtype bfloat16
dequantize mlx.safetensors -o mlx.back.safetensors --dtype float16
dequantize qdq.onnx -o qdq.back.onnx
dequantize nbits.onnx -o nbits.back.onnx
verify w.safetensors optimal.safetensors --report verified.json
verify m.onnx nbits.onnx --report nbits.json
compare w.safetensors --dtypes int4,int8 --block-sizes axis,32 --methods mse,optimal --json
calibrate a.npz -o entropies.safetensors --dtype uint8 --method entropy
capture m.onnx samples.npy -o moments.npz --hessian
inspect w.safetensors --stats --json
inspect nbits.onnx --json
report timeless.json -o page.html
report timeless.json -o page.md
report timeless.json -o page.csv
"""


def take(way: dict[str, Any]) -> None:
    """Do as that way says from now on."""
    if way["kernels"]:
        engine.kernels_pay = lambda elements: True  # type: ignore[assignment]
        engine.TILES_PAY = 0
    for module in (factor, hessian):
        module.kernels_pay = lambda products: way["kernels"]  # type: ignore[attr-defined]
    for module, names in TILES if way["tile"] else ():
        for name in names:
            setattr(module, name, way["tile"])


def timeless(value: Any) -> Any:
    """JSON without the seconds that a command took."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key != "seconds"}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def digest(data: bytes) -> str:
    if data.startswith(b"{"):
        data = json.dumps(timeless(json.loads(data))).encode()
    return hashlib.sha256(data).hexdigest()


def run(line: str, jobs: int) -> dict[str, str]:
    """Run a command; hashes of what it made."""
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    words = line.split()
    if words[0] not in ("inspect", "report"):
        words += ["--jobs", str(jobs)]
    done = ok(*words)
    made = [path for path in sorted(Path().rglob("*")) if path not in before and path.is_file()]
    return {str(path): digest(path.read_bytes()) for path in made} | {"": digest(done.out)}


def main() -> None:
    if "KEPT" in os.environ:
        machine._folders = lambda: iter([Path(os.environ["KEPT"])])
    sources, made = sorted(Path().iterdir()), []
    for number, way in enumerate(json.loads(sys.argv[1])):
        folder = Path(f"way{number}")
        folder.mkdir()
        for source in sources:
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / source.name)
        child = os.fork()
        if not child:
            os.chdir(folder)
            take(way)
            found = {}
            for line in COMMANDS.strip().splitlines():
                found[line] = run(line, way["jobs"])
                if line.startswith("verify w"):
                    report = json.loads(Path("optimal.report.json").read_text())
                    Path("timeless.json").write_text(json.dumps(report | {"seconds": 0.0}))
            Path("made.json").write_text(json.dumps(found))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        made.append(json.loads((folder / "made.json").read_text()))
        shutil.rmtree(folder)
    print(json.dumps(made))


if __name__ == "__main__":
    main()
