"""The examples do what their README says, and the committed files are what their script writes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from command import ok
from recompute import read
from safetensors.numpy import load_file

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
DATA = (
    "activations.npy",
    "digits.onnx",
    "digits.safetensors",
    "digits_inputs.npy",
    "digits_labels.npy",
)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command from the root of the repository, with this Python and its qtool first on PATH.

    One BLAS thread: on a busy machine several wait for each other longer than they compute.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PATH": path, "OPENBLAS_NUM_THREADS": "1"} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.fixture(scope="module")
def readme_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What all commands of the README print, run in one shell, and the folder they wrote to."""
    temporary = tmp_path_factory.mktemp("readme")
    before = contents(EXAMPLES)
    done = run("bash", "-euc", "\n".join(blocks("sh")), TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    assert contents(EXAMPLES) == before
    [out] = temporary.iterdir()
    return done.stdout, out


def test_the_readme_names_every_file() -> None:
    names = {p.name for p in EXAMPLES.iterdir() if p.is_file()} - {"README.md"}
    assert {name for name in names if f"`{name}`" not in README} == set()


def test_the_readme_shows_what_the_accuracy_script_prints(readme_run: tuple[str, Path]) -> None:
    [shown] = blocks("text")
    assert shown in readme_run[0]


def test_the_readme_commands_write_what_they_name(readme_run: tuple[str, Path]) -> None:
    assert {
        "activations.safetensors",
        "digits.int4.safetensors",
        "digits.float32.safetensors",
        "digits.int4.onnx",
        "release",
        *DATA,
    } <= {p.name for p in readme_run[1].iterdir()}


@pytest.mark.parametrize("name", DATA)
def test_training_reproduces_the_committed_file(name: str, readme_run: tuple[str, Path]) -> None:
    assert (readme_run[1] / name).read_bytes() == (EXAMPLES / name).read_bytes()


def test_training_does_not_depend_on_the_order_in_which_blas_adds(tmp_path: Path) -> None:
    # A kernel for old processors gives other sums unless every one of them is exact.
    done = run("python", "examples/train_digits.py", str(tmp_path), OPENBLAS_CORETYPE="Nehalem")
    assert done.stdout == "355 of 360 test images right\n"
    assert contents(tmp_path) == {name: (EXAMPLES / name).read_bytes() for name in DATA}


def test_the_files_stay_small() -> None:
    assert sum(map(len, contents(EXAMPLES).values())) < 300_000


def test_the_network_recognises_355_of_360_test_images() -> None:
    weights = load_file(EXAMPLES / "digits.safetensors")
    x = np.load(EXAMPLES / "digits_inputs.npy").astype(np.float64)
    for i in (1, 2, 3):
        x = x @ weights[f"fc{i}.weight"].T.astype(np.float64) + weights[f"fc{i}.bias"]
        x = np.maximum(x, 0.0) if i < 3 else x
    labels = np.load(EXAMPLES / "digits_labels.npy")
    assert np.count_nonzero(x.argmax(axis=1) == labels) == 355


def test_the_onnx_model_is_the_same_network() -> None:
    model = onnx.load(EXAMPLES / "digits.onnx")
    weights = load_file(EXAMPLES / "digits.safetensors")
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    assert {k: v.tobytes() for k, v in stored.items()} == {
        k: v.tobytes() for k, v in weights.items()
    }
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 17)]


def test_quantizing_raises_the_opset_and_keeps_the_metadata(readme_run: tuple[str, Path]) -> None:
    before, after = (onnx.load(readme_run[1] / n) for n in ("digits.onnx", "digits.int4.onnx"))
    assert [(o.domain, o.version) for o in after.opset_import] == [("", 21)]
    *kept, made = after.metadata_props
    assert kept == list(before.metadata_props) != []
    assert made.key == "qtool"


@pytest.mark.parametrize(("name", "right"), [("digits.onnx", 355), ("digits.int4.onnx", 352)])
def test_onnxruntime_counts_the_same_images(
    name: str, right: int, readme_run: tuple[str, Path]
) -> None:
    session = onnxruntime.InferenceSession(readme_run[1] / name)
    [logits] = session.run(None, {"image": np.load(EXAMPLES / "digits_inputs.npy")})
    labels = np.load(EXAMPLES / "digits_labels.npy")
    assert np.count_nonzero(logits.argmax(axis=1) == labels) == right


# Counted with ml_dtypes casts and plain NumPy, without qtool; of the types of 4 bits, whose scales
# are searched for, here.
ACCURACY = {"float32": 355, "int8 per channel": 355, "float8e4m3fn per channel": 355}
SEARCHED = {"int4 block 32": ("int4", 32), "float4e2m1 block 16": ("float4e2m1", 16)}


def counted(path: Path) -> int:
    """The test images that a quantized network recognises; neither read nor run by qtool."""
    found = read(path)
    x = np.load(EXAMPLES / "digits_inputs.npy").astype(np.float64)
    for i in (1, 2, 3):
        weight = found.weights[f"fc{i}.weight"].dequantized(np.float32)
        x = x @ weight.T.astype(np.float64) + found.tensors[f"fc{i}.bias"]
        x = np.maximum(x, 0.0) if i < 3 else x
    return int(np.count_nonzero(x.argmax(axis=1) == np.load(EXAMPLES / "digits_labels.npy")))


@pytest.mark.parametrize("name", [*ACCURACY, *SEARCHED])
def test_the_accuracy_table_counts_exactly(
    name: str, readme_run: tuple[str, Path], tmp_path: Path
) -> None:
    row = rf"^{name} +[\d.]+ +[\d.]+ +(\d+) +[\d.]+%$"
    right = ACCURACY.get(name)
    if name in SEARCHED:
        dtype, size = SEARCHED[name]
        ok("quantize", EXAMPLES / "digits.safetensors", "-o", tmp_path / "q.safetensors",
           "--dtype", dtype, "--block-size", size)  # fmt: skip
        right = counted(tmp_path / "q.safetensors")
    assert re.findall(row, readme_run[0], re.MULTILINE) == [str(right)]


def test_a_release_leaves_the_model_its_report_and_pages(readme_run: tuple[str, Path]) -> None:
    release = readme_run[1] / "release" / "latest"
    assert {p.name for p in release.iterdir()} == {
        "digits.safetensors", "report.json", "report.md", "report.html",
    }  # fmt: skip
    assert f"released {release.resolve()}/digits.safetensors\n" in readme_run[0]
