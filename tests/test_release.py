"""The example release script on the digits network: what stops it, and that nothing is released
then."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from releases import (
    EXAMPLES,
    FAULTS,
    check_stopped,
    contents,
    digits,
    release,
    save_checkpoint,
    save_onnx,
    save_safetensors,
)

NAME = "fc2.weight"
FORMS = {
    "model.safetensors": save_safetensors, "model.onnx": save_onnx, "model": save_checkpoint,
}  # fmt: skip


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A release of each form."""
    found = {}
    for form, save in FORMS.items():
        folder = tmp_path_factory.mktemp("earlier")
        done = release(save(digits(), folder), folder / "release")
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith(f"released {folder}/release/1/{form}\n")
        found[form] = folder / "release"
    return found


@pytest.fixture
def folder(earlier: dict[str, Path], tmp_path: Path) -> Path:
    """Where there is an earlier release of the digits network."""
    shutil.copytree(earlier["model.safetensors"], tmp_path / "release", symlinks=True)
    return tmp_path / "release"


@pytest.mark.parametrize("form", FORMS)
def test_a_release_holds_the_model_its_report_and_pages(
    form: str, earlier: dict[str, Path]
) -> None:
    folder = earlier[form]
    model = ["model/config.json", "model/model.safetensors"] if form == "model" else [form]
    found = contents(folder)
    assert found.pop("latest") == "1"
    expected = {*model, "report.json", "report.md", "report.html"}
    assert found.keys() == {f"1/{name}" for name in expected}
    report = json.loads((folder / "1" / "report.json").read_bytes())
    assert report["output"]["name"] == form
    assert report["totals"]["tensors"] == 3
    assert [entry["passed"] for entry in report["gates"]] == [True] * 5


PLANTED = [("model.safetensors", fault) for fault in FAULTS]
PLANTED += [("model.onnx", "nan"), ("model.onnx", "regression")]
PLANTED += [("model", "outliers"), ("model", "no-match")]


@pytest.mark.parametrize(("form", "kind"), PLANTED)
def test_a_fault_stops_it_and_the_earlier_release_stays(
    form: str, kind: str, earlier: dict[str, Path], tmp_path: Path
) -> None:
    folder, fault = earlier[form], FAULTS[kind]
    before = contents(folder)
    model = FORMS[form](fault.planted(digits(), NAME), tmp_path)
    check_stopped(release(model, folder, fault.recipe(NAME, tmp_path)), fault, NAME)
    assert contents(folder) == before
    if kind != "no-match":  # seen in the plan, before there is a report
        assert json.loads((folder / "failed.json").read_bytes())["tensors"]


def test_it_passes_when_the_fault_is_removed(folder: Path, tmp_path: Path) -> None:
    planted = save_safetensors(FAULTS["outliers"].planted(digits(), NAME), tmp_path)
    assert release(planted, folder).returncode == 3
    assert (folder / "failed.json").exists()
    before = contents(folder)
    done = release(save_safetensors(digits(), tmp_path), folder)
    assert done.returncode == 0, done.stderr
    after = contents(folder)
    assert after.pop("latest") == "2"
    assert before.pop("latest") == "1"
    assert before.items() < after.items()
    assert after["2/model.safetensors"] == after["1/model.safetensors"]
    report = json.loads((folder / "latest" / "report.json").read_bytes())
    assert "sqnr_db worse by 0.5" in [entry["expression"] for entry in report["gates"]]
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "latest"]


# A qtool that goes wrong in one place: what is done before and after a command of the script, the
# exit code, and what is said.
STUB = """#!{python}
import os, pathlib, signal, subprocess, sys
command = sys.argv[1:]
{before}
code = subprocess.run([sys.executable, "-m", "qtool", *command]).returncode
if command[0] == "quantize" and "--dry-run" not in command:
    target = pathlib.Path(command[3])
    data = target.read_bytes()
    {after}
sys.exit(code)
"""
BROKEN = {
    "changed-on-disk": (
        "", "'--jobs' in command or target.write_bytes(data[:-99] + b'qtool' + data[-94:])",
        3, "qtool: fc"),
    "other-bytes": (
        "", "'--jobs' in command and target.write_bytes(data + b' ')", 3, "a second run differs"),
    "misspelt": ("command += ['--mispelt']", "", 2, "--mispelt"),
    "killed": (
        "command[0] == 'verify' and os.kill(os.getppid(), signal.SIGTERM)", "",
        -signal.SIGTERM, ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_whatever_goes_wrong_nothing_is_released(kind: str, folder: Path, tmp_path: Path) -> None:
    before, after, code, message = BROKEN[kind]
    stub = tmp_path / "bin" / "qtool"
    stub.parent.mkdir()
    stub.write_text(STUB.format(python=sys.executable, before=before, after=after or "pass"))
    stub.chmod(0o755)
    earlier = contents(folder)
    path = os.pathsep.join([str(stub.parent), os.environ["PATH"]])
    done = release(EXAMPLES / "digits.safetensors", folder, PATH=path)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert contents(folder) == earlier
    assert [*folder.glob(".*")] == []
    failed = folder / "failed.json"
    assert failed.exists() == (code == 3)
    if kind == "changed-on-disk":
        assert json.loads(failed.read_bytes())["problems"]


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        pytest.param("none.safetensors", 1, "none.safetensors: ", id="no-such-file"),
        pytest.param("release.sh", 1, "release.sh: ", id="no-model"),
    ],
)
def test_what_cannot_be_quantized_is_not_released(
    model: str, code: int, message: str, tmp_path: Path
) -> None:
    done = release(EXAMPLES / model, tmp_path / "new")
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    given, said = EXAMPLES / model, os.path.relpath(EXAMPLES / model, tmp_path / "new" / "a" / "b")
    last = f"release: nothing is released; messages call {given} {said}"
    assert done.stderr.splitlines()[-1] == last
    assert [*(tmp_path / "new").iterdir()] == []


def test_it_wants_a_model_and_a_folder(tmp_path: Path) -> None:
    done = subprocess.run([EXAMPLES / "release.sh", tmp_path], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (2, b"usage: release.sh MODEL FOLDER [RECIPE]\n")
