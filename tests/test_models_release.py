"""The example release script on all-MiniLM-L6-v2, its NaNs and bad layers planted."""

from __future__ import annotations

from pathlib import Path

import pytest
from minilm import file
from releases import FAULTS, check_stopped, contents, release, save_safetensors
from safetensors.numpy import load_file

pytestmark = pytest.mark.network

NAME = "encoder.layer.3.output.dense.weight"


def test_faults_stop_it_and_without_them_it_passes(tmp_path: Path) -> None:
    original, folder = file("model.safetensors"), tmp_path / "release"
    done = release(original, folder)
    assert done.returncode == 0, done.stderr
    before, tensors = contents(folder), load_file(original)
    for fault in FAULTS.values():
        model = save_safetensors(fault.planted(tensors, NAME), tmp_path)
        check_stopped(release(model, folder, fault.recipe(NAME, tmp_path)), fault, NAME)
        assert contents(folder) == before
    done = release(original, folder)
    assert done.returncode == 0, done.stderr
    after = contents(folder)
    assert after["latest"] == "2"
    assert after["2/model.safetensors"] == before["1/model.safetensors"]
