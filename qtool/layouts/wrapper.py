"""What the writers of all layouts have in common."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

File = TypeVar("File", bound=AbstractContextManager[Any])


class Wrapper(Generic[File]):
    """Entered and left with the file that it writes to, which constructors put into _file."""

    _file: File

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.__exit__(kind, error, trace)
