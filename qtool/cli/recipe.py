"""qtool recipe."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from qtool.cli import options
from qtool.cli.exits import exit_code
from qtool.cli.quantize import quantize

EXAMPLE = "Example: qtool recipe --preset w4a16 --rule 'lm_head*: dtype=int8' > recipe.toml"
# Variables and configuration are those of `qtool quantize` too.
SETTINGS = {"auto_envvar_prefix": "QTOOL_QUANTIZE"}
# Options of `qtool quantize` that have no bearing on what the result is.
_OTHERS = {
    "src", "output", "save_recipe", "report", "fail_if", "baseline", "strict", "dry_run",
    "resume", "shards", "scheduler", "jobs", "force", "json", "json_lines", "quiet",
}  # fmt: skip


def recipe(**given: Any) -> None:
    """Print what options of `qtool quantize` mean together, as TOML.

    `qtool quantize SRC --recipe FILE` does the same with it as with the
    options themselves.
    """
    with exit_code():
        options.check_semantics(given["semantics"])
        from qtool.jobs.recipes import recipe_text

        tile = options.rows_and_columns(given.pop("tile"))
        rules = given.pop("rule") or ()
        lists = {name: given.pop(name) or () for name in ("include", "exclude")}
        typer.echo(recipe_text(**given, **lists, rules=rules, tile=tile), nl=False)


def _shared() -> inspect.Signature:
    """The options of `qtool quantize` that decide the result."""
    whole = inspect.signature(quantize, eval_str=True)
    kept = [p for p in whole.parameters.values() if p.name not in _OTHERS]
    return whole.replace(parameters=kept)


# what Typer reads
SHARED = _shared()
recipe.__signature__ = SHARED  # type: ignore[attr-defined]
recipe.__annotations__ = {p.name: p.annotation for p in SHARED.parameters.values()}
