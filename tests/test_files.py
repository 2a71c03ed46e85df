"""Files that are replaced whole or not at all, with real faults: limits, kills, locks, links."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command import unmeasured

from qtool.errors import OutputError
from qtool.formats.files import check_target, copy_to, replacing, spooled


@pytest.fixture
def umask() -> Iterator[None]:
    old = os.umask(0o027)
    yield
    os.umask(old)


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


def listing(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def fail_halfway(temporary: Path, error: BaseException) -> None:
    temporary.write_bytes(b"half")
    raise error


def start(code: str, *args: Path) -> subprocess.Popen[str]:
    """A process that runs code after the imports that it needs."""
    imports = """
        import os, resource, signal, sys, time
        from pathlib import Path
        from qtool.formats.files import replacing
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(imports) + textwrap.dedent(code), *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=unmeasured(),
    )


# ---------------------------------------------------------------- replacing


def test_a_new_file_appears_only_at_the_end(tmp_path: Path) -> None:
    dst = tmp_path / "out.bin"
    with replacing(dst) as temporary:
        assert temporary.parent == tmp_path
        assert temporary.name.startswith(".out.bin.qtool-")
        temporary.write_bytes(b"new")
        assert not dst.exists()
    assert dst.read_bytes() == b"new"
    assert listing(tmp_path) == ["out.bin"]


def test_a_reader_of_the_old_file_keeps_it(tmp_path: Path) -> None:
    dst = tmp_path / "out.bin"
    dst.write_bytes(b"old")
    with dst.open("rb") as reader:
        with replacing(dst) as temporary:
            temporary.write_bytes(b"new")
        assert reader.read() == b"old"
    assert dst.read_bytes() == b"new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, BrokenPipeError])
def test_after_an_exception_the_folder_is_as_it_was(
    error: type[BaseException], tmp_path: Path
) -> None:
    dst = tmp_path / "out.bin"
    dst.write_bytes(b"old")
    with pytest.raises(error), replacing(dst) as temporary:
        fail_halfway(temporary, error())
    assert dst.read_bytes() == b"old"
    assert listing(tmp_path) == ["out.bin"]


@pytest.mark.usefixtures("umask")
def test_a_new_file_has_the_permissions_of_a_plain_open(tmp_path: Path) -> None:
    with replacing(tmp_path / "out.bin") as temporary:
        temporary.write_bytes(b"new")
    assert mode(tmp_path / "out.bin") == "0o640"


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("permissions", [0o600, 0o664, 0o755, 0o444], ids=oct)
def test_a_replaced_file_keeps_its_permissions(permissions: int, tmp_path: Path) -> None:
    dst = tmp_path / "out.bin"
    dst.write_bytes(b"old")
    dst.chmod(permissions)
    with replacing(dst) as temporary:
        assert mode(temporary) == "0o600"
        temporary.write_bytes(b"new")
    assert dst.read_bytes() == b"new"
    assert mode(dst) == oct(permissions)


def test_a_replaced_file_keeps_its_owner(tmp_path: Path) -> None:
    """Only root can make a file of somebody else's."""
    dst = tmp_path / "out.bin"
    dst.write_bytes(b"old")
    owner = (12345, 23456) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(dst, *owner)
    with replacing(dst) as temporary:
        temporary.write_bytes(b"new")
    assert (dst.stat().st_uid, dst.stat().st_gid) == owner


def test_a_symbolic_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    target, link = tmp_path / "store" / "real.bin", tmp_path / "link.bin"
    target.write_bytes(b"old")
    link.symlink_to(Path("store") / "real.bin")
    with replacing(link) as temporary:
        assert temporary.parent == tmp_path / "store"
        temporary.write_bytes(b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_a_dangling_symbolic_link_gets_its_target(tmp_path: Path) -> None:
    link = tmp_path / "link.bin"
    link.symlink_to("real.bin")
    with replacing(link) as temporary:
        temporary.write_bytes(b"new")
    assert link.is_symlink()
    assert (tmp_path / "real.bin").read_bytes() == b"new"


def test_the_other_names_of_a_replaced_file_keep_the_old_bytes(tmp_path: Path) -> None:
    dst, other = tmp_path / "out.bin", tmp_path / "other.bin"
    dst.write_bytes(b"old")
    other.hardlink_to(dst)
    with replacing(dst) as temporary:
        temporary.write_bytes(b"new")
    assert (dst.read_bytes(), other.read_bytes()) == (b"new", b"old")


@pytest.mark.parametrize(
    "name",
    ["x" * 255, "é" * 127, "a" + "é" * 127, "[*]?.bin", "-", " "],
    ids=["255 bytes", "254 bytes", "255 bytes of UTF-8", "glob", "dash", "space"],
)
def test_any_name_that_the_file_system_allows_works(name: str, tmp_path: Path) -> None:
    with replacing(tmp_path / name) as leftover:
        leftover.write_bytes(b"first")
    leftover.write_bytes(b"left behind")
    with replacing(tmp_path / name) as temporary:
        assert not leftover.exists()
        temporary.write_bytes(b"second")
    assert listing(tmp_path) == [name]
    assert (tmp_path / name).read_bytes() == b"second"


def test_a_device_is_refused_and_stays() -> None:
    message = r"is a device, which a file cannot replace; name a file, or use `-o -` and redirect"
    with pytest.raises(OutputError, match=message), replacing(Path("/dev/null")):
        pass
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match="is a folder, which a file cannot replace"),
        replacing(tmp_path),
    ):
        pass


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (
        pytest.raises(OutputError, match="is a pipe, which a file cannot replace"),
        replacing(tmp_path / "pipe"),
    ):
        pass
    assert listing(tmp_path) == ["pipe"]


