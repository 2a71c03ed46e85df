"""Settings of the whole test suite."""

from __future__ import annotations

import os

from hypothesis import Phase, settings

# readline, which pytest imports, sets it; tests that want a width say so.
os.environ.pop("COLUMNS", None)

# onnxruntime, which many tests run by themselves, would tell its maker.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

# The same examples every time; nothing is stored. mutmut needs a failure, not the shortest one.
settings.register_profile(
    "qtool",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    phases=[p for p in Phase if p != Phase.shrink or "MUTANT_UNDER_TEST" not in os.environ],
)
settings.load_profile("qtool")
