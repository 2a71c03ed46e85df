"""Every command, on every container, for tests of the places that qtool runs in.

    python every_command.py [PART...]

runs in the current folder, in one process, the lines of COMMANDS, or those with such a part; says
on standard error which, and exits with 1 after one that did not end with 0. Needs qtool alone.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
COMMANDS = """
--version
--help
quantize --help
dtypes
presets
recipe --preset w4a16
quantize w.safetensors -o q.safetensors --dtype int4 --block-size 32 --hash
quantize w.safetensors -o mixed.npz --target-bits 5.5 --save-recipe chosen.toml
quantize w.safetensors -o optimal.safetensors --recipe chosen.toml --method optimal --jobs 2
quantize w.safetensors --recipe chosen.toml --dry-run
quantize w.safetensors -o mlx.safetensors --preset w4a16 --block-size 64 --layout mlx
quantize x.npy -o x8.npy --dtype uint8
quantize mixed.npz -o again.npz --dtype int8 --requantize
quantize m.onnx -o q8.onnx --dtype int8 --strict
quantize m.onnx -o nbits.onnx --preset w4a16 --block-size 32 --layout matmul-nbits --external-data
quantize folder -o qf --dtype int4 --block-size 32
quantize folder -o ct --preset nvfp4 --layout compressed-tensors
quantize folder -o sliced --dtype int8 --shards 1/1
finish sliced
dynamic x.npy -o dynamic.safetensors
dynamic m.onnx -o dynamic.onnx --graph
dequantize q.safetensors -o back.safetensors
dequantize mixed.npz -o back.npz
dequantize q8.onnx -o back.onnx
dequantize ct -o back
calibrate x.npy -o scales.safetensors --dtype uint8 --method entropy
capture m.onnx x.npy -o activations.safetensors
capture m.onnx x.npy -o hessian.safetensors --hessian
quantize m.onnx -o second.onnx --dtype int4 --block-size 32 --hessian hessian.safetensors
verify w.safetensors q.safetensors --against q.report.json
verify m.onnx nbits.onnx --run x.npy
verify m.onnx q8.onnx --random 4
verify folder ct
inspect q.safetensors --stats --plot
inspect nbits.onnx --json
inspect ct
compare w.safetensors --dtypes int8,int4 --presets mxfp4 --csv compared.csv
report q.report.json -o q.html
report q.report.json -o q.png
report q.report.json -o q.md
report q.report.json -o q.csv
""".strip().splitlines()


def make_sources(folder: Path) -> None:
    """What the commands read."""
    shutil.copy(EXAMPLES / "digits.safetensors", folder / "w.safetensors")
    shutil.copy(EXAMPLES / "digits.onnx", folder / "m.onnx")
    shutil.copy(EXAMPLES / "digits_inputs.npy", folder / "x.npy")
    (folder / "folder").mkdir()
    shutil.copy(EXAMPLES / "digits.safetensors", folder / "folder" / "model.safetensors")
    (folder / "folder" / "config.json").write_text(json.dumps({"model_type": "digits"}))


def main() -> int:
    from qtool.__main__ import main as run

    for line in COMMANDS:
        if sys.argv[1:] and not any(part in line for part in sys.argv[1:]):
            continue
        print(f"+ {line}", file=sys.stderr, flush=True)
        before = sys.argv
        sys.argv = ["qtool", *shlex.split(line)]
        try:
            run()
        except SystemExit as error:
            if error.code:
                print(f"exit code {error.code}", file=sys.stderr)
                return 1
        sys.argv = before
    return 0


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # this folder
    code = main()
    sys.stdout.flush()
    sys.exit(code)
