"""A checkpoint folder in slices, by several processes, and `qtool finish`."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from checkpoints import content, save, shard_name, tensors, three
from command import PYTHON, ok, refused, strict
from safetensors.numpy import save_file

import qtool

OPTIONS = ["--dtype", "int4", "--block-size", "32"]
NAMES = [shard_name(number, 3) for number in (1, 2, 3)]
SCHEMA = json.loads((Path(qtool.__file__).parent / "report.schema.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return three(tmp_path / "m")


def sliced(folder: Path, target: Path, *slices: str, options: list[str] = OPTIONS) -> None:
    for text in slices:
        ok("quantize", folder, *options, "-o", target, "-q", "--shards", text)


def made(target: Path) -> list[str]:
    partial = target.with_name(target.name + ".partial")
    return sorted(path.name for path in (partial / "folder").iterdir())


def report_of(target: Path) -> dict[str, Any]:
    """The report beside a folder, without what differs from run to run."""
    report = strict(target.with_name(target.name + ".report.json").read_text())
    report["output"]["name"] = "q"
    return report | {"seconds": 0}  # type: ignore[no-any-return]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_slices_put_together_give_what_one_run_gives(
    count: int, folder: Path, tmp_path: Path
) -> None:
    sliced(folder, tmp_path / "q", *(f"{k}/{count}" for k in range(count, 0, -1)))
    assert not (tmp_path / "q").exists()
    done = ok("finish", tmp_path / "q")
    assert done.err.endswith(" s\n")
    assert "5 tensors" in done.err
    ok("quantize", folder, *OPTIONS, "-o", tmp_path / "whole", "-q")
    assert content(tmp_path / "q") == content(tmp_path / "whole")
    assert report_of(tmp_path / "q") == report_of(tmp_path / "whole")
    names = {"m", "q", "q.report.json", "whole", "whole.report.json"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_slice_takes_every_nth_shard(folder: Path, tmp_path: Path) -> None:
    sliced(folder, tmp_path / "q", "1/2")
    assert made(tmp_path / "q") == [NAMES[0], NAMES[2]]
    sliced(folder, tmp_path / "r", "5/7")
    assert made(tmp_path / "r") == []


def test_a_slice_reports_on_its_own_shards_alone(folder: Path, tmp_path: Path) -> None:
    done = ok("quantize", folder, *OPTIONS, "-o", tmp_path / "q", "--shards", "2/3", "--json", "-q")
    jsonschema.validate(done.json, SCHEMA)
    assert [record["name"].split(".")[2] for record in done.json["tensors"]] == ["2"]
    assert done.json["source"]["bytes"] == (folder / NAMES[1]).stat().st_size
    assert (done.json["source"]["tensors"], len(done.json["skipped"])) == (2, 1)
    assert done.json["output"]["name"] == str(tmp_path / "q.partial")
    assert {path.name for path in tmp_path.iterdir()} == {"m", "q.partial"}


def test_slices_run_at_the_same_time(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", [tensors([layer], 512, 512) for layer in range(8)])
    command = [*PYTHON, "quantize", folder, *OPTIONS, "-o", tmp_path / "q", "-q", "--shards"]
    running = [
        subprocess.Popen([*command, f"{k}/4"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for k in range(1, 5)
    ]
    ends = [(process.communicate(timeout=120), process.returncode) for process in running]
    assert ends == [((b"", b""), 0)] * 4
    ok("finish", tmp_path / "q", "-q")
    ok("quantize", folder, *OPTIONS, "-o", tmp_path / "whole", "-q")
    assert content(tmp_path / "q") == content(tmp_path / "whole")


def test_a_slice_that_is_run_again_does_nothing_again(folder: Path, tmp_path: Path) -> None:
    sliced(folder, tmp_path / "q", "1/3")
    path = tmp_path / "q.partial" / "folder" / NAMES[0]
    before = path.stat().st_ino
    sliced(folder, tmp_path / "q", "1/3")
    assert path.stat().st_ino == before


def test_what_a_run_has_left_is_gone_on_with_in_slices(folder: Path, tmp_path: Path) -> None:
    good = (folder / NAMES[1]).read_bytes()
    bad = tensors([2])
    bad["model.layers.2.mlp.down_proj.weight"][0, 0] = np.nan
    save_file(bad, folder / NAMES[1], metadata={"format": "pt"})
    refused("quantize", folder, *OPTIONS, "-o", tmp_path / "q")
    (folder / NAMES[1]).write_bytes(good)
    sliced(folder, tmp_path / "q", "2/2")
    ok("quantize", folder, *OPTIONS, "-o", tmp_path / "q", "-q", "--resume")
    ok("quantize", folder, *OPTIONS, "-o", tmp_path / "whole", "-q")
    assert content(tmp_path / "q") == content(tmp_path / "whole")


@pytest.mark.parametrize("options", [["--dtype", "int8"], [*OPTIONS, "--exclude", "*.3.*"]],
                         ids=["type", "selection"])  # fmt: skip
def test_a_slice_with_other_settings_is_refused(
    options: list[str], folder: Path, tmp_path: Path
) -> None:
    sliced(folder, tmp_path / "q", "1/3")
    message = refused("quantize", folder, *options, "-o", tmp_path / "q", "--shards", "2/3")
    assert message == (
        f"{tmp_path / 'q.partial'}: is of a run with another source or other settings; finish "
        "that one, or remove the folder"
    )
    assert made(tmp_path / "q") == [NAMES[0]]


def test_while_a_slice_is_at_work_others_may_and_finish_must_not(
    folder: Path, tmp_path: Path
) -> None:
    sliced(folder, tmp_path / "q", "1/2")
    with (tmp_path / "q.partial" / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        sliced(folder, tmp_path / "q", "2/2")
        message = f"{tmp_path / 'q.partial'}: another process is at work in it; wait until"
        assert message in refused("finish", tmp_path / "q")
        assert message in refused("quantize", folder, *OPTIONS, "-o", tmp_path / "q", "--resume")
    ok("finish", tmp_path / "q")


# --------------------------------------------------------------------------------------- finish


def test_finish_names_what_is_missing(folder: Path, tmp_path: Path) -> None:
    message = refused("finish", tmp_path / "q")
    assert message == (
        f"{tmp_path / 'q.partial'}: has no shards; make them by `qtool quantize --shards K/N`"
    )
    sliced(folder, tmp_path / "q", "2/3")
    message = refused("finish", tmp_path / "q")
    assert message == (
        f"{tmp_path / 'q.partial'}: lacks {NAMES[0]} and 1 more, or it is not proven complete; run "
        "the slices that are left, then finish"
    )
    sliced(folder, tmp_path / "q", "1/3")
    assert f"lacks {NAMES[2]}, or it is not" in refused("finish", tmp_path / "q")
    sliced(folder, tmp_path / "q", "3/3")
    ok("finish", tmp_path / "q")
    assert "q: is complete already" in refused("finish", tmp_path / "q")


def new_source(folder: Path, target: Path) -> str:
    changed = tensors([2])
    changed["model.layers.2.mlp.down_proj.weight"][0, 0] = 3
    save_file(changed, folder / NAMES[1], metadata={"format": "pt"})
    return f"lacks {NAMES[1]}, or it is not proven complete"


def damaged_shard(folder: Path, target: Path) -> str:
    path = target.with_name("q.partial") / "folder" / NAMES[2]
    path.write_bytes(path.read_bytes()[:-1])
    return f"lacks {NAMES[2]}, or it is not proven complete"


def another_shard(folder: Path, target: Path) -> str:
    shutil.rmtree(folder)
    save(folder, [tensors([0, 1, 2]), tensors([3, 4])])
    return "m: has other shards than those that were begun with; remove "


def no_source(folder: Path, target: Path) -> str:
    shutil.rmtree(folder)
    return "m: cannot be read: No such file or directory"


def other_version(folder: Path, target: Path) -> str:
    path = target.with_name("q.partial") / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": "0.0.1"}))
    return f"q.partial: is made by qtool 0.0.1, this is {qtool.__version__}; finish it with that"


def damaged_run(folder: Path, target: Path) -> str:
    (target.with_name("q.partial") / "run.json").write_text("{}")
    return "run.json: is damaged; remove "


def in_the_way(folder: Path, target: Path) -> str:
    three(target)
    return "q: exists already; choose another name or --force"


@pytest.mark.parametrize(
    "change",
    [new_source, damaged_shard, another_shard, no_source, other_version, damaged_run, in_the_way],
)
def test_finish_refuses_what_is_not_proven(change: Any, folder: Path, tmp_path: Path) -> None:
    sliced(folder, tmp_path / "q", "1/2", "2/2")
    message = change(folder, tmp_path / "q")
    before = content(tmp_path)
    assert message in refused("finish", tmp_path / "q")
    assert content(tmp_path) == before


def test_finish_replaces_a_folder_by_force(folder: Path, tmp_path: Path) -> None:
    three(tmp_path / "q")
    message = refused("quantize", folder, *OPTIONS, "-o", tmp_path / "q", "--shards", "1/1")
    assert "exists already" in message
    ok("quantize", folder, *OPTIONS, "-o", tmp_path / "q", "--shards", "1/1", "--force", "-q")
    assert "exists already" in refused("finish", tmp_path / "q")
    ok("finish", tmp_path / "q", "--force", "--report", tmp_path / "r.json")
    ok("quantize", folder, *OPTIONS, "-o", tmp_path / "whole", "-q")
    assert content(tmp_path / "q") == content(tmp_path / "whole")
    assert len(strict((tmp_path / "r.json").read_text())["tensors"]) == 5


def test_finish_goes_on_where_it_was_killed(folder: Path, tmp_path: Path) -> None:
    sliced(folder, tmp_path / "q", "1/2", "2/2")
    (tmp_path / "q.partial" / "folder" / "stray").write_text("of a killed process")
    shutil.copytree(tmp_path / "q.partial", tmp_path / "copy.partial")
    ok("finish", tmp_path / "q")
    expected = content(tmp_path / "q")
    assert "stray" not in expected
    # killed when the folder had appeared, before the report was written
    shutil.copytree(tmp_path / "q", tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy.partial" / "folder")
    ok("finish", tmp_path / "copy")
    assert content(tmp_path / "copy") == expected
    assert report_of(tmp_path / "copy") == report_of(tmp_path / "q")
    assert not (tmp_path / "copy.partial").exists()


def test_finish_from_python(folder: Path, tmp_path: Path) -> None:
    for k in (1, 2):
        qtool.quantize_file(folder, tmp_path / "q", dtype="int8", shards=f"{k}/2")
    report = qtool.finish_folder(tmp_path / "q")
    assert [record["dtype"] for record in report["tensors"]] == ["int8"] * 5
    jsonschema.validate(report, SCHEMA)


def test_finish_prints_json(folder: Path, tmp_path: Path) -> None:
    sliced(folder, tmp_path / "q", "1/1")
    done = ok("finish", tmp_path / "q", "--json", "--quiet")
    assert done.json == strict((tmp_path / "q.report.json").read_text())
    assert done.err == ""
