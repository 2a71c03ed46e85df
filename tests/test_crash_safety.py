"""Commands that are killed, or told to end, at every point where they touch a file."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_cases import CASES, Case, Stage, verified
from faults import STEPS, Files, Warm, files


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


def offset(stage: Stage, step: int, old: bool) -> int:
    """The first of some points, another one in other cases."""
    return (len(stage.case.name) + 5 * old) % step


@STEPS
@pytest.mark.parametrize("old", [False, True], ids=["new", "replaced"])
def test_a_killed_command_leaves_the_old_or_the_new_and_the_next_one_succeeds(
    old: bool, step: int, stage: Stage
) -> None:
    case, before = stage.case, stage.old if old else stage.sources
    verified(stage.root / case.dst)
    resume = ["--resume"] if case.is_folder else []
    command = case.command if old else case.unforced
    for point in range(offset(stage, step, old), 10_000, step):
        stage.reset(before)
        done = stage.warm.run(*command, root=stage.root, at=point, signal=signal.SIGKILL)
        if done.hit is None:
            assert (done.code, done.errors) == (0, "")
            break
        where = f"before {done.hit}, point {point}"
        assert done.code == -signal.SIGKILL
        found = files(stage.root)
        stage.check_whole(found)
        check_beside(case, before, stage.new, found)
        done = stage.warm.run(*case.command, *resume, root=stage.root)
        assert (done.code, done.errors) == (0, ""), where
        assert stage.stable(files(stage.root)) == stage.stable(stage.new), where
    assert point > 5 or step > 1


def check_beside(case: Case, before: Files, after: Files, found: Files) -> None:
    """Reports and recipes are there whole, or as they were."""
    for name in case.beside:
        content = found.get(name)
        if content is not None and content != before.get(name):
            if name.endswith(".json"):
                said, expected = json.loads(content), json.loads(after[name])
                assert said | {"seconds": 0} == expected | {"seconds": 0}
            else:
                assert content == after[name]


LINES = (
    "formats/files.py", "formats/folders.py", "formats/scratch.py", "formats/npy.py",
    "formats/npz.py", "formats/safetensors.py", "onnx/writer.py", "onnx/data.py",
    "onnx/message.py", "jobs/streams.py", "jobs/tensors.py", "jobs/shards.py", "jobs/folder.py",
    "jobs/collected.py", "jobs/page.py", "cli/exits.py",
)  # fmt: skip
SIGNALS = {signal.SIGINT: (130, "qtool: interrupted\n"), signal.SIGTERM: (143, "")}


@STEPS
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("old", [False, True], ids=["new", "replaced"])
def test_a_command_that_is_told_to_end_leaves_nothing_behind(
    old: bool, number: signal.Signals, step: int, stage: Stage
) -> None:
    case, before = stage.case, stage.old if old else stage.sources
    command = case.command if old else case.unforced
    for point in range(offset(stage, step, old) + number // 2, 10_000, step):
        stage.reset(before)
        done = stage.warm.run(*command, root=stage.root, at=point, signal=number)
        if done.hit is None:
            assert (done.code, done.errors) == (0, "")
            break
        assert (done.code, done.errors, done.out) == (*SIGNALS[number], ""), (point, done.hit)
        found = files(stage.root)
        stage.check_whole(found)
        check_beside(case, before, stage.new, found)
        assert not [name for name in found if ".qtool-" in name], (point, done.hit)
    assert point > 5 or step > 1


@pytest.mark.parametrize("old", [False, True], ids=["new", "replaced"])
def test_all_is_flushed_before_it_gets_its_name_and_the_folder_after_it(
    old: bool, stage: Stage
) -> None:
    """What a power cut would lose: unflushed content, and names in unflushed folders."""
    stage.reset(stage.old if old else stage.sources)
    command = stage.case.command if old else stage.case.unforced
    done = stage.warm.run(*command, root=stage.root)
    content: set[Path] = set()  # files and folders that were changed and not flushed since
    names: set[Path] = set()  # folders in which something got its name, not flushed since
    renamed: list[Path] = []
    for call in done.calls:
        path, *more = map(Path, call["paths"])
        match call["call"]:
            case "write" | "pwrite" | "ftruncate" | "sendfile":
                content.add(path)
            case "fsync":
                content.discard(path)
                names.discard(path)
            case "create" | "mkdir" | "rmdir" | "unlink":
                content.add(path.parent)
                if call["call"] == "unlink" and ".qtool-" not in str(path):
                    assert not names, f"{path} is removed before what replaces it is safe"
            case "link" | "rename" | "replace":
                [target] = more
                if ".qtool-" in target.name:  # it is removed
                    assert not names, f"{path} is removed before what replaces it is safe"
                    continue
                unsafe = [each for each in content if each.is_relative_to(path)]
                assert not unsafe, f"{unsafe} at {target}"
                if target.suffix == ".onnx":
                    assert not names, "the model lands before its data is safe"
                if ".partial/old" not in str(target):
                    names.add(target.parent)
                content |= {path.parent, target.parent}
                renamed.append(target)
    assert stage.root / stage.case.dst in renamed
    assert stage.root not in names


@STEPS
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_between_any_two_lines(number: signal.Signals, step: int, stage: Stage) -> None:
    """Of the modules that hold files."""
    case, code = stage.case, SIGNALS[number][0]
    for point in range(offset(stage, 7, False), 10_000, 7 * step):
        stage.reset(stage.old)
        done = stage.warm.run(
            *case.command, root=stage.root, at=point, lines=LINES, signal=number
        )  # fmt: skip
        if done.hit is None:
            break
        # before the command begins nobody has asked for the signal
        assert done.code == code or (done.code == -number and point < 5), (point, done)
        assert "Traceback" not in done.errors, (point, done)
        found = files(stage.root)
        stage.check_whole(found)
        assert not [name for name in found if ".qtool-" in name], (point, done.hit)


@STEPS
@pytest.mark.parametrize("stage", ["quantize folder"], indirect=True)
def test_a_resumed_command_that_is_killed_is_resumed(step: int, stage: Stage) -> None:
    case = stage.case
    stage.reset(stage.old)
    for point in range(100):  # where the first of two shards is recorded
        done = stage.warm.run(*case.command, root=stage.root, at=point, signal=signal.SIGKILL)
        before = files(stage.root)
        if "q.partial/shards/model-00001-of-00002.safetensors.json" in before:
            break
        stage.reset(stage.old)
    assert "q.partial/folder/model-00002-of-00002.safetensors" not in before
    command = [*case.command, "--resume"]
    for point in range(0, 10_000, step):
        stage.reset(before)
        done = stage.warm.run(*command, root=stage.root, at=point, signal=signal.SIGKILL)
        if done.hit is None:
            break
        stage.check_whole(files(stage.root))
        done = stage.warm.run(*command, root=stage.root)
        assert (done.code, done.errors) == (0, ""), point
        assert stage.stable(files(stage.root)) == stage.stable(stage.new), point


@STEPS
@pytest.mark.parametrize("stage", ["quantize folder"], indirect=True)
def test_a_finish_that_is_killed_is_done_again(step: int, stage: Stage) -> None:
    stage.reset(stage.sources)
    for each in ("1/2", "2/2"):
        done = stage.warm.run(*stage.case.unforced, "--shards", each, root=stage.root)
        assert done.code == 0, done
    before = files(stage.root)
    for point in range(0, 10_000, step):
        stage.reset(before)
        done = stage.warm.run("finish", "q", "-q", root=stage.root, at=point, signal=signal.SIGKILL)
        if done.hit is None:
            break
        stage.check_whole(files(stage.root))
        done = stage.warm.run("finish", "q", "-q", root=stage.root)
        complete = "qtool: q: is complete already, or was not begun in slices"
        assert done.code == 0 or (done.code == 1 and complete in done.errors), (point, done)
        found = stage.stable(files(stage.root))
        found = {name: content for name, content in found.items() if ".qtool-" not in name}
        assert found == stage.stable(stage.new), point
