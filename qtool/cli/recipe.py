"""qtool recipe."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer

from qtool.cli import options
from qtool.cli.exits import exit_code
from qtool.cli.quantize import quantize
from qtool.errors import UsageError

EXAMPLE = "Example: qtool recipe --preset w4a16 --rule 'lm_head*: dtype=int8' > recipe.toml"
# Variables and configuration are those of `qtool quantize` too.
SETTINGS = {"auto_envvar_prefix": "QTOOL_QUANTIZE"}
# Options of `qtool quantize` that have no bearing on what the result is.
_OTHERS = {
    "src", "output", "save_recipe", "report", "fail_if", "baseline", "strict", "dry_run", "hash",
    "resume", "shards", "scheduler", "jobs", "force", "json", "json_lines", "quiet",
}  # fmt: skip
_FROM = "made"
_From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Print what a file or folder says it was made by; - is standard input.",
        show_default=False,
        allow_from_autoenv=False,
        show_envvar=False,
    ),
]


def recipe(**given: Any) -> None:
    """Print what options of `qtool quantize` mean together, as TOML.

    `qtool quantize SRC --recipe FILE` does the same with it as with the
    options themselves. With --from it is the recipe of an output.
    """
    with exit_code():
        if (made := given.pop(_FROM)) is not None:
            _check_alone(given)
            from qtool.jobs.recipes import recipe_of

            typer.echo(recipe_of(made), nl=False)
            return
        options.check_semantics(given["semantics"])
        from qtool.jobs.recipes import recipe_text

        tile = options.rows_and_columns(given.pop("tile"))
        rules = given.pop("rule") or ()
        lists = {name: given.pop(name) or () for name in ("include", "exclude")}
        typer.echo(recipe_text(**given, **lists, rules=rules, tile=tile), nl=False)


def _check_alone(given: dict[str, Any]) -> None:
    """Refuse options beside --from."""
    if any(value != SHARED.parameters[name].default for name, value in given.items()):
        raise UsageError("--from", "an output has its recipe already", "leave the rest out")


def _shared() -> inspect.Signature:
    """The options of `qtool quantize` that decide the result, and --from."""
    whole = inspect.signature(quantize, eval_str=True)
    kept = [p for p in whole.parameters.values() if p.name not in _OTHERS]
    made = inspect.Parameter(
        _FROM, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=_From
    )
    return whole.replace(parameters=[made, *kept])


# what Typer reads
SHARED = _shared()
recipe.__signature__ = SHARED  # type: ignore[attr-defined]
recipe.__annotations__ = {p.name: p.annotation for p in SHARED.parameters.values()}