def circle(folder: Path) -> Path:
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    return folder / "a"


UNREACHABLE = [
    pytest.param(
        lambda f: f / "no" / "out.bin", "No such file.*; create its folder first", id="no folder"
    ),
    pytest.param(
        lambda f: f / "file" / "out.bin",
        "Not a directory; create its folder first",
        id="file as folder",
    ),
    pytest.param(
        lambda f: f / ("x" * 256), "File name too long; choose a shorter name", id="256 bytes"
    ),
    pytest.param(circle, "Too many levels of symbolic links; .* circle", id="circle of links"),
]


@pytest.mark.parametrize(("path", "message"), UNREACHABLE)
def test_a_name_that_cannot_be_written_is_refused_before_the_work(
    path: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    dst = path(tmp_path)
    before = listing(tmp_path)
    with (
        pytest.raises(OutputError, match=f"cannot be written: {message}") as caught,
        replacing(dst),
    ):
        pytest.fail("the block must not run")
    assert caught.value.thing == str(dst)
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "free some space or choose another folder"),
        (errno.EDQUOT, "free some space or choose another folder"),
        (errno.EROFS, "choose a folder that you may write to"),
        (errno.EIO, "the disk is failing; choose another one"),
    ],
    ids=["full", "quota", "read-only", "broken"],
)
def test_a_failing_write_names_file_cause_and_remedy(
    code: int, remedy: str, tmp_path: Path
) -> None:
    dst = tmp_path / "out.bin"
    dst.write_bytes(b"old")
    with pytest.raises(OutputError) as caught, replacing(dst) as temporary:
        fail_halfway(temporary, OSError(code, os.strerror(code)))
    assert str(caught.value) == f"{dst}: cannot be written: {os.strerror(code)}; {remedy}"
    assert dst.read_bytes() == b"old"
    assert listing(tmp_path) == ["out.bin"]


def test_an_error_about_another_file_is_not_blamed_on_the_target(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "out.bin"):
        (tmp_path / "missing").read_bytes()
    assert listing(tmp_path) == []


def test_a_limit_on_the_size_of_files_leaves_the_old_file(tmp_path: Path) -> None:
    dst = tmp_path / "out.bin"
    dst.write_bytes(b"old")
    code = """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        try:
            with replacing(Path(sys.argv[1])) as temporary:
                temporary.write_bytes(bytes(100_000))
        except Exception as error:
            print(type(error).__name__, error)
    """
    out, err = start(code, dst).communicate(timeout=60)
    assert err == ""
    assert out == (
        f"OutputError {dst}: cannot be written: File too large; raise the limit on the size of"
        " files (ulimit -f) or choose another file system\n"
    )
    assert dst.read_bytes() == b"old"
    assert listing(tmp_path) == ["out.bin"]


def test_a_folder_without_write_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    code = """
        if os.geteuid() == 0:
            os.seteuid(65534)
        try:
            with replacing(Path(sys.argv[1])):
                print("the block must not run")
        except Exception as error:
            print(type(error).__name__, error)
    """
    out, err = start(code, tmp_path / "out.bin").communicate(timeout=60)
    assert err == ""
    assert out == (
        f"OutputError {tmp_path / 'out.bin'}: cannot be written: Permission denied; choose a"
        " folder that you may write to\n"
    )


