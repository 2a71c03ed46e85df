"""The words that say how a tensor is quantized: on the command line, in rules and in recipes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from qtool.dtypes import DTYPES, TARGETS
from qtool.errors import UsageError, nearest
from qtool.presets import PRESETS
from qtool.spec import MX_RULES, PRECISIONS, SCALE_DTYPES, SEARCHES

# Words by name, as given; the value None: as if the word were not given at all.
Words = Mapping[str, Any]

_FLAG = {"true": True, "false": False}
_METHODS = ("absmax", "minmax", "entropy", "percentile:99.9", *SEARCHES)
# What each word takes: a type, or one of these values.
WORDS: dict[str, type | tuple[str, ...]] = {
    "dtype": tuple(dtype.name for dtype in TARGETS),
    "preset": tuple(PRESETS),
    "axis": int,
    "block_size": int,
    "tile": tuple,
    "symmetric": bool,
    "method": _METHODS,
    "scale_dtype": tuple(dtype.name for dtype in SCALE_DTYPES),
    "global_scale": bool,
    "mx_rule": MX_RULES,
    "precision": tuple(dtype.name for dtype in PRECISIONS),
    "saturate": bool,
    "nonfinite": ("error", "allow"),
    "semantics": ("onnx", "onednn"),
    "narrow_range": bool,
    "negative_scale": bool,
    "dynamic_activations": bool,
}
_NONE = "none"
# What a preset begins anew: the words that presets have, and those that depend on them.
_OF_PRESETS = {"preset", "axis", "mx_rule"}.union(*PRESETS.values())
_SYMMETRIC = {"absmax": True, "minmax": False}


def over(later: Words, earlier: Words) -> dict[str, Any]:
    """Both together, word by word; the later ones win.

    A preset begins anew, but for words that no preset has. Tiles take the place of axis and
    blocks, and the other way round; so do a method and symmetric that contradict each other.
    """
    gone = set(_OF_PRESETS) if "preset" in later else set()
    if later.get("tile") is not None:
        gone |= {"axis", "block_size"}
    if later.get("axis") is not None or later.get("block_size") is not None:
        gone.add("tile")
    if later.get("method") in _SYMMETRIC:
        gone.add("symmetric")
    method = earlier.get("method")
    if method in _SYMMETRIC and later.get("symmetric") not in (None, _SYMMETRIC[method]):
        gone.add("method")
    return {**{k: v for k, v in earlier.items() if k not in gone}, **later}


def parsed(text: str, thing: str) -> dict[str, Any]:
    """Words as "dtype=int8, block_size=64"; one without a value is True. thing: what messages
    call them. Raises UsageError."""
    found: dict[str, Any] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not name:
            raise UsageError(thing, f"{word!r} is no word", "write for example dtype=int8")
        if name in found:
            raise UsageError(thing, f"gives {name} twice", "leave one of them out")
        found[name] = value if equals else True
    return found


def checked(words: Mapping[str, Any], thing: str) -> dict[str, Any]:
    """The words with values of their types. Raises UsageError with the nearest right word."""
    return {name: _value(name, value, thing) for name, value in words.items()}


def unknown(name: str, allowed: Iterable[str], thing: str) -> UsageError:
    """The error of a word or value that there is not, with the nearest right one."""
    if name in DTYPES:
        return UsageError(thing, f"{name} is not allowed", f"use {', '.join(allowed)}")
    return UsageError(thing, f"{name!r} is unknown", nearest(name, allowed))


def phrase(words: Words) -> str:
    """The words as parsed() reads them."""
    return ", ".join(f"{name}={_text(value)}" for name, value in words.items())


def plain(value: Any) -> Any:
    """A value as plain data."""
    if value is None or isinstance(value, tuple):
        return _text(value)
    return value


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if value is None:
        return _NONE
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(name: str, value: Any, thing: str) -> Any:
    if name not in WORDS:
        raise unknown(name, WORDS, thing)
    kind = WORDS[name]
    if value == _NONE:
        return None
    if isinstance(kind, tuple):
        return _one_of(name, value, kind, thing)
    if kind is bool:
        value = _FLAG.get(value, value) if isinstance(value, str) else value
        if not isinstance(value, bool):
            raise UsageError(thing, f"{name} is {value!r}", "use true or false")
        return value
    if kind is tuple:
        return _tile(name, value, thing)
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,19}", value):
        value = int(value)
    if type(value) is not int or (name == "block_size" and value < 1):
        raise UsageError(thing, f"{name} is {value!r}", "use a whole number, for example 32")
    return value


def _one_of(name: str, value: Any, allowed: tuple[str, ...], thing: str) -> str:
    if not isinstance(value, str):
        raise UsageError(thing, f"{name} is {value!r}", "use " + ", ".join(allowed))
    is_percentile = name == "method" and value.startswith("percentile:")
    if value not in allowed and not is_percentile:
        raise unknown(value, allowed, f"{thing}: {name}")
    return value


def _tile(name: str, value: Any, thing: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,19})x(\d{1,19})", value) if isinstance(value, str) else None
    if match is None:
        raise UsageError(thing, f"{name} is {value!r}", "use ROWSxCOLUMNS, for example 128x128")
    return int(match[1]), int(match[2])
