"""A Report as a document: strict JSON, how one is recognised, and how one is read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from qtool.errors import FormatError, unreadable
from qtool.report.build import VERSION
from qtool.report.figures import FIGURES

_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_REMEDY = "give a report that qtool has written"


def to_json(report: Mapping[str, Any], *, indent: int | None = 2) -> str:
    """The report as strict JSON: no NaN, no Infinity, and no bytes of names of files that are no
    text: they are written as \\xff. indent None: in one line."""
    return "".join(pieces(report)) if indent else _encoded(report) + "\n"


def pieces(report: Mapping[str, Any]) -> Iterator[str]:
    """What to_json() gives, record by record: all of it may be much larger than the report."""
    before, start = "{", "\n    "
    for key, value in report.items():
        yield f"{before}\n  {_encoded(key)}: "
        if isinstance(value, list | tuple) and value:
            for number, item in enumerate(value):
                yield f"{',' if number else '['}{start}{_indented(item, start)}"
            yield "\n  ]"
        else:
            yield _indented(value, "\n  ")
        before = ","
    yield "\n}\n"


def _indented(value: Any, start: str) -> str:
    """As json.dumps(indent=2) has it, in half the time. start: of a line."""
    encode = _SCALARS.get(type(value))
    if encode is not None:
        return encode(value)
    inner = f"{start}  "
    if value and isinstance(value, Mapping):
        items = [f"{_encoded(key)}: {_indented(held, inner)}" for key, held in value.items()]
        return f"{{{inner}{f',{inner}'.join(items)}{start}}}"
    if value and isinstance(value, list | tuple):
        items = [_indented(held, inner) for held in value]
        return f"[{inner}{f',{inner}'.join(items)}{start}]"
    return _encoded(value)


def _encoded(value: Any) -> str:
    text = _ENCODER.encode(value)
    if "\\ud" in text and (clean := _clean(value)) != value:
        return _ENCODER.encode(clean)
    return text


def _number(value: float) -> str:
    return float.__repr__(value) if math.isfinite(value) else _ENCODER.encode(value)


_SCALARS: Mapping[type, Callable[[Any], str]] = {
    str: _encoded,
    int: int.__repr__,
    float: _number,
    bool: lambda value: "true" if value else "false",
    type(None): lambda value: "null",
}


def _clean(value: Any) -> Any:
    """The same without the lone surrogates that stand for such bytes, or for nothing."""
    if isinstance(value, str):
        try:
            data = value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            data = value.encode("utf-8", "backslashreplace")
        return data.decode("utf-8", "backslashreplace")
    if isinstance(value, Mapping):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list | tuple) else value


def is_report(path: Path) -> bool:
    """Whether a file holds a report of qtool's, which another one may replace."""
    try:
        with path.open("rb") as file:
            if file.read(1) != b"{":  # a file of weights is not read into memory
                return False
        data = json.loads(path.read_text(encoding="utf-8"))
        return data["tool"]["name"] == "qtool" and "report_version" in data
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def read_report(path: str | Path) -> dict[str, Any]:
    """The report in a file, its names and figures checked. Raises FormatError for what is none."""
    thing = str(path)
    try:
        report = json.loads(_text(Path(path)), parse_constant=_refuse, parse_float=_finite)
    except OSError as error:
        raise FormatError(thing, f"cannot be read ({error.strerror})", _REMEDY) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(thing, f"is no JSON object ({unreadable(error)})", _REMEDY) from None
    tool = report.get("tool")
    version = report.get("report_version")
    if not isinstance(tool, dict) or tool.get("name") != "qtool" or type(version) is not int:
        raise FormatError(thing, "is no report of qtool's", _REMEDY)
    if version != VERSION:
        rule = f"is a report of version {str(version)[:20]}"
        raise FormatError(thing, rule, f"this qtool reads version {VERSION}")
    _check(report, thing)
    return dict(report)


def _text(path: Path) -> str:
    """A text that begins as an object does; files of weights are not read into memory."""
    with path.open("rb") as file:
        head = file.read(64)
        if not head.lstrip().startswith(b"{") or b"\0" in head:
            raise ValueError("it does not begin as one")
        return (head + file.read()).decode()


def _refuse(token: str) -> NoReturn:
    raise ValueError(f"it holds {token}")


def _finite(digits: str) -> float:
    return value if math.isfinite(value := float(digits)) else _refuse(digits[:20])


def _check(report: Mapping[str, Any], thing: str) -> None:
    """Refuse records without a name of their own, and figures that are no numbers."""
    records, totals = report.get("tensors"), report.get("totals")
    if not isinstance(records, list) or not isinstance(totals, dict):
        raise FormatError(thing, "has no tensors or no totals", _REMEDY)
    names = [r.get("name") if isinstance(r, dict) else None for r in records]
    if not all(isinstance(name, str) for name in names):
        raise FormatError(thing, "has a tensor without a name", _REMEDY)
    if len(set(names)) < len(names):
        raise FormatError(thing, "has two tensors of one name", _REMEDY)
    for where, record in [*zip(names, records, strict=True), ("totals", totals)]:
        for key in FIGURES.keys() & record.keys():
            if record[key] is not None and not _is_number(record[key]):
                raise FormatError(thing, f"{key} of {where} is no finite number", _REMEDY)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