def test_a_folder_that_may_be_written_but_not_listed_will_do() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o333)
        code = """
            if os.geteuid() == 0:
                os.seteuid(65534)
            with replacing(Path(sys.argv[1])) as temporary:
                temporary.write_bytes(b"new")
        """
        dst = Path(folder, "out.bin")
        assert start(code, dst).communicate(timeout=60) == ("", "")
        os.chmod(folder, 0o700)
        assert listing(Path(folder)) == ["out.bin"]
        assert dst.read_bytes() == b"new"


def test_a_full_device_leaves_nothing(tmp_path: Path) -> None:
    dst = tmp_path / "out.bin"
    with (
        pytest.raises(OutputError, match="No space left on device; free some space"),
        replacing(dst),
        open("/dev/full", "wb", buffering=0) as full,
    ):
        full.write(b"x")
    assert listing(tmp_path) == []


HOLD = """
    with replacing(Path(sys.argv[1])) as temporary:
        temporary.write_bytes(b"half")
        print(temporary, flush=True)
        sys.stdin.read()
"""


def held(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().rstrip("\n"))


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    dst = tmp_path / "out.bin"
    with start(HOLD, dst) as process:
        leftover = held(process)
        process.send_signal(signal.SIGKILL)
    assert leftover.read_bytes() == b"half"
    assert listing(tmp_path) == [leftover.name]
    with replacing(dst) as temporary:
        assert listing(tmp_path) == [temporary.name]
        temporary.write_bytes(b"new")
    assert listing(tmp_path) == ["out.bin"]


def test_what_a_running_process_writes_is_kept_and_the_last_one_wins(tmp_path: Path) -> None:
    dst = tmp_path / "out.bin"
    with start(HOLD, dst) as process:
        theirs = held(process)
        with replacing(dst) as temporary:
            assert theirs.read_bytes() == b"half"
            temporary.write_bytes(b"ours")
        assert dst.read_bytes() == b"ours"
        process.communicate("", timeout=60)
    assert process.returncode == 0
    assert dst.read_bytes() == b"half"
    assert listing(tmp_path) == ["out.bin"]


def test_what_is_left_between_link_and_unlink_is_removed_by_a_refused_run(
    tmp_path: Path,
) -> None:
    dst = tmp_path / "out.bin"
    code = """
        os.unlink = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        with replacing(Path(sys.argv[1]), force=False) as temporary:
            temporary.write_bytes(b"whole")
    """
    with start(code, dst) as process:
        process.wait(timeout=60)
    [leftover, name] = listing(tmp_path)
    assert name == "out.bin"
    assert dst.samefile(tmp_path / leftover)
    with pytest.raises(OutputError, match="exists already"):
        check_target(dst, tmp_path / "source.bin", force=False)
    assert listing(tmp_path) == ["out.bin"]
    assert dst.read_bytes() == b"whole"
    assert dst.stat().st_nlink == 1


def unlinked(*_: Path) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


