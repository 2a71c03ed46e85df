"""numba kernels: the same numbers as ops.py and stats.py, at memory speed."""
