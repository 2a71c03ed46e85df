"""Fingerprints of files, read at once or as others read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash

from qtool.errors import FormatError
from qtool.jobs import fingerprint
from qtool.jobs.fingerprint import Pieces

KIB = 1 << 10
SIZES = [0, 1, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 1024 * KIB, 3500 * KIB + 17]


def file_of(folder: Path, size: int) -> tuple[Path, bytes]:
    data = np.random.default_rng(size).bytes(size)
    (folder / "file").write_bytes(data)
    return folder / "file", data


def expected(data: bytes) -> dict[str, int | str]:
    hashes = [
        xxhash.xxh3_128(data[begin : begin + 65536]).digest()
        for begin in range(0, len(data), 65536)
    ]
    return {"bytes": len(data), "xxh3": xxhash.xxh3_128(b"".join(hashes)).hexdigest()}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("jobs", [1, 3])
def test_it_is_the_hash_of_the_hashes_of_pieces(size: int, jobs: int, tmp_path: Path) -> None:
    path, data = file_of(tmp_path, size)
    assert fingerprint.of_file(path, jobs) == expected(data)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("window", [1000, 65536, 300_001])
def test_what_was_seen_already_is_not_read_again(size: int, window: int, tmp_path: Path) -> None:
    path, data = file_of(tmp_path, size)
    pieces = Pieces()
    for begin in range(8, size, window):
        pieces.saw(memoryview(data)[begin : begin + window], begin)
    seen = dict(pieces._hashes)
    assert len(seen) == sum(
        begin <= 65536 * number and 65536 * (number + 1) <= min(begin + window, size)
        for begin in range(8, size, window)
        for number in range(begin // 65536, (begin + window) // 65536 + 1)
    )
    pieces._hashes = dict.fromkeys(seen, b"seen")  # would show if they were read again
    pieces.of_file(path, 2)
    assert {number for number, found in pieces._hashes.items() if found == b"seen"} == set(seen)
    pieces._hashes |= seen
    assert pieces.of_file(path, 2) == expected(data)


def test_any_bit_counts(tmp_path: Path) -> None:
    path, data = file_of(tmp_path, 200 * KIB)
    before = fingerprint.of_file(path, 2)
    for place in (0, 65535, 65536, len(data) - 1):
        changed = bytearray(data)
        changed[place] ^= 128
        path.write_bytes(changed)
        assert fingerprint.of_file(path, 2) != before


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="gone: cannot be read: No such file"):
        fingerprint.of_file(tmp_path / "gone", 1)


def test_words_do_not_run_together() -> None:
    assert fingerprint.of_words([b"ab", b"c"]) != fingerprint.of_words([b"a", b"bc"])
    assert fingerprint.of_words([b"ab", b"c"]) == fingerprint.of_words(iter([b"ab", b"c"]))
