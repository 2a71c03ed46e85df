"""Commands that are killed, or told to end, at every point where they touch a file."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_cases import CASES, Case, Stage, verified
from faults import Files, Warm, files


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    made = Warm()
    yield made
    made.close()
    print(f"\ninjected: {dict(made.injected)}")


@pytest.fixture(params=CASES.values(), ids=CASES.keys(), scope="module")
def stage(request: pytest.FixtureRequest, warm: Warm) -> Iterator[Stage]:
    made = Stage(request.param, warm)
    yield made
    made.remove()


def starts(stage: Stage) -> Iterator[Files]:
    yield stage.sources
    yield stage.old


@pytest.mark.parametrize("old", [False, True], ids=["new", "replaced"])
def test_a_killed_command_leaves_the_old_or_the_new_and_the_next_one_succeeds(
    old: bool, stage: Stage
) -> None:
    case, before = stage.case, stage.old if old else stage.sources
    verified(stage.root / case.dst)
    resume = ["--resume"] if "/" in "".join(case.parts(stage.new)) else []
    for point in range(10_000):
        stage.reset(before)
        done = stage.warm.run(*case.command, root=stage.root, at=point, signal=signal.SIGKILL)
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
    assert point > 5


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


SIGNALS = {signal.SIGINT: (130, "qtool: interrupted\n"), signal.SIGTERM: (143, "")}


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("old", [False, True], ids=["new", "replaced"])
def test_a_command_that_is_told_to_end_leaves_nothing_behind(
    old: bool, number: signal.Signals, stage: Stage
) -> None:
    case, before = stage.case, stage.old if old else stage.sources
    for point in range(10_000):
        stage.reset(before)
        done = stage.warm.run(*case.command, root=stage.root, at=point, signal=number)
        if done.hit is None:
            assert (done.code, done.errors) == (0, "")
            break
        assert (done.code, done.errors, done.out) == (*SIGNALS[number], ""), (point, done.hit)
        found = files(stage.root)
        stage.check_whole(found)
        check_beside(case, before, stage.new, found)
        assert not [name for name in found if ".qtool-" in name], (point, done.hit)
    assert point > 5


def test_all_is_flushed_before_it_gets_its_name_and_the_folder_after_it(stage: Stage) -> None:
    """What a power cut would lose: unflushed content, and names in unflushed folders."""
    stage.reset(stage.old)
    done = stage.warm.run(*stage.case.command, root=stage.root)
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
            case "rename" | "replace":
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
