"""Recipes as TOML: keys named as the command line's options, and an array of tables, rules.

preset = "w4a16"
exclude = ["*.bias"]

[[rules]]
pattern = "*.down_proj.weight"
dtype = "int8"
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qtool.errors import FormatError, UsageError, unreadable
from qtool.recipe.recipe import Recipe
from qtool.recipe.rule import Rule
from qtool.recipe.words import WORDS, checked, plain, unknown

# Keys besides the words, and the types of their values.
OPTIONS: dict[str, tuple[type, ...]] = {
    "target_bits": (int, float),
    "target_sqnr": (int, float),
    "candidates": (list,),
    "importance": (list,),
    "scale": (str, int, float),
    "zero_point": (str, int),
    "layout": (str,),
    "hessian": (list,),
    "activations": (list,),
    "damping": (int, float),
    "act_order": (bool,),
    "source_dtype": (str,),
    "to": (str,),
    "external_data": (bool,),
    "requantize": (bool,),
    "allow_empty": (bool,),
}
_PATTERNS = ("include", "exclude")
_RULES = "rules"
_LIMIT = 1 << 24  # bytes
_DOTS = 1000  # in a key: tomllib takes the square of them
_TEXT = re.compile(r"""(?:"(?:[^"\\]|\\.)*"|'[^']*')""")
_KINDS = {
    str: "a text",
    int: "a number",
    float: "a number",
    list: "texts in [ ]",
    bool: "true or false",
}


def read(path: str | Path) -> Recipe:
    """The recipe in a file; see parsed()."""
    try:
        with open(path, "rb") as file:
            data = file.read(_LIMIT + 1)
    except OSError as error:
        raise FormatError(str(path), f"cannot be read: {error.strerror}") from error
    return parsed(data, str(path))


def parsed(data: bytes, path: str, more: Sequence[str] = ()) -> Recipe:
    """The recipe that a file of that name holds. more: keys that are passed over.

    Raises FormatError where it is no TOML, UsageError where it says what no recipe can.
    """
    if len(data) > _LIMIT:
        raise FormatError(path, "is larger than 16 MiB", "no recipe is")
    try:
        text = data.decode("utf-8-sig")
        if any(map(_has_long_key, text.split("\n"))):
            raise ValueError(f"a line has more than {_DOTS} dots")
        said = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(path, f"is no TOML: {unreadable(error)}") from error
    words: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for key, value in said.items():
        if key in more:
            continue
        if key in WORDS:
            words |= checked({key: value}, path)
        elif key in OPTIONS:
            options[key] = _typed(key, value, OPTIONS[key], path)
        elif key not in (*_PATTERNS, _RULES):
            raise unknown(key, [*WORDS, *OPTIONS, *_PATTERNS, _RULES], path)
    include, exclude = (_typed(key, said.get(key, []), (list,), path) for key in _PATTERNS)
    tables = said.get(_RULES, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"{path}: rules", "is no array of tables", "begin each with [[rules]]")
    rules = tuple(
        Rule.from_table(table, f"{path}: rule {number}") for number, table in enumerate(tables, 1)
    )
    return Recipe(words, rules, tuple(include), tuple(exclude), options)


def written(recipe: Recipe) -> str:
    """What read() makes the recipe of; the same text however the same words came about."""
    lists = {name: list(getattr(recipe, name)) for name in _PATTERNS}
    found = {**recipe.words, **recipe.options, **{k: v for k, v in lists.items() if v}}
    order = dict.fromkeys([*WORDS, *OPTIONS, *found])
    said = {name: found[name] for name in order if name in found}
    tables = [_lines(said), *(f"\n[[{_RULES}]]\n{_lines(r.to_table())}" for r in recipe.rules)]
    return "".join(tables)


def shown(text: str) -> str:
    """The same TOML without characters that terminals obey: in texts their escapes."""
    return "".join(c if c.isprintable() or c in "\n\t" else _escape(c) for c in text)


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\u{number:04x}" if number < 1 << 16 else f"\\U{number:08x}"


def _has_long_key(line: str) -> bool:
    return line.count(".") > _DOTS and _TEXT.sub("", line).count(".") > _DOTS


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_value(plain(value))}\n" for key, value in table.items())


def _value(value: Any) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        raise UsageError("recipe", "has no place for an array", "give the name of a file with it")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        texts = [_value(item) for item in value]
        return f"[{', '.join(texts)}]" if len(texts) < 4 else _long(texts)
    # JSON's escapes are TOML's too; bytes of a file's name as \\xff
    text = os.fsencode(str(value)).decode("utf-8", "backslashreplace")
    return shown(json.dumps(text, ensure_ascii=False))


def _long(texts: Sequence[str]) -> str:
    return "[\n" + "".join(f"    {text},\n" for text in texts) + "]"


def _typed(key: str, value: Any, kinds: tuple[type, ...], path: str) -> Any:
    is_right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    if is_right and isinstance(value, list):
        is_right = all(isinstance(item, str) for item in value)
    if not is_right:
        wanted = " or ".join(dict.fromkeys(_KINDS[kind] for kind in kinds))
        raise UsageError(path, f"{key} is {value!r}", f"give {wanted}")
    return value
