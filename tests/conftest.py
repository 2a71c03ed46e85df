"""Settings of the whole test suite."""

from __future__ import annotations

from hypothesis import settings

# The same examples every time; nothing is stored.
settings.register_profile("qtool", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("qtool")
