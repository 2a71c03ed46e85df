"""The line that says how a command is used."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class Command(TyperCommand):
    """A command whose required arguments stand in the line without braces: inspect SRC."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words after the command's name."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]
