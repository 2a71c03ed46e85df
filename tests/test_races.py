"""Two commands that make one file, or folder, at the same time: one wins whole. Without --force
nothing is replaced that appears meanwhile."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fault_cases import CASES, Stage, checkpoint, model, numpy_array
from faults import STEPS, Ended, Files, Warm, files

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


def taken(stage: Stage) -> str:
    return f"qtool: {stage.case.dst}: exists already; choose another name or --force\n"


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
    busy = f"qtool: {stage.case.dst}.partial: another process is at work in it"
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


@STEPS
@pytest.mark.parametrize("stage", sorted({*NAMES} - {"quantize npz"}), indirect=True)
def test_without_force_one_file_wins_and_the_other_command_is_told(step: int, stage: Stage) -> None:
    case = stage.case
    commands = [case.unforced, [*case.unforced, *case.old]]
    stage.reset(stage.sources)
    count = len(stage.warm.run(*commands[0], root=stage.root).calls)
    stops = [(first, second) for first in range(count) for second in (None, 5, 20, 35)]
    for first, second in stops[::step]:
        stage.reset(stage.sources)
        faults = [{"at": first, "pause": True}, {"at": second, "pause": second is not None}]
        done = stage.warm.together(*commands, root=stage.root, faults=faults)
        said = sorted((one.code, one.errors) for one in done)
        assert said == [(0, ""), (1, taken(stage))], (first, second)
        won = stage.old if done[1].code == 0 else stage.new
        found = files(stage.root)
        assert found.keys() == stage.sources.keys() | case.parts(won) | {*case.beside}
        assert stage.stable(found) == stage.sources | case.parts(won), (first, second)


def landing(done: Ended, dst: Path) -> int:
    """The point at which dst gets its name."""
    return max(
        number
        for number, call in enumerate(done.calls)
        if call["call"] in ("link", "rename") and call["paths"][1] == str(dst)
    )


@STEPS
@pytest.mark.parametrize("stage", CASES, indirect=True)
def test_what_appears_before_the_end_is_kept_without_force(step: int, stage: Stage) -> None:
    case = stage.case
    stage.reset(stage.sources)
    lands = landing(stage.warm.run(*case.unforced, root=stage.root), stage.root / case.dst)
    for point in {*range(0, lands, step), lands, lands + 1}:
        stage.reset(stage.sources)
        change = ["made", case.dst]
        done = stage.warm.run(*case.unforced, root=stage.root, at=point, change=change)
        found = files(stage.root)
        if point > lands:
            assert (done.code, done.errors) == (0, ""), point
            assert stage.stable(found) == stage.stable(stage.new)
            continue
        assert (done.code, done.errors) == (1, taken(stage)), point
        theirs = f"{case.dst}/theirs" if case.is_folder else case.dst
        assert found.pop(theirs) == b"", point
        check_left(stage, found)
        if case.is_folder and f"{case.dst}.partial/run.json" in found:
            (stage.root / theirs).unlink()
            (stage.root / case.dst).rmdir()
            done = stage.warm.run(*case.unforced, "--resume", root=stage.root)
            assert (done.code, done.errors) == (0, ""), point
            assert stage.stable(files(stage.root)) == stage.stable(stage.new)


def check_left(stage: Stage, found: Files) -> None:
    """Nothing but the sources, a recipe, and shards to go on with."""
    rest = found.keys() - stage.sources.keys()
    assert {name: found.get(name) for name in stage.sources} == stage.sources
    assert not [name for name in rest if ".qtool-" in name or ".report.json" in name]
    shards = f"{stage.case.dst}.partial/"
    assert not [name for name in rest - {*stage.case.beside} if not name.startswith(shards)]


@pytest.mark.parametrize("stage", ["quantize npy", "quantize folder"], indirect=True)
def test_what_is_no_report_is_kept_where_the_report_goes(stage: Stage) -> None:
    case = stage.case
    stage.reset(stage.sources)
    lands = landing(stage.warm.run(*case.unforced, root=stage.root), stage.root / case.dst)
    stage.reset(stage.sources)
    [report] = case.beside
    change = ["made", report]
    done = stage.warm.run(*case.unforced, root=stage.root, at=lands, change=change)
    rule = "exists and is no qtool report; choose another name or --force"
    assert (done.code, done.errors) == (1, f"qtool: report {report}: {rule}\n")
    found = files(stage.root)
    assert found[report] == b""
    assert case.parts(found) == case.parts(stage.new)
    assert not [name for name in found if ".qtool-" in name]


# Commands that are no Case, and what they write.
OTHERS = {
    "compare --csv": ("compare x.npy --dtypes int8 --csv c.csv", "c.csv"),
    "quantize nbits": (
        "quantize x.onnx --dtype uint4 --block-size 32 --layout matmul-nbits -o y.onnx", "y.onnx"
    ),
    "dequantize npy": ("dequantize codes.npy --scale scale.npy -o y.npy", "y.npy"),
    "finish": ("finish q", "q"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_nor_do_other_commands_replace_what_appears(name: str, warm: Warm, tmp_path: Path) -> None:
    words, dst = OTHERS[name]
    command = [*words.split(), "--jobs", "1"]
    one, other = (with_sources(tmp_path / each, warm) for each in ("one", "other"))
    lands = landing(warm.run(*command, root=one), one / dst)
    done = warm.run(*command, root=other, at=lands - 1, change=["made", dst])
    line = f"qtool: {dst}: exists already; choose another name or --force\n"
    assert (done.code, done.out, done.errors) == (1, "", line)
    found = files(other)
    assert found.pop("q/theirs" if dst == "q" else dst) == b""
    made = found.keys() - files(with_sources(tmp_path / "before", warm)).keys()
    completed = {"config.json", "model.safetensors.index.json", "LICENSE"} if dst == "q" else set()
    assert made == {f"q.partial/folder/{each}" for each in completed}


def with_sources(root: Path, warm: Warm) -> Path:
    """A folder with what these commands read."""
    root.mkdir()
    numpy_array(root)
    model(root)
    np.save(root / "codes.npy", np.eye(64, dtype=np.int8))
    np.save(root / "scale.npy", np.float32(0.5))
    checkpoint(root)
    slices = CASES["quantize folder"].unforced
    assert warm.run(*slices, "--shards", "1/1", root=root).code == 0
    return root


@pytest.mark.parametrize("stage", CASES, indirect=True)
def test_a_file_system_without_hard_links_will_do(stage: Stage) -> None:
    stage.reset(stage.sources)
    fault = {"calls": ["link"], "at": 0, "errno": errno.EPERM}
    done = stage.warm.run(*stage.case.unforced, root=stage.root, **fault)
    assert (done.code, done.errors) == (0, "")
    assert (done.hit == "link") != stage.case.is_folder
    assert stage.stable(files(stage.root)) == stage.stable(stage.new)
