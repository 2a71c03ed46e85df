"""Folders that appear under their name whole or not at all, built by one process or by several.

DST.partial holds, while DST is built: `folder`, which becomes DST; `shards`, a record of every
finished one; `run.json`, what is built; `old`, the DST that is replaced; and `lock`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qtool.errors import OutputError
from qtool.formats import files
from qtool.formats.checkpoint import CONFIG, INDEX, SINGLE

_FOLDER, _RECORDS, _RUN, _OLD, _LOCK = "folder", "shards", "run.json", "old", "lock"


class Partial:
    """The place where a folder is built.

    dst: as the user calls it. target: the folder that it becomes. folder: its files so far; once
    it is published, those of target. records: where the records of finished shards go.
    run: what is built. name: the place itself, as the user would call it.
    """

    def __init__(self, dst: str | Path) -> None:
        self.dst = Path(dst)
        self.target = Path(os.path.realpath(dst))
        self.path = self.target.with_name(self.target.name + ".partial")
        name = f"{self.dst}.partial"
        self.name = name if os.path.realpath(name) == str(self.path) else str(self.path)
        self.records = self.path / _RECORDS
        self.run = self.path / _RUN
        self._building = self.path / _FOLDER

    @property
    def folder(self) -> Path:
        return self.target if self.is_published else self._building

    @property
    def is_started(self) -> bool:
        """Whether an earlier run has left something to go on with."""
        return self.run.exists()

    @property
    def has_shards(self) -> bool:
        """Whether any shard is finished."""
        return self.records.is_dir() and any(self.records.iterdir())

    @property
    def is_published(self) -> bool:
        """Whether the folder has become the target, and only cleaning up remains."""
        return self.is_started and not self._building.exists()

    @contextmanager
    def held(self, *, shared: bool = False) -> Iterator[None]:
        """Keep other processes out of it, or, shared, those that are not.

        It is made where it is not there, and a target that a run was killed on replacing is put
        back. Raises OutputError where another process holds it, or something else has its name.
        """
        descriptor = None
        while descriptor is None:
            with files.explained(self.name):
                self._make()
                descriptor = _locked(self.path / _LOCK, self.name, shared=shared)
        try:
            self._put_back()
            yield
        finally:
            os.close(descriptor)

    def start(self) -> None:
        """Make it ready for files; whatever has been built there is kept."""
        for folder in (self._building, self.records):
            folder.mkdir(exist_ok=True)

    def publish(self, *, force: bool) -> None:
        """Let the finished folder become the target, with force in place of what is there.

        Raises OutputError where something is there although force is False.
        """
        _sync(self._building)
        try:
            if force and os.path.lexists(self.target):
                os.rename(self.target, self.path / _OLD)
            self._add()
        except BaseException:
            self._put_back()
            raise
        files.sync_folder(self.target.parent)

    def discard(self) -> None:
        """Remove it, at once for all who look, but not a target that nothing has replaced."""
        self._put_back()
        rubbish = self.path.with_name(f"{self._rubbish}{os.urandom(8).hex()}")
        with suppress(FileNotFoundError):
            os.rename(self.path, rubbish)
        for name in os.listdir(self.path.parent):
            if name.startswith(self._rubbish):
                shutil.rmtree(self.path.parent / name, ignore_errors=True)

    @property
    def _rubbish(self) -> str:
        return f".{self.path.name}.qtool-"

    def _add(self) -> None:
        """Let the finished folder become the target where there is none."""
        try:
            if os.path.lexists(self.target):  # renaming would replace an empty folder
                raise files.exists_already(self.dst)
            os.rename(self._building, self.target)
        except OSError as error:
            if os.path.lexists(self.target):
                raise files.exists_already(self.dst) from error
            raise

    def _put_back(self) -> None:
        """Restore the target that is to be replaced where nothing has taken its place."""
        if not os.path.lexists(self.target):
            with suppress(FileNotFoundError):
                os.rename(self.path / _OLD, self.target)

    def _make(self) -> None:
        self.path.mkdir(exist_ok=True)
        strange = set(os.listdir(self.path)) - {_FOLDER, _RECORDS, _RUN, _OLD, _LOCK}
        strange = {name for name in strange if not name.startswith(".run.json.qtool-")}
        if strange:
            raise OutputError(
                self.name, f"holds {min(strange)}, which is not qtool's", "rename that folder"
            )


def check_target(dst: Path, source: Path, *, force: bool) -> None:
    """Refuse a dst that must not be written, before any work is done for it.

    Raises OutputError where dst is the source, lies in it or around it, exists although force is
    False, is no checkpoint folder, or lies in a folder that does not exist.
    """
    target, origin = Path(os.path.realpath(dst)), Path(os.path.realpath(source))
    if target == origin:
        raise OutputError(str(dst), f"is the source, {source}", "choose another name")
    if target.is_relative_to(origin) or origin.is_relative_to(target):
        raise OutputError(str(dst), f"and {source} lie in each other", "choose another name")
    files.check_folder(dst, target.parent)
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise OutputError(str(dst), "is no folder, a checkpoint is one", "choose another name")
    if not force:
        raise files.exists_already(dst)
    found = set(os.listdir(target))
    if found and not (CONFIG in found and found & {SINGLE, INDEX}):
        raise OutputError(
            str(dst), "exists and is no checkpoint folder", "choose another name, or remove it"
        )


def put(source: Path, target: Path) -> None:
    """Copy a file with its permissions, whole or not at all, into a folder made where needed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(target) as temporary:
        shutil.copyfile(source, temporary)
        shutil.copymode(source, temporary)


def paths(folder: Path) -> set[str]:
    """Every file in a folder and below, relative to it."""
    return {
        os.path.relpath(os.path.join(where, name), folder)
        for where, _, names in os.walk(folder)
        for name in names
    }


def _locked(path: Path, thing: str, *, shared: bool) -> int | None:
    """The descriptor of the locked file; None where it was removed meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:  # its folder has gone
        return None
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise OutputError(
            thing, "another process is at work in it", "wait until it has finished"
        ) from None
    except OSError:
        pass  # a file system without locks
    if os.path.exists(path) and os.path.samestat(os.fstat(descriptor), path.stat()):
        return descriptor
    os.close(descriptor)
    return None


def _sync(folder: Path) -> None:
    for where, _, _ in os.walk(folder):
        files.sync_folder(Path(where))
