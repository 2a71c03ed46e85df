"""Settings of the tests that load what qtool writes with the packages that read it.

The packages come with the extra `interop` and are imported by `pytest -m interop` alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from folders import Folders


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    tests = collection_path.name.startswith("test_")
    return True if tests and config.getoption("markexpr") != "interop" else None


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("folders"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The models are tiny, and test processes share the cores."""
    import torch

    torch.set_num_threads(1)
