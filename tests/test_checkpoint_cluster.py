"""Checkpoint folders on a Dask cluster of a scheduler and two workers, and on ones that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import content, save, shard_name, tensors
from command import PYTHON, ok, refused, strict
from safetensors.numpy import save_file

import qtool
from qtool.jobs import cluster

SLOW = ["--dtype", "int4", "--method", "percentile:99"]
SHARDS = 6
NAMES = [shard_name(number, SHARDS) for number in range(1, SHARDS + 1)]
DASK = [sys.executable, "-m", "distributed.cli"]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose shards take half a second each."""
    shards = [tensors([layer], 1024, 1024) for layer in range(SHARDS)]
    return save(tmp_path_factory.mktemp("large") / "m", shards)


@pytest.fixture(scope="module")
def whole(large: Path) -> Path:
    """What one machine makes of it."""
    ok("quantize", large, *SLOW, "-o", large.parent / "whole", "-q")
    return large.parent / "whole"


def until(found: Callable[[], Any], *running: subprocess.Popen[bytes]) -> Any:
    """What a function finds, once it does, while these processes run."""
    deadline = time.monotonic() + 120
    while not (value := found()):
        assert time.monotonic() < deadline
        for process in running:
            assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    return value


@contextmanager
def started(command: list[Any], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


class Cluster:
    """A scheduler and its workers, each a process."""

    def __init__(self, stack: ExitStack, folder: Path, workers: int, **settings: str) -> None:
        environment = {f"DASK_DISTRIBUTED__{name}": value for name, value in settings.items()}
        options: dict[str, Any] = {"env": os.environ | environment, "cwd": folder}
        said = folder / "scheduler.json"
        scheduler = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
        command = [*DASK[:2], "distributed.cli.dask_scheduler", *scheduler]
        self.scheduler = stack.enter_context(
            started([*command, "--scheduler-file", said], **options)
        )
        until(lambda: said.exists() and said.stat().st_size, self.scheduler)
        self.address = str(json.loads(said.read_text())["address"])
        command = [*DASK[:2], "distributed.cli.dask_worker", self.address]
        settings_of_worker = ["--nthreads", "1", "--no-nanny", "--no-dashboard"]
        self.workers = [
            stack.enter_context(started([*command, *settings_of_worker], **options))
            for _ in range(workers)
        ]


@contextmanager
def two_workers(folder: Path) -> Iterator[Cluster]:
    """A cluster that is ready."""
    with ExitStack() as stack:
        running = Cluster(stack, folder, 2)
        command = [sys.executable, "-c", READY, running.address]
        subprocess.run(command, capture_output=True, timeout=90, check=True)
        yield running


READY = """\
import sys, distributed
with distributed.Client(sys.argv[1]) as client:
    client.wait_for_workers(2, timeout=60)
"""


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for tests that do it no harm."""
    with two_workers(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def doomed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One of which something will be killed."""
    with two_workers(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def quantizing(large: Path, target: Path, address: str) -> list[Any]:
    return [*PYTHON, "quantize", large, *SLOW, "-o", target, "-q", "--scheduler", address]


def made(target: Path, pattern: str) -> list[Path]:
    return list((target.with_name(target.name + ".partial") / "folder").glob(pattern))


def test_a_cluster_that_loses_a_worker_gives_the_same_bytes(
    doomed: Cluster, large: Path, whole: Path, tmp_path: Path
) -> None:
    target = tmp_path / "q"
    with started(quantizing(large, target, doomed.address)) as running:
        # one shard is done, and both workers are in the middle of another one
        until(lambda: made(target, "model-*") and len(made(target, ".model-*")) == 2, running)
        doomed.workers[0].kill()
        assert len(made(target, "model-*")) < SHARDS
        assert running.wait(timeout=120) == 0
        assert running.communicate() == (b"", b"")
    assert content(target) == content(whole)
    one, other = (
        strict(path.with_name(path.name + ".report.json").read_text()) for path in (target, whole)
    )
    one["output"]["name"] = other["output"]["name"]
    assert one | {"seconds": 0} == other | {"seconds": 0}
    assert {path.name for path in tmp_path.iterdir()} == {"q", "q.report.json"}


def test_relative_names_mean_the_same_to_workers_elsewhere(
    steady: Cluster, large: Path, whole: Path
) -> None:
    folder = large.parent
    command = quantizing(Path("m"), Path("../") / folder.name / "relative", steady.address)
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert content(folder / "relative") == content(whole)


def test_an_error_of_a_worker_is_one_line_and_finished_shards_are_kept(
    steady: Cluster, large: Path, whole: Path, tmp_path: Path
) -> None:
    folder = save(tmp_path / "m", [tensors([layer], 1024, 1024) for layer in range(SHARDS)])
    bad = tensors([SHARDS - 1], 1024, 1024)
    bad[f"model.layers.{SHARDS - 1}.mlp.down_proj.weight"][7, 8] = np.nan
    good = (folder / NAMES[-1]).read_bytes()
    save_file(bad, folder / NAMES[-1], metadata={"format": "pt"})
    command = quantizing(folder, tmp_path / "q", steady.address)
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(
        b"qtool: tensor model.layers.5.mlp.down_proj.weight: nan at [7, 8]: 1 of 1048576 values "
        b"is not finite; "
    )
    assert done.stderr.count(b"\n") == 1
    (folder / NAMES[-1]).write_bytes(good)
    ok("quantize", folder, *SLOW, "-o", tmp_path / "q", "-q", "--resume")
    assert content(tmp_path / "q") == content(whole)


def test_a_scheduler_that_goes_away_is_one_line(
    doomed: Cluster, large: Path, whole: Path, tmp_path: Path
) -> None:
    target = tmp_path / "q"
    with started(quantizing(large, target, doomed.address)) as running:
        until(lambda: made(target, "model-*") and made(target, ".model-*"), running)
        doomed.scheduler.kill()
        assert running.wait(timeout=120) == 1
        errors = running.communicate()[1].decode()
    assert errors == (f"qtool: --scheduler: {doomed.address} has gone away; --resume goes on\n")
    for worker in doomed.workers:
        worker.kill()
        worker.wait(timeout=60)
    ok("quantize", large, *SLOW, "-o", target, "-q", "--resume")
    assert content(target) == content(whole)


def test_an_interrupted_command_leaves_the_cluster_alone(
    steady: Cluster, large: Path, whole: Path, tmp_path: Path
) -> None:
    target = tmp_path / "q"
    with started(quantizing(large, target, steady.address)) as running:
        until(lambda: made(target, "model-*"), running)
        running.terminate()
        assert running.wait(timeout=60) == 143
        assert running.communicate() == (b"", b"")
    command = [*quantizing(large, target, steady.address), "--resume"]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert content(target) == content(whole)


def test_workers_that_die_of_a_shard_are_named(large: Path, tmp_path: Path) -> None:
    target = tmp_path / "q"
    with ExitStack() as stack:
        running = Cluster(stack, tmp_path, 1, SCHEDULER__ALLOWED_FAILURES="0")
        process = stack.enter_context(started(quantizing(large, target, running.address)))
        until(lambda: made(target, ".model-*"), process)
        running.workers[0].kill()
        assert process.wait(timeout=120) == 1
        assert process.communicate()[1] == (
            b"qtool: --scheduler: workers died, each with the same shard; see their logs; "
            b"--resume goes on\n"
        )


@pytest.mark.parametrize(
    ("address", "code", "message"),
    [
        pytest.param("tcp://127.0.0.1:9", 1, "tcp://127.0.0.1:9 cannot be reached within 1 s; "
                     "start `dask scheduler` there", id="nobody"),
        pytest.param("nonsense", 2, "'nonsense' is no address; use tcp://HOST:PORT", id="nonsense"),
        pytest.param("foo://h:1", 2, "'foo://h:1' is no address; use tcp://HOST:PORT", id="scheme"),
    ],
)  # fmt: skip
def test_a_scheduler_that_cannot_be_reached(
    address: str, code: int, message: str, large: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(cluster, "TIMEOUT", 1)
    said = refused(
        "quantize", large, *SLOW, "-o", tmp_path / "q", "--scheduler", address, code=code
    )
    assert said == f"--scheduler: {message}"
    assert list(tmp_path.iterdir()) == []


def test_a_scheduler_without_workers(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "TIMEOUT", 2)
    with ExitStack() as stack:
        running = Cluster(stack, tmp_path, 0)
        options = ["-o", tmp_path / "q", "--scheduler", running.address]
        said = refused("quantize", large, *SLOW, *options)
    assert said == (
        f"--scheduler: {running.address} has no worker within 2 s; start `dask worker` on some "
        "machine"
    )


def test_without_the_package_it_says_what_to_install(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    options = ["-o", tmp_path / "q", "--scheduler", "tcp://127.0.0.1:9"]
    said = refused("quantize", large, *SLOW, *options)
    assert said == "--scheduler: needs the package distributed; pip install 'qtool[cluster]'"


def test_a_worker_of_another_version_is_refused(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qtool.jobs.shards.__version__", "0.0.1")
    said = refused("quantize", large, *SLOW, "-o", tmp_path / "q")
    assert said == f"worker: has qtool 0.0.1; install {qtool.__version__} there"
