"""How a job tells how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told how far a command is."""

    def begin(self, tensors: int, nbytes: int) -> None:
        """That many tensors and bytes are to be done."""
        ...

    def advance(self, nbytes: int) -> None:
        """That many bytes more are done."""
        ...

    def finish(self, name: str) -> None:
        """One tensor is done."""
        ...

    def note(self, text: str) -> None:
        """Something that takes time, and what it is."""
        ...


class Silent:
    """Progress that nobody looks at."""

    def begin(self, tensors: int, nbytes: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def finish(self, name: str) -> None: ...

    def note(self, text: str) -> None: ...


class Part:
    """Progress of one of several pieces of work, which have begun together."""

    def __init__(self, whole: Progress) -> None:
        self.advance = whole.advance
        self.finish = whole.finish
        self.note = whole.note

    def begin(self, tensors: int, nbytes: int) -> None: ...
