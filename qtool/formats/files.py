"""Files that appear under their name whole or not at all, and files out of pipes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from qtool.errors import OutputError
from qtool.formats import scratch

_PIECE = 8 << 20

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}

_NO_FOLDER = "create its folder first"
_NOT_PERMITTED = "choose a folder that you may write to"
_NO_SPACE = "free some space or choose another folder"
_REMEDIES = {
    errno.ENOENT: _NO_FOLDER,
    errno.ENOTDIR: _NO_FOLDER,
    errno.EACCES: _NOT_PERMITTED,
    errno.EPERM: _NOT_PERMITTED,
    errno.EROFS: _NOT_PERMITTED,
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f) or choose another file system",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "choose a name that is not a circle of symbolic links",
    errno.EIO: "the disk is failing; choose another one",
}


@contextmanager
def replacing(
    dst: Path, named: Callable[[], Path] | None = None, *, force: bool = True
) -> Iterator[Path]:
    """A temporary file beside dst, to be written in place, that becomes dst on success.

    named: asked once it is written for the path, in the same folder, that it becomes instead.
    force: replace what is there by then.

    On success it is flushed to the disk and renamed, with the permissions of the file that it
    replaces or else those of any new file; after an exception it is removed and dst is as it
    was. The temporary file is locked by its owner; those that a killed process left behind
    for the same dst are removed first. A symbolic link stays and what it points to is replaced.

    Raises OutputError where dst is no regular file, exists although force is False, or cannot be
    written; and, dst being new already, where its folder cannot be flushed.
    """
    with explained(dst):
        old = None if named else _existing(dst)
        if old is not None and not force:
            raise exists_already(dst)
        target = Path(os.path.realpath(dst))
        _remove_leftovers(target)
    temporary = target.with_name(_prefix(target) + os.urandom(8).hex())
    descriptor = None
    try:
        with explained(dst):
            descriptor = _create(temporary, 0o666 if old is None else 0o600)
        with explained(dst, temporary):
            yield temporary
        if named:
            dst = named()
        with explained(dst):
            if named:
                old, target = _existing(dst), Path(os.path.realpath(dst))
            if old is not None:
                _take_over(old, descriptor)
            os.fsync(descriptor)
            if force:
                os.replace(temporary, target)
            else:
                _add(temporary, target, dst)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        if descriptor is not None:
            os.close(descriptor)
    with explained(dst):
        sync_folder(target.parent)


def text_of(name: str) -> str:
    """A file's name as text, in any locale: bytes that are no UTF-8 as \\xff."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait until no other process has locked a folder, and lock it, where that can be done."""
    descriptor = None
    with suppress(OSError):  # a folder that cannot be read; a file system without locks
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def check_target(dst: Path, source: Path, *, force: bool) -> None:
    """Refuse a dst that must not be written, before any work is done for it.

    Raises OutputError where dst is the source under any name, exists although force is False,
    is no regular file, or lies in a folder that does not exist.
    """
    with explained(dst):
        old = _existing(dst)
    check_folder(dst, Path(os.path.realpath(dst)).parent)
    if old is None:
        return
    if source.exists() and os.path.samestat(old, source.stat()):
        raise OutputError(str(dst), f"is the source, {source}", "choose another name")
    if not force:
        _remove_leftovers(Path(os.path.realpath(dst)))
        raise exists_already(dst)


def exists_already(dst: Path) -> OutputError:
    """The error about a dst that must not be replaced."""
    return OutputError(str(dst), "exists already", "choose another name or --force")


def check_folder(dst: Path, folder: Path) -> None:
    """Refuse a folder for dst that is not there or cannot be written, with an OutputError."""
    if not folder.is_dir():
        raise OutputError(str(dst), f"the folder {folder} does not exist", _NO_FOLDER)
    if not os.access(folder, os.W_OK):
        raise OutputError(str(dst), f"the folder {folder} cannot be written", _NOT_PERMITTED)


@contextmanager
def spooled(stream: BinaryIO) -> Iterator[Path]:
    """All of a stream as a temporary file named "array", removed afterwards.

    Raises OutputError where the temporary folder cannot hold it.
    """
    with scratch.folder() as folder:
        path = folder / "array"
        try:
            with path.open("wb") as file:
                shutil.copyfileobj(stream, file, _PIECE)
        except OSError as error:
            raise OutputError(
                "standard input",
                f"cannot be kept in {folder}: {error.strerror}",
                "set TMPDIR to a folder with enough room",
            ) from error
        yield path


def copy_to(path: Path, stream: BinaryIO) -> None:
    """Copy a finished file to standard output; BrokenPipeError is the caller's."""
    with path.open("rb") as file, explained("standard output"):
        shutil.copyfileobj(file, stream, _PIECE)
        stream.flush()


@contextmanager
def explained(thing: Path | str, temporary: Path | None = None) -> Iterator[None]:
    """Turn an OSError with a known remedy into an OutputError about thing.

    With temporary, only errors about that file or an unnamed one; others have other causes.
    """
    try:
        yield
    except OSError as error:
        others = temporary is not None and error.filename not in (None, str(temporary))
        if others or error.errno not in _REMEDIES:
            raise
        raise OutputError(
            str(thing), f"cannot be written: {error.strerror}", _REMEDIES[error.errno]
        ) from error


def _existing(dst: Path) -> os.stat_result | None:
    """The regular file that dst names or points to, or None."""
    try:
        old = dst.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(old.st_mode):
        kind = _KINDS.get(stat.S_IFMT(old.st_mode), "no regular file")
        raise OutputError(
            str(dst),
            f"is {kind}, which a file cannot replace",
            "name a file, or use `-o -` and redirect standard output",
        )
    return old


def _prefix(target: Path) -> str:
    """What the names of target's temporary files begin with, far below any limit on names."""
    return "." + os.fsdecode(os.fsencode(target.name)[:64]) + ".qtool-"


def _remove_leftovers(target: Path) -> None:
    """Remove temporary files of target whose owner is gone, which its lock shows."""
    with suppress(PermissionError):  # a folder may be writable and not readable
        for entry in list(os.scandir(target.parent)):
            if entry.name.startswith(_prefix(target)) and entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    _remove_unlocked(entry.path)


def _remove_unlocked(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(descriptor)


def _create(path: Path, mode: int) -> int:
    """A new file, and the descriptor that holds its lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        with suppress(OSError):  # a file system without locks: nobody can take it for unlocked
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Between creation and lock another process may have taken it for a leftover.
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _add(temporary: Path, target: Path, dst: Path) -> None:
    """Let the temporary file become target, which dst names, where there is none."""
    try:
        os.link(temporary, target)
    except OSError as error:
        if os.path.lexists(target):
            raise exists_already(dst) from error
        os.replace(temporary, target)  # a file system without hard links
    else:
        temporary.unlink()


def _take_over(old: os.stat_result, descriptor: int) -> None:
    """Give an open file the owner, where that is allowed, and the permissions of another."""
    with suppress(PermissionError):
        os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where the file system lets folders be flushed."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise
