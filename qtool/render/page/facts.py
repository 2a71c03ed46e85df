"""What a report says as a whole, in words: what was done, totals, gates."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from qtool.render.page.figures import (
    Record,
    figure,
    mapping,
    nbytes,
    percent,
    plain,
    rows,
    sqnr,
    texts,
    way,
)
from qtool.render.text import many, number

Facts = list[tuple[str, str]]


def title(report: Record) -> str:
    """The file that the report is on."""
    name = mapping(report, "output").get("name") or mapping(report, "source").get("name")
    return plain(name).rpartition("/")[2] if name and name != "-" else "Report"


def command(report: Record) -> str:
    return plain(report.get("command") or "qtool")


def lead(report: Record) -> str:
    """What was done, in a sentence or two."""
    records = rows(report, "tensors")
    kinds = Counter(map(way, records)).most_common()
    how = ", ".join(f"{count} {name}" if len(kinds) > 1 else name for name, count in kinds[:4])
    more = f" and {len(kinds) - 4} more kinds" if len(kinds) > 4 else ""
    is_plan, is_verified = report.get("dry_run") is True, report.get("command") == "verify"
    words = f"{many(len(records), 'quantized tensor')}" + (f": {how}{more}." if how else ".")
    words = f"A plan; nothing was written. {words}" if is_plan else words
    failed = bool(problems(report)) or not all(gate["passed"] for gate in gates(report))
    if failed:
        words = f"Failed{'' if is_verified else ', and not written'}. {words}"
    elif is_verified:
        words = f"Verified. {words}"
    totals = mapping(report, "totals")
    before, after = (figure(totals, f"file_bytes_{when}") for when in ("before", "after"))
    if before and after:
        is_there = is_verified or not (is_plan or failed)
        became = "became" if is_there else "would become"
        words += f" {nbytes(before)} {became} {nbytes(after)}{_ratio(before, after)}."
    return words


def _ratio(before: float, after: float) -> str:
    return f", {before / after:.2f} times smaller" if before > after else ""


def done(report: Record) -> Facts:
    """Command, files, tool and time."""
    tool = mapping(report, "tool")
    libraries = mapping(tool, "libraries").items()
    seconds = figure(report, "seconds")
    checks = mapping(report, "checks")
    samples = checks.get("run") or (f"{checks['random']} random" if checks.get("random") else None)
    checked = [("Compared with", checks.get("report")), ("Samples", samples)]
    return [
        ("Command", f"qtool {command(report)}"),
        ("Source", _file(mapping(report, "source"))),
        ("Output", _file(mapping(report, "output"))),
        *((label, plain(text)) for label, text in checked if text),
        ("Tool", f"{plain(tool.get('name') or '-')} {plain(tool.get('version') or '')}".strip()),
        ("Libraries", ", ".join(f"{plain(k)} {plain(v)}" for k, v in libraries) or "-"),
        ("Time", number(seconds, ".2f", " s")),
    ]


def _file(entry: Record) -> str:
    name = plain(entry.get("name") or "-")
    name = "standard input or output" if name == "-" and entry else name
    parts = [plain(entry["container"])] if entry.get("container") else []
    parts += [nbytes(figure(entry, "bytes"))] if entry.get("bytes") is not None else []
    return f"{name} ({', '.join(parts)})" if parts else name


def hashes(report: Record) -> Facts:
    """Files with their SHA-256, where the report has them."""
    return [
        (plain(file.get("name")), plain(file.get("sha256")))
        for key in ("source", "output")
        for file in rows(mapping(report, key), "files")
    ]


def settings(report: Record) -> Facts:
    """The settings that say something."""
    found = mapping(report, "settings").items()
    return [
        (plain(key), plain(value if isinstance(value, str) else json.dumps(value)))
        for key, value in found
        if value not in (None, [], "")
    ]


def recipe(report: Record) -> str:
    """The recipe as TOML; empty where the report has none."""
    text = report.get("recipe")
    return "\n".join(plain(line) for line in text.splitlines()) if isinstance(text, str) else ""


def totals(report: Record) -> list[tuple[str, str, str]]:
    """The figures of all tensors together: label, text, and a note."""
    found = mapping(report, "totals")
    bits = [figure(found, f"bits_per_weight{end}") for end in ("_before", "")]
    named = found.get("max_abs_error_tensor")
    facts = [
        ("SQNR", sqnr(found) + (" dB" if figure(found, "sqnr_db") is not None else ""), ""),
        ("Relative error", number(figure(found, "relative_error"), ".4f"), ""),
        (
            "Largest error",
            number(figure(found, "max_abs_error"), ".3g"),
            f"in {plain(named)}" if named else "",
        ),
        ("Clipped", percent(figure(found, "clipped_fraction")), ""),
        ("Bits per weight", number(bits[1], ".2f"), f"of {number(bits[0], '.2f')}"),
        ("Cosine similarity", number(figure(found, "cosine_similarity"), ".6f"), ""),
    ]
    extra = [
        ("Weighted SQNR", "weighted_sqnr_db", ".2f", " dB"),
        ("Error of outputs", "output_error", ".4f", ""),
        ("Rounding to nearest", "output_error_nearest", ".4f", ""),
    ]
    given = [(label, figure(found, key), spec, unit) for label, key, spec, unit in extra]
    facts += [(label, number(v, spec, unit), "") for label, v, spec, unit in given if v is not None]
    specials = [(name, figure(found, f"{name.lower()}_count")) for name in ("NaN", "Inf")]
    facts = [fact for fact in facts if fact[1] != "-"]
    return facts + [(f"{name} values", f"{count:.0f}", "") for name, count in specials if count]


def sizes(report: Record) -> list[tuple[str, str, float]]:
    """Label, text and length from 0 to 100 of sizes before and after."""
    found = mapping(report, "totals")
    bars = []
    for label, key in (("Quantized tensors", "bytes"), ("Whole file", "file_bytes")):
        before, after = (figure(found, f"{key}_{when}") for when in ("before", "after"))
        if before is None or after is None:
            continue
        top = max(before, after) or 1
        bars += [
            (f"{label}, before", nbytes(before), 100 * before / top),
            (f"{label}, after", f"{nbytes(after)}{_ratio(before, after or 1)}", 100 * after / top),
        ]
    return bars


def skipped(report: Record) -> list[tuple[str, list[str]]]:
    """Reasons, and the tensors that each is for."""
    found: dict[str, list[str]] = {}
    for entry in rows(report, "skipped"):
        found.setdefault(plain(entry.get("reason")), []).append(plain(entry.get("name")))
    return sorted(found.items(), key=lambda item: -len(item[1]))


def gates(report: Record) -> list[dict[str, Any]]:
    """Every expression, and --strict: whether it passed, and lines on what failed or has no
    figure."""
    strict = mapping(report, "strict")
    asked = [{"expression": "--strict", **strict}] if strict else []
    return [
        {
            "expression": plain(gate.get("expression")),
            "passed": gate.get("passed") is True,
            "failed": list(_failures(gate)),
            "undefined": [
                f"{_of(entry)}: no {plain(entry.get('figure'))}, {plain(entry.get('why'))}"
                for entry in rows(gate, "undefined")
            ],
        }
        for gate in [*(_as_option(gate) for gate in rows(report, "gates")), *asked]
    ]


def problems(report: Record) -> list[str]:
    """What `qtool verify` found wrong."""
    return [
        (f"{plain(entry['tensor'])}: " if entry.get("tensor") else "") + plain(entry.get("problem"))
        for entry in rows(report, "problems")
    ]


OUTPUTS = ("output", "relative error", "max error", "cosine", "same argmax")


def outputs(report: Record) -> list[tuple[str, ...]]:
    """What OUTPUTS names of the outputs that `qtool verify` has compared."""
    figures = {
        "relative_error": ".4f", "max_abs_error": ".3g", "cosine_similarity": ".5f",
        "argmax_agreement": ".1%",
    }  # fmt: skip
    return [
        (plain(row.get("name")), *(number(figure(row, k), spec) for k, spec in figures.items()))
        for row in rows(report, "outputs")
    ]


def _as_option(gate: Record) -> dict[str, Any]:
    return {**gate, "expression": f"--fail-if '{plain(gate.get('expression'))}'"}


def _failures(gate: Mapping[str, Any]) -> Iterator[str]:
    for entry in rows(gate, "failed"):
        found = mapping(entry, "figures").items()
        figures = ", ".join(f"{plain(k)} = {_short(v)}" for k, v in found)
        why = "; ".join(plain(entry[key]) for key in ("limit", "reason") if entry.get(key))
        yield (
            f"{_of(entry)}: {figures} ({why})"
            if figures and why
            else f"{_of(entry)}: {figures or why}"
        )


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else plain(value)


def _of(entry: Record) -> str:
    return plain(entry.get("tensor") or "all tensors")


def warnings(report: Record) -> list[str]:
    return texts(report, "warnings")
