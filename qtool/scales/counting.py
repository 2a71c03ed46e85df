"""Counting of small integers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def add_counts(counts: Array, places: Array) -> None:
    """counts[place] += 1 for every place."""
    if places.size < counts.size:
        np.add.at(counts, places, 1)
    else:
        counts += np.bincount(places.reshape(-1), minlength=counts.size)
