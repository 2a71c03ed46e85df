"""Interrupted work on checkpoint folders, and going on with it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import INDEX, content, save, shard_name, tensors, three
from command import PYTHON, ok, refused, strict, unmeasured
from safetensors.numpy import save_file

import qtool

OPTIONS = ["--dtype", "int4", "--block-size", "32"]
NAMES = [shard_name(number, 3) for number in (1, 2, 3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return three(tmp_path / "m")


@pytest.fixture
def expected(folder: Path, tmp_path: Path) -> dict[str, bytes]:
    """What an undisturbed run writes."""
    ok("quantize", folder, *OPTIONS, "-o", tmp_path / "whole", "-q")
    return content(tmp_path / "whole")


def killed_at_every_point(
    folder: Path, first: list[str | Path], second: list[str | Path]
) -> list[tuple[str, int]]:
    """See killed.py."""
    script = Path(__file__).with_name("killed.py")
    commands = [json.dumps(list(map(str, command))) for command in (first, second)]
    done = subprocess.run(
        [sys.executable, script, folder, *commands], capture_output=True, text=True, timeout=300,
        check=False, env=unmeasured(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [(name, code) for name, code in strict(done.stdout)]


@pytest.mark.parametrize("old", [False, True], ids=["new", "replaced"])
def test_resumed_after_a_kill_at_any_point_the_bytes_are_the_same(
    old: bool, tmp_path: Path
) -> None:
    source = save(tmp_path / "m", [tensors([0]), tensors([1])], others=False)
    (source / "LICENSE").write_text("free")
    ok("quantize", source, *OPTIONS, "-o", tmp_path / "whole", "-q")
    expected, report = (
        content(tmp_path / "whole"),
        strict((tmp_path / "whole.report.json").read_text()),
    )
    points = tmp_path / "points"
    points.mkdir()
    command: list[str | Path] = ["quantize", source, *OPTIONS, "-o", "{}/q", "-q", "--jobs", "1"]
    if old:  # every run replaces the folder that it finds
        command = ["quantize", source, *OPTIONS, "-o", points / "q", "-q", "--jobs", "1", "--force"]
        shutil.copytree(source, points / "q")
    found = killed_at_every_point(points, command, [*command, "--resume"])
    calls = {name for name, _ in found}
    assert {"before rename", "after rename", "before replace", "after pwrite"} <= calls
    assert len(found) > 60
    for number, (name, code) in enumerate(found):
        place = points if old else points / str(number)
        # with nothing left to do but to remove rubbish, the folder is there and not touched again
        assert code == 0 or (code == 1 and not old), (number, name)
        assert content(place / "q") == expected, (number, name)
        written = strict((place / "q.report.json").read_text())
        names = {key: report[key]["name"] for key in ("output",)}
        written["output"] |= {"name": names["output"]}
        assert written | {"seconds": 0} == report | {"seconds": 0}, (number, name)
        assert not list(place.glob("*.partial"))
    codes = [code for _, code in found]
    assert codes == sorted(codes)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose shards take half a second each."""
    shards = [tensors([layer], 1024, 1024) for layer in range(4)]
    return save(tmp_path_factory.mktemp("large") / "m", shards)


SLOW = ["--dtype", "int4", "--method", "percentile:99"]


@pytest.fixture(scope="module")
def whole(large: Path) -> dict[str, bytes]:
    ok("quantize", large, *SLOW, "-o", large.parent / "whole", "-q")
    return content(large.parent / "whole")


