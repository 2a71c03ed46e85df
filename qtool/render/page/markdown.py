"""A report as Markdown with tables, as GitHub shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qtool.render.page import facts
from qtool.render.page.figures import columns, plain, rows, shape, way

# Punctuation with a meaning: anywhere; in an address, an emoji, a template; where a line starts.
_SPECIAL = re.compile(
    r"[\\`*_\[\]|<>~&$@#]|:(?=//|[\w+-]+:)|\{(?=[{%])|^[-+]|^\d+[.)](?=\s|$)", re.ASCII
)


def document(report: Mapping[str, Any], _pictures: Mapping[str, Any]) -> bytes:
    """Title, what was done, what is wrong, totals, every tensor, and what was left alone."""
    return ("\n".join(_lines(report)) + "\n").encode()


def escaped(text: str) -> str:
    """Text that Markdown shows as it is: no link, HTML, emphasis, code, mention or table cell."""
    text = _SPECIAL.sub(lambda found: f"{found[0][:-1]}\\{found[0][-1]}", text)
    return re.sub(r"(?i)[@#]|\bwww(?=\.)", r"\g<0>&#8203;", text)  # GitHub reads these after all


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"# {escaped(facts.title(report))}"
    yield from ("", escaped(facts.lead(report)), "")
    yield from _table(("", ""), facts.done(report))
    if problems := facts.problems(report):
        yield from ("", "## Problems", "")
        yield from (f"- {escaped(problem)}" for problem in problems)
    if gates := facts.gates(report):
        yield from ("", "## Gates", "")
        for gate in gates:
            yield f"- **{'passed' if gate['passed'] else 'FAILED'}** {escaped(gate['expression'])}"
            yield from (f"  - {escaped(line)}" for line in (*gate["failed"], *gate["undefined"]))
    if warnings := facts.warnings(report):
        yield from ("", "## Warnings", "")
        yield from (f"- {escaped(warning)}" for warning in warnings)
    yield from ("", "## Totals", "")
    sizes = [(label, text) for label, text, _ in facts.sizes(report)]
    totals = [(label, f"{text} {note}".strip()) for label, text, note in facts.totals(report)]
    yield from _table(("figure", "value"), [*totals, *sizes])
    if outputs := facts.outputs(report):
        yield from ("", "## Outputs of the model", "")
        yield from _table(facts.OUTPUTS, outputs, left=1)
    yield from _tensors(report)
    if skipped := facts.skipped(report):
        yield from ("", "## Left alone", "")
        for reason, names in skipped:
            yield f"- {escaped(reason)}: {', '.join(map(escaped, names))}"
    if settings := facts.settings(report):
        yield from ("", "## Settings", "")
        yield from _table(("setting", "value"), settings)
    if hashes := facts.hashes(report):
        yield from ("", "## SHA-256", "")
        yield from _table(("file", "SHA-256"), hashes)
    if recipe := facts.recipe(report):
        longest = max((len(run) for run in re.findall("`+", recipe)), default=0)
        fence = "`" * max(3, longest + 1)
        yield from ("", "## Recipe", "", f"{fence}toml", recipe, fence)


def _tensors(report: Mapping[str, Any]) -> Iterator[str]:
    records = rows(report, "tensors")
    if not records:
        return
    found = columns(records)
    yield from ("", "## Tensors", "")
    yield from _table(
        ("tensor", "type", "shape", *(column.title for column in found)),
        [
            (plain(r["name"]), way(r), shape(r), *(column.text(r) for column in found))
            for r in records
        ],
        left=3,
    )


def _table(
    header: Sequence[str], cells: Sequence[Sequence[str]], left: int | None = None
) -> Iterator[str]:
    """left: how many columns are flush left; None: all."""
    left = len(header) if left is None else left
    rules = ["---" if i < left else "---:" for i in range(len(header))]
    yield _row(header)
    yield _row(rules)
    yield from (_row([escaped(cell) for cell in row]) for row in cells)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
