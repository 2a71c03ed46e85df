"""numba kernels: the same numbers as ops and stats, at memory speed.

This page imports no numba: what it holds is known without it.
"""

from __future__ import annotations

# The order of summation, which stats.py states: elements of a chunk, lanes within one.
CHUNK = 4096
LANES = 16

# Elements of which a kernel keeps everything in a core's L1 cache.
PART = 1024

# For optimal scales: how many are screened at once; minima that one sweep may find, and candidates
# on either side of each.
WIDTH = 64
MINIMA = 1024
AROUND = 4