def hear_interrupts() -> None:
    """What a shell in the background lets its commands ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("finished", [0, 1, 3], ids=lambda n: f"after-{n}")
@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        pytest.param(signal.SIGINT, 130, b"qtool: interrupted\n", id="SIGINT"),
        pytest.param(signal.SIGTERM, 143, b"", id="SIGTERM"),
        pytest.param(signal.SIGKILL, -9, b"", id="SIGKILL"),
    ],
)
def test_a_signal_in_the_middle_of_a_shard(
    number: signal.Signals, code: int, message: bytes, finished: int, large: Path,
    whole: dict[str, bytes], tmp_path: Path,
) -> None:  # fmt: skip
    command: list[Any] = [*PYTHON, "quantize", large, *SLOW, "-o", tmp_path / "q", "-q"]
    made = tmp_path / "q.partial" / "folder"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=hear_interrupts
    ) as running:
        deadline = time.monotonic() + 120
        while len(list(made.glob("model-*"))) < finished or not list(made.glob(".model-*")):
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        running.send_signal(number)
        out, errors = running.communicate(timeout=60)
    assert (running.returncode, out, errors) == (code, b"", message)
    assert not (tmp_path / "q").exists()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == ({"q.partial"} if finished or code == -9 else set())
    if left:
        message_of_refusal = refused("quantize", large, *SLOW, "-o", tmp_path / "q")
        assert message_of_refusal == (
            f"{tmp_path / 'q.partial'}: is left by an earlier run; go on with it by --resume, or "
            "remove it"
        )
    ok("quantize", large, *SLOW, "-o", tmp_path / "q", "-q", "--resume")
    assert content(tmp_path / "q") == whole
    assert {path.name for path in tmp_path.iterdir()} == {"q", "q.report.json"}


# ------------------------------------------------------------------------ what is proven complete


def interrupt(folder: Path, target: Path) -> None:
    """Leave a partial folder whose first two shards are done."""
    good = (folder / NAMES[2]).read_bytes()
    bad = tensors([3, 4])
    bad["model.layers.4.mlp.down_proj.weight"][1, 1] = np.nan
    save_file(bad, folder / NAMES[2], metadata={"format": "pt"})
    assert "nan at [1, 1]" in refused("quantize", folder, *OPTIONS, "-o", target)
    (folder / NAMES[2]).write_bytes(good)
    made = {p.name for p in (target.with_name("q.partial") / "folder").iterdir()}
    assert made == set(NAMES[:2])


def done_again(folder: Path, target: Path, *options: str | Path) -> list[str]:
    """Resume; the shards that were not taken as they are."""
    made = target.with_name("q.partial") / "folder"
    before = {path.name: path.stat().st_ino for path in made.glob("model-*")}
    # a kept link lets no new file get the number of an old one
    links = target.with_name("links")
    shutil.copytree(made, links, copy_function=os.link)
    ok("quantize", folder, *OPTIONS, *options, "-o", target, "-q", "--resume")
    shutil.rmtree(links)
    return [name for name in NAMES if (target / name).stat().st_ino != before.get(name)]


def test_finished_shards_are_not_done_again(
    folder: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    interrupt(folder, tmp_path / "q")
    assert done_again(folder, tmp_path / "q") == [NAMES[2]]
    assert content(tmp_path / "q") == expected
    report = strict((tmp_path / "q.report.json").read_text())
    assert [record["name"].split(".")[2] for record in report["tensors"]] == list("01234")


def other_values(folder: Path, target: Path) -> None:
    """Another weight of the same size and date."""
    before = (folder / NAMES[0]).stat()
    changed = tensors([0, 1])
    changed["model.layers.1.mlp.down_proj.weight"][0, 0] = 3
    save_file(changed, folder / NAMES[0], metadata={"format": "pt"})
    os.utime(folder / NAMES[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (folder / NAMES[0]).stat().st_size == before.st_size


def other_result(folder: Path, target: Path) -> None:
    path = target.with_name("q.partial") / "folder" / NAMES[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def lost_result(folder: Path, target: Path) -> None:
    (target.with_name("q.partial") / "folder" / NAMES[0]).unlink()


def damaged_record(folder: Path, target: Path) -> None:
    (target.with_name("q.partial") / "shards" / f"{NAMES[0]}.json").write_text("{")


def other_version(folder: Path, target: Path) -> None:
    path = target.with_name("q.partial") / "shards" / f"{NAMES[0]}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": "0.0.1"}))


@pytest.mark.parametrize(
    "change", [other_values, other_result, lost_result, damaged_record, other_version]
)
def test_what_is_not_proven_complete_is_done_again(
    change: Any, folder: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    interrupt(folder, tmp_path / "q")
    change(folder, tmp_path / "q")
    assert done_again(folder, tmp_path / "q") == [NAMES[0], NAMES[2]]
    if change is other_values:
        ok("quantize", folder, *OPTIONS, "-o", tmp_path / "whole", "-q", "--force")
        expected = content(tmp_path / "whole")
    assert content(tmp_path / "q") == expected


@pytest.mark.parametrize(
    "options", [["--scale-dtype", "float16"], ["--scale", "0.25"], ["--layout", "mlx"]],
    ids=lambda o: o[0],
)  # fmt: skip
def test_other_settings_make_all_shards_again(
    options: list[str], folder: Path, tmp_path: Path
) -> None:
    interrupt(folder, tmp_path / "q")
    assert done_again(folder, tmp_path / "q", *options) == NAMES
    ok("quantize", folder, *OPTIONS, *options, "-o", tmp_path / "whole", "-q")
    assert content(tmp_path / "q") == content(tmp_path / "whole")


def test_other_shards_in_the_source_take_the_place_of_what_is_left(
    folder: Path, tmp_path: Path
) -> None:
    interrupt(folder, tmp_path / "q")
    shutil.rmtree(folder)
    save(folder, [tensors([0, 1, 2]), tensors([3, 4])])
    ok("quantize", folder, *OPTIONS, "-o", tmp_path / "q", "-q", "--resume")
    ok("quantize", folder, *OPTIONS, "-o", tmp_path / "whole", "-q")
    assert content(tmp_path / "q") == content(tmp_path / "whole")


def test_a_shared_scale_that_another_shard_changes_is_not_taken_as_it_is(tmp_path: Path) -> None:
    gate, up = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    rng = np.random.default_rng(1)
    small, big = (rng.normal(0, s, (16, 64)).astype(np.float32) for s in (0.01, 1))
    folder = save(tmp_path / "m", [{gate: small}, {up: small}])
    options = ["--preset", "nvfp4", "-q"]
    ok("quantize", folder, *options, "--shards", "1/2", "-o", tmp_path / "q")
    save_file({up: big}, folder / shard_name(2, 2), metadata={"format": "pt"})
    ok("quantize", folder, *options, "-o", tmp_path / "q", "--resume")
    ok("quantize", folder, *options, "-o", tmp_path / "whole")
    assert content(tmp_path / "q") == content(tmp_path / "whole")


def test_resume_begins_where_nothing_is_left(
    folder: Path, expected: dict[str, bytes], tmp_path: Path
) -> None:
    ok("quantize", folder, *OPTIONS, "-o", tmp_path / "q", "-q", "--resume")
    assert content(tmp_path / "q") == expected
    message = refused("quantize", folder, *OPTIONS, "-o", tmp_path / "q", "--resume")
    assert message == f"{tmp_path / 'q'}: exists already; choose another name or --force"


def test_dequantize_goes_on_too(folder: Path, tmp_path: Path) -> None:
    ok("quantize", folder, *OPTIONS, "-o", tmp_path / "q4", "-q")
    ok("dequantize", tmp_path / "q4", "-o", tmp_path / "whole", "-q")
    broken = tmp_path / "q4" / NAMES[2]
    good = broken.read_bytes()
    qtool.dequantize_file  # noqa: B018
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qtool.jobs.dequantize.write", _failing_at(NAMES[2]))
        message = refused("dequantize", tmp_path / "q4", "-o", tmp_path / "q")
        assert message.endswith("as asked")
    assert broken.read_bytes() == good
    assert "by --resume, or remove it" in refused(
        "dequantize", tmp_path / "q4", "-o", tmp_path / "q"
    )
    message = refused("finish", tmp_path / "q")
    assert message == (
        f"{tmp_path / 'q.partial'}: is of a run without slices; go on with it by --resume"
    )
    ok("dequantize", tmp_path / "q4", "-o", tmp_path / "q", "-q", "--resume")
    assert content(tmp_path / "q") == content(tmp_path / "whole")


def _failing_at(name: str) -> Any:
    from qtool.jobs import dequantize

    write = dequantize.write

    def writing(source: Any, *arguments: Any) -> Any:
        if source.path.name == name:
            raise qtool.QtoolError("test", "fails", "as asked")
        return write(source, *arguments)

    return writing


# -------------------------------------------------------------------------------- several processes


def test_a_folder_that_another_process_builds_is_refused(folder: Path, tmp_path: Path) -> None:
    interrupt(folder, tmp_path / "q")
    message = f"{tmp_path / 'q.partial'}: another process is at work in it; wait until it has"
    with (tmp_path / "q.partial" / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for options in ([], ["--resume"], ["--shards", "1/2"], ["--resume", "--force"]):
            assert message in refused("quantize", folder, *OPTIONS, *options, "-o", tmp_path / "q")
        assert message in refused("finish", tmp_path / "q")
    assert done_again(folder, tmp_path / "q") == [NAMES[2]]


def test_a_folder_of_that_name_that_is_not_qtools_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "q.partial").mkdir()
    (tmp_path / "q.partial" / "thesis.tex").write_text("all of it")
    message = refused("quantize", folder, *OPTIONS, "-o", tmp_path / "q", "--resume")
    assert message == (
        f"{tmp_path / 'q.partial'}: holds thesis.tex, which is not qtool's; rename that folder"
    )
    assert [path.name for path in (tmp_path / "q.partial").iterdir()] == ["thesis.tex"]
    (tmp_path / "r.partial").write_text("a file")
    message = refused("quantize", folder, *OPTIONS, "-o", tmp_path / "r")
    assert "r.partial: " in message


def test_a_result_that_was_changed_is_not_said_to_be_complete(folder: Path, tmp_path: Path) -> None:
    interrupt(folder, tmp_path / "q")
    partial = tmp_path / "q.partial"
    ok("quantize", folder, *OPTIONS, "-o", tmp_path / "q", "-q", "--shards", "3/3")
    shutil.copytree(partial, tmp_path / "copy")
    (partial / "folder").rename(tmp_path / "q")  # killed after that
    (tmp_path / "q" / NAMES[0]).write_bytes(b"x")
    message = refused("quantize", folder, *OPTIONS, "-o", tmp_path / "q", "--resume")
    assert message == (
        f"{partial}: is left by a run whose result has been changed since; remove it"
    )
    message = refused("quantize", folder, "--dtype", "int8", "-o", tmp_path / "q", "--resume")
    assert message == f"{partial}: is left by a run that has ended; remove it"


def test_index_and_config_are_whole_after_a_resume(folder: Path, tmp_path: Path) -> None:
    interrupt(folder, tmp_path / "q")
    done_again(folder, tmp_path / "q")
    document = json.loads((tmp_path / "q" / INDEX).read_text())
    assert len(document["weight_map"]) == 15
