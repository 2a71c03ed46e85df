"""How a job tells how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told how far a command is."""

    def begin(self, tensors: int, nbytes: int) -> None:
        """That many tensors and bytes are to be done."""
        ...

    def advance(self, name: str, nbytes: int) -> None:
        """One tensor is done."""
        ...


class Silent:
    """Progress that nobody looks at."""

    def begin(self, tensors: int, nbytes: int) -> None: ...

    def advance(self, name: str, nbytes: int) -> None: ...
