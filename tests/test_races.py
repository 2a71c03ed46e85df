"""Two commands that make one file, or folder, at the same time: one wins whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_cases import CASES, Stage
from faults import STEPS, Warm, files

NAMES = [
    "quantize npy",
    "quantize npz",
    "quantize onnx",
    "quantize onnx data",
    "dequantize onnx data",
]
FOLDERS = ["quantize folder", "dequantize folder"]


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    made = Warm()
    yield made
    made.close()
    print(f"\ninjected: {dict(made.injected)}")


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest, warm: Warm) -> Iterator[Stage]:
    made = Stage(CASES[request.param], warm)
    yield made
    made.remove()


def points(stage: Stage) -> tuple[int, int]:
    """How many points there are in both commands of a stage."""
    counts = []
    for command in (stage.case.command, stage.case.earlier):
        stage.reset(stage.sources)
        counts.append(len(stage.warm.run(*command, root=stage.root).calls))
    return counts[0], counts[1]


def check_won(stage: Stage, first: int, second: int) -> None:
    found = files(stage.root)
    where = f"the first paused at {first}, the second at {second}"
    assert {name: found.get(name) for name in stage.sources} == stage.sources, where
    dst = stage.case.parts(found)
    assert dst in (stage.case.parts(stage.old), stage.case.parts(stage.new)), (where, dst.keys())
    rest = found.keys() - stage.sources.keys() - dst.keys() - set(stage.case.beside)
    assert not rest, where


@STEPS
@pytest.mark.parametrize("stage", NAMES, indirect=True)
def test_one_file_wins_whole_wherever_the_two_are(step: int, stage: Stage) -> None:
    count, other = points(stage)
    stops = [(first, None) for first in range(count)]
    stops += [(first, second) for first in range(0, count, 4) for second in range(0, other, 4)]
    stops = stops[::step]
    for first, second in stops:
        stage.reset(stage.sources)
        faults = [{"at": first, "pause": True}, {"at": second, "pause": second is not None}]
        done = stage.warm.together(
            stage.case.command, stage.case.earlier, root=stage.root, faults=faults
        )
        assert [(one.code, one.errors) for one in done] == [(0, "")] * 2, (first, second)
        check_won(stage, first, second or other)


@STEPS
@pytest.mark.parametrize("stage", FOLDERS, indirect=True)
def test_one_folder_wins_and_the_other_command_is_told(step: int, stage: Stage) -> None:
    count, other = points(stage)
    busy = f"qtool: {stage.root / stage.case.dst}.partial: another process is at work in it"
    told = 0
    for first in range(0, count, 3 * step):
        stage.reset(stage.sources)
        faults = [{"at": first, "pause": True}, {}]
        done = stage.warm.together(
            stage.case.command, stage.case.earlier, root=stage.root, faults=faults
        )
        codes = [one.code for one in done]
        assert codes in ([0, 0], [0, 1]), (first, done)
        if codes == [0, 1]:
            assert done[1].errors == f"{busy}; wait until it has finished\n"
            told += 1
        check_won(stage, first, other)
    assert told > count // step // 6
