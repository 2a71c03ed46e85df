"""Where the values of options are from: the command line, the environment, a configuration."""

from __future__ import annotations

import os
import re
from typing import Any

import typer
from typer.core import TyperOption

from qtool.cli import config
from qtool.errors import UsageError, nearest

PREFIX = "QTOOL"  # of the variables
CONFIG = "qtool.config"  # in a context: the Config in force, or the error that it gave
# Where Click says that values are from that somebody gave; the later ones win.
_LAYERS = ("DEFAULT_MAP", "ENVIRONMENT", "COMMANDLINE")


def origin(ctx: typer.Context, option: TyperOption) -> str | None:
    """What to call the place that a value is from, where it is not the command line."""
    source = ctx.get_parameter_source(str(option.name))
    layer = None if source is None else source.name
    if layer == "ENVIRONMENT":
        return f"{ctx.auto_envvar_prefix}_{str(option.name).upper()}"
    return f"in {ctx.meta[CONFIG].path}" if layer == "DEFAULT_MAP" else None


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


def defaults(ctx: typer.Context) -> dict[str, Any]:
    """What the configuration says of a command's options."""
    group: Any = ctx.parent
    said = config.loaded(group.params["config"]) if _is_wanted(group) else None
    ctx.meta[CONFIG] = said
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


def check_variables(ctx: Any) -> None:
    """Refuse variables that name no option of the command: a gate that is misspelt would pass."""
    prefix = f"{ctx.auto_envvar_prefix}_"
    options = [p for p in ctx.command.params if isinstance(p, TyperOption) and p.show_envvar]
    known = {prefix + str(option.name).upper() for option in options}
    unknown = {name for name in os.environ if name.startswith(prefix)} - known
    if not unknown:
        return
    name = min(unknown)
    words = [word.removeprefix(prefix) for word in (name, *sorted(known))]
    remedy = nearest(words[0], words[1:], f"`qtool {ctx.command.name} --help` names all")
    raise UsageError(name, f"no option of `qtool {ctx.command.name}` has this variable", remedy)


def settle(ctx: Any) -> None:
    """Take away what a nearer place has overruled without naming it: blocks by a tile."""
    layers: dict[str, dict[str, Any]] = {layer: {} for layer in _LAYERS}
    for option in (param for param in ctx.command.params if isinstance(param, TyperOption)):
        source, value = ctx.get_parameter_source(option.name), ctx.params.get(option.name)
        if value is not None and source is not None and source.name in layers:
            layers[source.name][str(option.name)] = value
    said = [layer for layer in layers.values() if layer]
    if len(said) < 2:
        return
    kept = _layered(said)
    for option in ctx.command.params:
        if option.name not in kept and any(option.name in layer for layer in said):
            ctx.params[option.name] = () if option.multiple else option.default


def _layered(layers: list[dict[str, Any]]) -> dict[str, Any]:
    from qtool.jobs.recipes import layered

    return layered(layers)


def with_origins(message: str, ctx: typer.Context) -> str:
    """A message with the place beside each option that is not from the command line."""
    origins: dict[str, str | None] = {}
    for option in ctx.command.params:
        if isinstance(option, TyperOption) and ctx.params.get(str(option.name)) is not None:
            names = [*option.opts, *option.secondary_opts]
            origins |= dict.fromkeys(names, origin(ctx, option))
    return re.sub(
        r"(?<![\w-])--[a-z][a-z-]*",
        lambda found: f"{found[0]} ({place})" if (place := origins.get(found[0])) else found[0],
        message,
    )
