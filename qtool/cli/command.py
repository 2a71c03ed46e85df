"""Commands and options whose values come from the command line, the environment, or a file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from qtool.cli import config
from qtool.cli.exits import exit_code, speaking
from qtool.errors import QtoolError

PREFIX = "QTOOL"
# Where Click says that values are from that somebody gave; the later ones win.
_LAYERS = ("DEFAULT_MAP", "ENVIRONMENT", "COMMANDLINE")
_SPACE = "\u00a0"  # where lines of --help are not broken, until they are printed
_CONFIG = "qtool.config"  # in a context: the Config in force, or the error that it gave
# What `qtool --help` says beside options and commands.
HELP = {
    "Exit codes": """\b
0    done, also where the reader of a pipe has gone away
1    cannot be done; one line says what, why, and what to do
2    wrong usage
3    a gate, or --strict, has failed; the target is as it was
130  interrupted (143: terminated)

Of several sources the worst counts: 1 before 2 before 3.""",
    "Environment": """\b
QTOOL_COMMAND_OPTION  the option of a command, as its --help says: a flag is
                      1 or 0, a repeatable option has one value in each
                      line, and an empty variable is none
QTOOL_CONFIG          the file with the configuration
NO_COLOR, FORCE_COLOR, COLUMNS, TERM, TMPDIR
                      as everywhere""",
    "Configuration": """\b
The nearest of qtool.toml and pyproject.toml, with a table [tool.qtool], in
the current folder or one above it gives options that neither the command
line nor the environment gives:

\b
  quiet = true                # for every command that has --quiet
  [quantize]                  # [tool.qtool.quantize] in pyproject.toml
  block-size = 32
  include = ["*.mlp.*"]

Names of files in it are relative to its folder; lists replace lists. What
--recipe names comes after all of these.""",
    "Files": """\b
Results go to standard output or to files that appear whole or not at all;
tables and messages to standard error. - is standard input or output.""",
}


class Option(TyperOption):
    """An option with QTOOL_COMMAND_OPTION; one that is repeatable has a value in each line."""

    def value_from_envvar(self, ctx: Any) -> Any:
        text = self.resolve_envvar_value(ctx)
        if text is None or not self.multiple:
            return text
        return [line.strip() for line in text.splitlines() if line.strip()] or None

    def get_error_hint(self, ctx: Any) -> str:
        hint = super().get_error_hint(ctx)
        origin = None if ctx is None else self.origin(ctx)
        return f"{hint} ({origin})" if origin else hint

    def get_help_record(self, ctx: Any) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None:
            return None
        return record[0], re.sub(r"\[env var: ", f"[env{_SPACE}var:{_SPACE}", record[1])

    def origin(self, ctx: typer.Context) -> str | None:
        """What to call the place that the value is from, where it is not the command line."""
        source = ctx.get_parameter_source(str(self.name))
        layer = None if source is None else source.name
        if layer == "ENVIRONMENT":
            return f"{ctx.auto_envvar_prefix}_{str(self.name).upper()}"
        return f"in {ctx.meta[_CONFIG].path}" if layer == "DEFAULT_MAP" else None


class Command(TyperCommand):
    """A command of qtool's: the layers of its options, and its help in sections."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _adopt(self.params)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # the shell completes
            return super().parse_args(ctx, args)
        try:
            ctx.default_map = _defaults(ctx)
        except QtoolError as error:
            ctx.meta[_CONFIG] = error
        rest = super().parse_args(ctx, args)  # --help leaves here, whatever the file says
        with exit_code():
            if isinstance(problem := ctx.meta[_CONFIG], QtoolError):
                raise problem
        _settle(ctx)
        return rest

    def invoke(self, ctx: Any) -> Any:
        with speaking(lambda message: _with_origins(message, ctx)):
            return super().invoke(ctx)

    def get_help_option(self, ctx: Any) -> Any:
        return _without_variable(super().get_help_option(ctx))

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace(_SPACE, " ")

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                is_option = param.param_type_name == "option"
                name = getattr(param, "rich_help_panel", None) or (
                    "Options" if is_option else "Arguments"
                )
                sections.setdefault(name, []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records, col_max=26)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write_paragraph()
        formatter.write_text(f"\b\n{self.epilog}")
        formatter.write_paragraph()
        formatter.write_text(_in_force(ctx))


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
        for title, text in HELP.items():
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
    return option


