"""Full disks, failing reads, limits, missing permissions: one line, exit code 1, nothing lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest
from fault_cases import CASES, Stage
from faults import Ended, Files, Warm, files

WRITING = (
    "create",
    "write",
    "pwrite",
    "sendfile",
    "ftruncate",
    "fsync",
    "rename",
    "replace",
    "mkdir",
)
READING = ("read", "pread", "preadv")


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    made = Warm()
    yield made
    made.close()
    print(f"\ninjected: {dict(made.injected)}")


@pytest.fixture(params=CASES, scope="module")
def stage(request: pytest.FixtureRequest, warm: Warm) -> Iterator[Stage]:
    made = Stage(CASES[request.param], warm)
    yield made
    made.remove()


def check_refused(stage: Stage, before: Files, done: Ended, where: object) -> None:
    """One line, exit code 1, and what was there is there; a folder may be gone on with."""
    assert (done.code, done.out) == (1, ""), (where, done)
    assert done.errors.startswith("qtool: "), (where, done.errors)
    assert done.errors.count("\n") == 1, (where, done.errors)
    found = files(stage.root)
    stage.check_whole(found)
    assert not [name for name in found if ".qtool-" in name], (where, found.keys())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
def test_a_disk_that_cannot_be_written_from_some_point_on(code: int, stage: Stage) -> None:
    for point in range(10_000):
        stage.reset(stage.old)
        done = stage.warm.run(
            *stage.case.command, root=stage.root, at=point, calls=WRITING, errno=code, lasting=True
        )
        if done.hit is None:
            break
        check_refused(stage, stage.old, done, (point, done.hit))
        assert os.strerror(code) in done.errors, done.errors
    assert point > 3


def test_a_source_that_cannot_be_read_from_some_point_on(stage: Stage) -> None:
    for point in range(10_000):
        stage.reset(stage.old)
        done = stage.warm.run(
            *stage.case.command, root=stage.root, at=point, calls=READING, errno=errno.EIO,
            lasting=True,
        )  # fmt: skip
        if done.hit is None:
            break
        check_refused(stage, stage.old, done, (point, done.hit))
        assert os.strerror(errno.EIO) in done.errors, done.errors
    assert point > 0


CHANGED = {
    "quantize npy": "x.npy",
    "quantize npz": "x.npz",
    "quantize safetensors": "x.safetensors",
    "quantize onnx": "x.onnx",
    "quantize onnx data": "x.bin",
    "quantize folder": "m/model-00001-of-00002.safetensors",
    "dequantize safetensors": "q.safetensors",
    "calibrate": "x.npz",
    "capture": "samples.npy",
}


@pytest.mark.parametrize("how", ["cut", "changed", "replaced"])
@pytest.mark.parametrize("stage", CHANGED, indirect=True)
def test_a_source_that_changes_while_it_is_read_gives_the_one_or_the_other_or_an_error(
    how: str, stage: Stage
) -> None:
    fault = {"calls": ("open", *READING), "change": (how, CHANGED[stage.case.name])}
    case = stage.case
    allowed = [case.parts(stage.new)]
    for point in range(10_000):
        stage.reset(stage.old)
        done = stage.warm.run(*case.command, root=stage.root, at=point, **fault)
        if done.hit is None:
            break
        found = case.parts(files(stage.root))
        if point == 0:  # before anything is read
            allowed += [found] if done.code == 0 else []
        if done.code == 0:
            assert found in allowed, (point, done.hit)
        else:
            assert (done.code, done.errors.count("\n")) == (1, 1), (point, done)
            assert done.errors.startswith("qtool: "), (point, done)
            assert found == case.parts(stage.old), (point, done)
    assert point > 2
