"""qtool's error is at most that of every peer, in every row of tests/benchmarks/error.py."""

from __future__ import annotations

import pytest
from error_rows import ROWS, Row, errors
from real_weights import Matrix, minilm

pytestmark = pytest.mark.interop

METHODS = ["mse"]


@pytest.fixture(scope="module")
def weights() -> list[Matrix]:
    return minilm("encoder.layer.0")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.peer)
def test_no_peer_has_less_error(weights: list[Matrix], row: Row) -> None:
    theirs, *ours = errors(row, weights, METHODS)
    assert 0 < max(ours) <= theirs < 0.2
    assert row.own_bits <= row.bits
