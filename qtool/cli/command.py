"""Commands and options whose values come from the command line, the environment, or a file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from qtool.cli import layers, manual
from qtool.cli.exits import exit_code, speaking
from qtool.errors import QtoolError

_SPACE = "\u00a0"  # where lines of --help are not broken, until they are printed


class Option(TyperOption):
    """An option with QTOOL_COMMAND_OPTION; one that is repeatable has a value in each line."""

    def value_from_envvar(self, ctx: Any) -> Any:
        text = self.resolve_envvar_value(ctx)
        if text is None or not self.multiple:
            return text
        return [line.strip() for line in text.splitlines() if line.strip()] or None

    def get_error_hint(self, ctx: Any) -> str:
        hint = super().get_error_hint(ctx)
        origin = None if ctx is None else layers.origin(ctx, self)
        return f"{hint} ({origin})" if origin else hint

    def get_help_record(self, ctx: Any) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None:
            return None
        return record[0], re.sub(r"\[env var: ", f"[env{_SPACE}var:{_SPACE}", record[1])


class Command(TyperCommand):
    """A command of qtool's: the layers of its options, and its help in sections."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _adopt(self.params)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # the shell completes
            return super().parse_args(ctx, args)
        try:
            ctx.default_map = layers.defaults(ctx)
        except QtoolError as error:
            ctx.meta[layers.CONFIG] = error
        rest = super().parse_args(ctx, args)  # --help leaves here, whatever the file says
        with exit_code():
            if isinstance(problem := ctx.meta[layers.CONFIG], QtoolError):
                raise problem
            layers.check_variables(ctx)
        layers.settle(ctx)
        return rest

    def invoke(self, ctx: Any) -> Any:
        with speaking(lambda message: layers.with_origins(message, ctx)):
            return super().invoke(ctx)

    def get_help_option(self, ctx: Any) -> Any:
        return _without_variable(super().get_help_option(ctx))

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(_SPACE, " ")

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                default = "Options" if isinstance(param, Option) else "Arguments"
                panel = getattr(param, "rich_help_panel", None) or default
                sections.setdefault(panel, []).append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records, col_max=26)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write_paragraph()
        formatter.write_text(f"\b\n{self.epilog}")
        formatter.write_paragraph()
        formatter.write_text(_in_force(ctx))
        formatter.write_text("Exit codes, gates, variables and files: `qtool --help`.")


class Group(TyperGroup):
    """qtool itself."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        _adopt(self.params)

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for param in params:
            if param.name not in ("config", "no_config"):
                _without_variable(param)
        return params

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(_SPACE, " ")

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        shown = {name: command for name, command in self.commands.items() if not command.hidden}
        first = {name: (c.help or "").partition("\n\n")[0] for name, c in shown.items()}
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(text.split())) for name, text in first.items()])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        for title, text in manual.SECTIONS.items():
            with formatter.section(title):
                formatter.write_text(text)
        formatter.write_paragraph()
        formatter.write_text(f"\b\n{self.epilog}")


def _adopt(params: Iterable[Any]) -> None:
    """Typer makes all options of its own class; make them ours."""
    for param in params:
        if isinstance(param, TyperOption):
            param.__class__ = Option


def _without_variable(option: Any) -> Any:
    """The same option, which the environment cannot give."""
    if option is not None:
        option.allow_from_autoenv = option.show_envvar = False
        option.__class__ = Option
    return option


def _in_force(ctx: typer.Context) -> str:
    """What the configuration says of this command, for its --help."""
    said = ctx.meta.get(layers.CONFIG)
    if isinstance(said, QtoolError):
        return f"Configuration: none, because of an error: {said}"
    if said is None:
        return "Configuration: none here; `qtool --help` says where it is looked for."
    keys = [o.opts[0][2:] for o in ctx.command.params if o.name in (ctx.default_map or {})]
    return f"Configuration: {said.path} gives {', '.join(keys) or 'none of these options'}."
