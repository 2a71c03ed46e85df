"""What proves that a file is the one that was read or written: its size and a hash of all of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import xxhash

from qtool.errors import FormatError
from qtool.pool import buffer, in_order

Fingerprint = dict[str, int | str]

_PIECE = 1 << 20


def of_file(path: Path, jobs: int) -> Fingerprint:
    """{"bytes", "xxh3"}: the hash of the hashes of pieces of 1 MiB, which threads read.

    Raises FormatError where it cannot be read to its end.
    """
    total = xxhash.xxh3_128()
    try:
        with path.open("rb", buffering=0) as file:
            descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size

            def piece(start: int) -> bytes:
                data = buffer("fingerprint", np.dtype(np.uint8), min(_PIECE, size - start))
                if os.preadv(descriptor, [data.data], start) != data.size:
                    raise FormatError(str(path), "has become shorter", "let nothing write to it")
                return xxhash.xxh3_128_digest(data.data)

            in_order(piece, range(0, size, _PIECE), jobs, total.update)
    except OSError as error:
        raise FormatError(str(path), f"cannot be read: {error.strerror}") from error
    return {"bytes": size, "xxh3": total.hexdigest()}


def of_words(words: Iterable[bytes]) -> str:
    """A hash that differs where any of the words does."""
    total = xxhash.xxh3_128()
    for word in words:
        total.update(len(word).to_bytes(8, "little") + word)
    return total.hexdigest()
