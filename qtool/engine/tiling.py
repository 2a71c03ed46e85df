"""How large the tiles of a tensor are."""

from __future__ import annotations

from qtool.kernels import CHUNK

# Elements of a tile at most: enough that Python's share of its time is small.
TILE = 512 * CHUNK
# Elements of a run that holds whole groups which are searched at once.
LARGEST_WINDOW = 1 << 23
# Elements of a tile at least, where a tensor is divided among threads.
_SMALL_TILE = 64 * CHUNK


def tile_size(size: int, jobs: int) -> int:
    """Elements of a tile, whole chunks, of a tensor of that size: some tiles for each thread."""
    share = -(-size // (4 * jobs * CHUNK)) * CHUNK
    return min(max(share, _SMALL_TILE), TILE)