def _table(ctx: typer.Context) -> str:
    """The command whose options these are: those of `recipe` are those of `quantize`."""
    return str(ctx.auto_envvar_prefix).removeprefix(f"{PREFIX}_").lower()


def _keys(command: Any) -> config.Keys:
    found: dict[str, tuple[TyperOption, bool]] = {}
    for option in command.params:
        if isinstance(option, TyperOption):
            for names, is_straight in ((option.opts, True), (option.secondary_opts, False)):
                long = [name[2:] for name in names if name.startswith("--")]
                found |= dict.fromkeys(long, (option, is_straight))
    return found


def _defaults(ctx: typer.Context) -> dict[str, Any]:
    """What the configuration says of a command's options."""
    group: Any = ctx.parent
    said = config.loaded(group.params["config"]) if _is_wanted(group) else None
    ctx.meta[_CONFIG] = said
    if said is None:
        return {}
    commands = {n: _keys(c) for n, c in group.command.commands.items() if n != "recipe"}
    layers = said.layers(_table(ctx), commands)
    known = {param.name for param in ctx.command.params}
    values = _layered(layers) if all(layers) else layers[0] | layers[1]
    return {name: value for name, value in values.items() if name in known}


def _is_wanted(group: typer.Context) -> bool:
    """Whether a configuration is to be read: --no-config is not given, or --config is nearer."""
    if not group.params["no_config"]:
        return True
    sources: list[Any] = [group.get_parameter_source(name) for name in ("config", "no_config")]
    file, none = (_LAYERS.index(s.name) if s.name in _LAYERS else -1 for s in sources)
    if file == none:
        group.fail("--config and --no-config contradict each other.")
    return file > none


def _settle(ctx: Any) -> None:
    """Take away what a nearer place has overruled without naming it: blocks by a tile."""
    layers: dict[str, dict[str, Any]] = {layer: {} for layer in _LAYERS}
    for name, value in ctx.params.items():
        source = ctx.get_parameter_source(name)
        if value is not None and source.name in layers:
            layers[source.name][name] = value
    said = [layer for layer in layers.values() if layer]
    if len(said) < 2:
        return
    kept = _layered(said)
    for name in {name for layer in said for name in layer} - kept.keys():
        ctx.params[name] = None


def _layered(layers: list[dict[str, Any]]) -> dict[str, Any]:
    from qtool.jobs.recipes import layered

    return layered(layers)


def _with_origins(message: str, ctx: typer.Context) -> str:
    """A message with the place beside each option that is not from the command line."""
    origins: dict[str, str | None] = {}
    for option in ctx.command.params:
        if isinstance(option, Option) and ctx.params.get(str(option.name)) is not None:
            origin = option.origin(ctx)
            origins |= dict.fromkeys([*option.opts, *option.secondary_opts], origin)
    return re.sub(
        r"(?<![\w-])--[a-z][a-z-]*",
        lambda found: f"{found[0]} ({origin})" if (origin := origins.get(found[0])) else found[0],
        message,
    )


def _in_force(ctx: typer.Context) -> str:
    """What the configuration says of this command, for its --help."""
    said = ctx.meta.get(_CONFIG)
    if isinstance(said, QtoolError):
        return f"Configuration: none, because of an error: {said}"
    if said is None:
        return "Configuration: none here; `qtool --help` says where it is looked for."
    keys = [o.opts[0][2:] for o in ctx.command.params if o.name in (ctx.default_map or {})]
    return f"Configuration: {said.path} gives {', '.join(keys) or 'none of these options'}."
