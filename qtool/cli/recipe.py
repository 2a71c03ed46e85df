"""qtool recipe."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from copy import copy
from typing import Annotated, Any, get_args

import typer

from qtool.cli import many, options
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
        show_envvar=False,
        allow_from_autoenv=False,
    ),
]
_Src = Annotated[list[str] | None, typer.Argument(metavar="[SRC...]", hidden=True)]


def recipe(ctx: typer.Context, **given: Any) -> None:
    """Print what options of `qtool quantize` mean together, as TOML.

    `qtool quantize SRC --recipe FILE` does the same with it as with the
    options themselves. SRC and options that say where the result goes, how,
    or what it must hold may stand there too, and are no part of a recipe.
    With --from it is the recipe of an output.
    """
    with exit_code():
        made = given.pop(_FROM)
        words = {name: value for name, value in given.items() if name not in _OTHERS}
        if made is not None:
            _check_alone(ctx, given)
            from qtool.jobs.recipes import recipe_of

            typer.echo(recipe_of(made), nl=False)
            return
        options.check_semantics(words["semantics"])
        from qtool.jobs.recipes import recipe_text

        tile = options.rows_and_columns(words.pop("tile"))
        rules = words.pop("rule") or ()
        lists = {name: words.pop(name) or () for name in ("include", "exclude")}
        with many.shared("--recipe", words.pop("recipe"), ()) as file:
            text = recipe_text(**words, **lists, rules=rules, tile=tile, recipe=file)
        typer.echo(text, nl=False)


def _check_alone(ctx: typer.Context, given: Iterable[str]) -> None:
    """Refuse options beside --from."""
    sources = [ctx.get_parameter_source(name) for name in given]
    if any(source is not None and source.name == "COMMANDLINE" for source in sources):
        raise UsageError("--from", "an output has its recipe already", "leave the rest out")


def _shared() -> inspect.Signature:
    """The context, --from, and the options of `qtool quantize`; those that do not matter hidden."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    own = [
        inspect.Parameter("ctx", kind, annotation=typer.Context),
        inspect.Parameter(_FROM, kind, default=None, annotation=_From),
    ]
    whole = inspect.signature(quantize, eval_str=True)
    return whole.replace(parameters=[*own, *map(_hidden, whole.parameters.values())])


def _hidden(parameter: inspect.Parameter) -> inspect.Parameter:
    if parameter.name not in _OTHERS:
        return parameter
    if parameter.name == "src":
        return parameter.replace(annotation=_Src, default=None)
    kind, option = get_args(parameter.annotation)
    option = copy(option)
    option.hidden = True
    return parameter.replace(annotation=Annotated[kind, option])


# what Typer reads
SHARED = _shared()
recipe.__signature__ = SHARED  # type: ignore[attr-defined]
recipe.__annotations__ = {p.name: p.annotation for p in SHARED.parameters.values()}
