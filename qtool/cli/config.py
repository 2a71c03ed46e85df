"""Options of commands in qtool.toml, or in pyproject.toml under [tool.qtool].

quiet = true                 for every command that has --quiet

[quantize]                   for one command; these come before those above
block-size = 32
include = ["*.mlp.*"]
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qtool.errors import FormatError, UsageError, nearest, unreadable

if TYPE_CHECKING:
    from typer.core import TyperOption

_OWN, _SHARED = "qtool.toml", "pyproject.toml"
_LIMIT = 1 << 20  # bytes
_DOTS = 1000  # tomllib takes the square of a key's parts, minutes for a long one
_FILES = ("FILE", "DST", "GIVEN", "REPORT", "SAMPLES")  # what --help calls names of files
_NUMBERS = {"int": int, "int range": int, "float": int | float, "float range": int | float}

# The options of a command by their keys; whether the key means the flag's value or its contrary.
Keys = Mapping[str, "tuple[TyperOption, bool]"]


@dataclass(frozen=True)
class Config:
    """What a file says: values of options, and tables of them under the names of commands.

    path: the file as messages call it. folder: what names of files in it are relative to.
    """

    path: str
    folder: str
    said: Mapping[str, Any]

    def layers(self, command: str, commands: Mapping[str, Keys]) -> list[dict[str, Any]]:
        """Values of a command's options by their names: those for all commands, then its own.

        commands: all that there are; the whole file is checked. Raises UsageError for what none of
        them has, and for a value of another type.
        """
        tables = {key: value for key, value in self.said.items() if isinstance(value, dict)}
        for name, table in tables.items():
            if name not in commands:
                raise self._unknown(f"[{name}]", name, commands, None)
            self._values(table, commands[name], name)
        shared = {key: value for key, value in self.said.items() if key not in tables}
        every = {name: pair for keys in commands.values() for name, pair in keys.items()}
        for key, value in shared.items():
            takers = [keys for keys in commands.values() if _plain(key) in keys]
            fitting = [keys for keys in takers if _fits(keys[_plain(key)][0], value)]
            self._values({key: value}, [*fitting, *takers, every][0])
        keys = commands[command]
        mine = {k: v for k, v in shared.items() if _plain(k) in keys}
        mine = {k: v for k, v in mine.items() if _fits(keys[_plain(k)][0], v)}
        own = self._values(tables.get(command, {}), keys, command)
        return [self._values(mine, keys), own]

    def _values(self, table: Mapping[str, Any], keys: Keys, command: str = "") -> dict[str, Any]:
        where = command and f" in [{command}]"
        found: dict[str, Any] = {}
        for key, value in table.items():
            if _plain(key) not in keys:
                otherwise = f"`qtool {command or 'COMMAND'} --help` names all"
                raise self._unknown(f"{key}{where}", _plain(key), keys, otherwise)
            option, is_straight = keys[_plain(key)]
            thing = f"{self.path}: {key}{where}"
            if not _fits(option, value):
                raise UsageError(thing, f"is {_kind(value)}", f"give {_wanted(option)}")
            if any("\0" in text for text in _texts(value)):
                raise UsageError(thing, "holds a NUL character", "leave it out")
            if option.name in found:
                raise UsageError(thing, "is said twice", "leave one of them out")
            found[str(option.name)] = self._placed(option, value) if is_straight else not value
        return found

    def _placed(self, option: TyperOption, value: Any) -> Any:
        """A value whose names of files are relative to the file with the configuration."""
        if option.metavar not in _FILES or not self.folder:
            return value
        if isinstance(value, list):
            return [self._file(text) for text in value]
        return self._file(value) if isinstance(value, str) else value

    def _file(self, text: str) -> str:
        """[activations:][NAME=]FILE with the folder before FILE; a number or - as it is."""
        if text == "-" or re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", text):
            return text
        start = text.rpartition("=")[0] + "=" if "=" in text else ""
        if not start and text.startswith("activations:"):
            start = "activations:"
        return start + os.path.join(self.folder, text[len(start) :])

    def _unknown(
        self, thing: str, name: str, allowed: Iterable[str], otherwise: str | None
    ) -> UsageError:
        return UsageError(f"{self.path}: {thing}", "is unknown", nearest(name, allowed, otherwise))


def loaded(file: str | None) -> Config | None:
    """What the file of that name says; None: the file of the current folder, or of the nearest
    parent that has one.

    Raises FormatError where it cannot be read or is no TOML.
    """
    if file is not None:
        said = _read(file, is_shared=os.path.basename(file) == _SHARED)
        if said is None:
            raise FormatError(file, "has no table [tool.qtool]", "add one")
        return Config(file, os.path.dirname(file), said)
    try:
        folder, depth = os.getcwd(), ""
    except OSError:  # it has been removed
        return None
    while True:
        for name in (_OWN, _SHARED):
            path = os.path.join(depth, name)
            if (
                os.path.isfile(path)
                and (said := _read(path, is_shared=name == _SHARED)) is not None
            ):
                return Config(path, depth, said)
        if os.path.dirname(folder) == folder:
            return None
        folder, depth = os.path.dirname(folder), os.path.join(depth, "..")


def _read(path: str, *, is_shared: bool) -> Mapping[str, Any] | None:
    """The table of a file; None where a shared one has none."""
    try:
        with open(path, "rb") as file:
            data = file.read(_LIMIT + 1)
    except OSError as error:
        raise FormatError(path, f"cannot be read: {error.strerror}") from error
    if is_shared and b"qtool" not in data[:_LIMIT]:
        return None
    if len(data) > _LIMIT:
        raise FormatError(path, "is larger than 1 MiB", "configuration is small")
    if any(line.count(b".") > _DOTS for line in data.splitlines()):
        raise FormatError(path, f"has more than {_DOTS} dots in a line", "keys are short")
    import tomllib

    try:
        said: dict[str, Any] = tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise FormatError(path, f"is no TOML: {unreadable(error)}") from error
    if not is_shared:
        return said
    tools = said.get("tool")
    table: dict[str, Any] | None = tools.get("qtool") if isinstance(tools, dict) else None
    if table is not None and not isinstance(table, dict):
        raise UsageError(f"{path}: tool.qtool", f"is {_kind(table)}", "write [tool.qtool]")
    return table


def _plain(key: str) -> str:
    return key.replace("_", "-")


def _fits(option: TyperOption, value: Any) -> bool:
    if option.multiple:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if option.is_flag or isinstance(value, bool):
        return option.is_flag and isinstance(value, bool)
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return False
    if option.metavar == "GIVEN":
        return isinstance(value, str | int | float)
    return isinstance(value, _NUMBERS.get(option.type.name, str))


def _wanted(option: TyperOption) -> str:
    if option.multiple:
        return "texts in [ ]"
    if option.is_flag:
        return "true or false"
    return "a number" if option.type.name in _NUMBERS else "a text in quotes"


def _kind(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return "beyond 64 bits"
    return repr(value)


def _texts(value: Any) -> list[str]:
    return [
        text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)
    ]
