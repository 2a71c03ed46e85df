"""What proves that a file is the one that was read or written: its size and a hash of all of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import xxhash

from qtool.errors import FormatError
from qtool.pool import buffer, in_order

Fingerprint = dict[str, int | str]

_PIECE = 1 << 16
_TOGETHER = 16  # pieces that are read at once


class Pieces:
    """Hashes of a file's pieces of 64 KiB, of those that are read anyway when they are read."""

    def __init__(self) -> None:
        self._hashes: dict[int, bytes] = {}

    def saw(self, view: memoryview, position: int) -> None:
        """The file has these bytes there. Threads may call it at the same time."""
        for number in range(-(-position // _PIECE), (position + len(view)) // _PIECE):
            if number not in self._hashes:
                begin = number * _PIECE - position
                self._hashes[number] = xxhash.xxh3_128_digest(view[begin : begin + _PIECE])

    def of_file(self, path: Path, jobs: int) -> Fingerprint:
        """{"bytes", "xxh3"}: the hash of the hashes of all pieces; threads read what is missing.

        Raises FormatError where the file cannot be read to its end.
        """
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size

                def read(numbers: range) -> None:
                    begin = numbers.start * _PIECE
                    count = min(numbers.stop * _PIECE, size) - begin
                    data = buffer("fingerprint", np.dtype(np.uint8), count)
                    if os.preadv(file.fileno(), [data.data], begin) != count:
                        raise FormatError(str(path), "has become shorter", "write to it no more")
                    self.saw(data.data, begin)
                    if count % _PIECE:  # the last one of the file
                        rest = data.data[count // _PIECE * _PIECE :]
                        self._hashes[numbers.stop - 1] = xxhash.xxh3_128_digest(rest)

                in_order(read, self._missing(-(-size // _PIECE)), jobs, lambda _: None)
        except OSError as error:
            raise FormatError(str(path), f"cannot be read: {error.strerror}") from error
        hashes = b"".join(hash_ for _, hash_ in sorted(self._hashes.items()))
        return {"bytes": size, "xxh3": xxhash.xxh3_128_hexdigest(hashes)}

    def _missing(self, count: int) -> Iterator[range]:
        """Runs of the numbers below count that have no hash yet."""
        missing = (number for number in range(count) if number not in self._hashes)
        begin = end = 0
        for number in missing:
            if number != end or end - begin == _TOGETHER:
                if end > begin:
                    yield range(begin, end)
                begin = number
            end = number + 1
        if end > begin:
            yield range(begin, end)


def of_file(path: Path, jobs: int) -> Fingerprint:
    """The fingerprint of a file, all of which is read; see Pieces.of_file()."""
    return Pieces().of_file(path, jobs)


def of_words(words: Iterable[bytes]) -> str:
    """A hash that differs where any of the words does."""
    total = xxhash.xxh3_128()
    for word in words:
        total.update(len(word).to_bytes(8, "little") + word)
    return total.hexdigest()
