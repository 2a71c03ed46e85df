"""Every target of tests/fuzz reads its seeds, and bad inputs made of them without any guide."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random

import pytest
from fuzz import TARGETS, oracle

_INPUTS = {"page": 4, "rewrite": 10}  # others: 100


@pytest.mark.parametrize("name", TARGETS)
def test_any_input_is_read_or_refused(name: str, tmp_path: Path) -> None:
    tested = oracle.target(name)
    seeds = list(tested.seeds())
    rng = Random(name)
    mutated = (tested.mutate(rng.choice(seeds), rng) for _ in iter(int, 1))
    oracle.check(tested, seeds[0], _empty(tmp_path, "first"))  # imports what is imported late
    with oracle.tracing():
        for number, data in enumerate([*seeds, *islice(mutated, _INPUTS.get(name, 100))]):
            oracle.check(tested, data, _empty(tmp_path, str(number)))


def _empty(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir()
    return path