APPEARING: dict[str, Callable[[Path], object]] = {
    "file": lambda dst: dst.write_bytes(b"theirs"),
    "dangling": lambda dst: dst.symlink_to("nowhere"),
    "folder": lambda dst: dst.mkdir(),
}


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
@pytest.mark.parametrize("kind", APPEARING)
def test_what_appears_meanwhile_stays_without_force(
    kind: str, links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", unlinked)
    dst = tmp_path / "out.bin"
    message = r"out\.bin: exists already; choose another name or --force"
    with pytest.raises(OutputError, match=message), replacing(dst, force=False):
        APPEARING[kind](dst)
    assert listing(tmp_path) == ["out.bin"]
    assert (dst.is_file(), dst.is_symlink(), dst.is_dir()) == tuple(k == kind for k in APPEARING)
    assert kind != "file" or dst.read_bytes() == b"theirs"


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_a_new_file_where_nothing_may_be_replaced(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", unlinked)
    (tmp_path / "link.bin").symlink_to("real.bin")
    with replacing(tmp_path / "link.bin", force=False) as temporary:
        temporary.write_bytes(b"new")
    assert listing(tmp_path) == ["link.bin", "real.bin"]
    assert (tmp_path / "link.bin").is_symlink()
    assert (tmp_path / "real.bin").read_bytes() == b"new"
    assert (tmp_path / "real.bin").stat().st_nlink == 1


def test_leftovers_of_other_files_and_other_kinds_are_kept(tmp_path: Path) -> None:
    (tmp_path / ".other.bin.qtool-00000000").touch()
    (tmp_path / ".out.bin.qtool-folder").mkdir()
    (tmp_path / ".out.bin.qtool-link").symlink_to("/dev/null")
    (tmp_path / "out.bin.qtool-00000000").touch()
    before = listing(tmp_path)
    with replacing(tmp_path / "out.bin") as temporary:
        temporary.touch()
    assert listing(tmp_path) == sorted([*before, "out.bin"])


def test_a_temporary_file_that_was_taken_for_a_leftover_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may remove it between its creation and its lock."""
    removed: list[str] = []
    real = fcntl.flock

    def slow(descriptor: int, operation: int) -> None:
        if not removed:
            [name] = listing(tmp_path)
            (tmp_path / name).unlink()
            removed.append(name)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    with replacing(tmp_path / "out.bin") as temporary:
        assert temporary.exists()
        assert removed == [temporary.name]
        temporary.write_bytes(b"new")
    assert (tmp_path / "out.bin").read_bytes() == b"new"


def test_a_file_system_without_locks_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    (tmp_path / ".out.bin.qtool-00000000").touch()
    with replacing(tmp_path / "out.bin") as temporary:
        temporary.write_bytes(b"new")
    assert listing(tmp_path) == [".out.bin.qtool-00000000", "out.bin"]


# ---------------------------------------------------------------- check_target


def test_a_new_name_in_an_existing_folder_is_a_good_target(tmp_path: Path) -> None:
    check_target(tmp_path / "out.bin", tmp_path / "missing.bin", force=False)
    (tmp_path / "link").symlink_to("out.bin")
    check_target(tmp_path / "link", tmp_path / "missing.bin", force=False)


def test_an_existing_target_needs_force(tmp_path: Path) -> None:
    source, dst = tmp_path / "in.bin", tmp_path / "out.bin"
    source.touch()
    dst.touch()
    with pytest.raises(OutputError, match="exists already; choose another name or --force"):
        check_target(dst, source, force=False)
    check_target(dst, source, force=True)


@pytest.mark.parametrize("force", [False, True], ids=["plain", "force"])
@pytest.mark.parametrize("name", ["in.bin", "./sub/../in.bin", "symbolic", "hard"])
def test_the_source_is_never_the_target_under_any_name(
    name: str, force: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "in.bin"
    source.touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "symbolic").symlink_to("in.bin")
    (tmp_path / "hard").hardlink_to(source)
    with pytest.raises(OutputError, match=r"is the source, .*in\.bin; choose another name"):
        check_target(Path(name), source, force=force)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/out.bin", "the folder .*/no does not exist; create its folder first"),
        ("in.bin/out.bin", "Not a directory; create its folder first"),
        ("dangling", "the folder .*/no does not exist"),
        ("folder", "is a folder"),
        ("/dev/null", "is a device"),
        ("x" * 256, "File name too long"),
    ],
    ids=["no folder", "file as folder", "link into no folder", "folder", "device", "long name"],
)
def test_a_target_that_cannot_be_written_is_refused_even_with_force(
    name: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "in.bin").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("no/out.bin")
    with pytest.raises(OutputError, match=message):
        check_target(tmp_path / name, tmp_path / "in.bin", force=True)


# ---------------------------------------------------------------- pipes


def test_a_pipe_is_spooled_whole_and_removed_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 40_000 + b'end')"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert isinstance(process.stdout, io.BufferedReader)
        with spooled(process.stdout) as path:
            assert path.stem == "array"
            assert path.read_bytes() == bytes(range(256)) * 40_000 + b"end"
    assert listing(tmp_path) == []


class Endless(io.BytesIO):
    """Zeros without end, which remembers how much was asked for at once."""

    largest = 0

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None
        assert size > 0
        self.largest = max(self.largest, size)
        return bytes(size)


def test_a_full_temporary_folder_is_an_output_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stream = Endless()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_000, limits[1]))
    try:
        with pytest.raises(OutputError, match="File too large; set TMPDIR"), spooled(stream):
            pytest.fail("the block must not run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert stream.largest == 8 * 1024 * 1024
    assert listing(tmp_path) == []


def test_an_exception_removes_what_was_spooled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt), spooled(io.BytesIO(b"x")):
        raise KeyboardInterrupt
    assert listing(tmp_path) == []


def test_a_finished_file_is_copied_to_a_stream(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    stream = io.BytesIO()
    copy_to(tmp_path / "a", stream)
    assert stream.getvalue() == b"content"


def test_a_full_standard_output_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    with (
        open("/dev/full", "wb", buffering=0) as full,
        pytest.raises(
            OutputError, match="standard output: cannot be written: No space left on device"
        ),
    ):
        copy_to(tmp_path / "a", full)


def test_a_reader_that_goes_away_is_a_broken_pipe(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb", buffering=0) as stream, pytest.raises(BrokenPipeError):
        copy_to(tmp_path / "a", stream)
