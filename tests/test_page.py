"""`qtool report`: the page, without a browser, and the command."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import leftovers, ok, process, refused
from pages import HOSTILE, Page, data, edited, grown, html, quantized, weights

from qtool.report.figures import FIGURES

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "examples" / "digits.safetensors"
MODEL, INPUTS = DIGITS.with_suffix(".onnx"), DIGITS.with_name("digits_inputs.npy")


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """The report of two small tensors, int4 in blocks of 32."""
    tensors = weights("a.0.weight", "a.1.weight")
    return quantized(tmp_path, tensors, "--dtype", "int4", "--block-size", "32")


def test_the_page_has_what_the_report_has(report: Path) -> None:
    found, page = data(report), html(report)
    assert page.all("h1") == ["weights.q.safetensors"]
    assert page.all("h2") == [
        "Totals", "Error by layer", "Worst tensors", "All tensors", "How it was done"
    ]  # fmt: skip
    assert page.all("th", scope="row") == ["a.0.weight", "a.1.weight"]
    cells = page.all("td")
    for i, record in enumerate(found["tensors"], 1):
        row = [
            str(i), "int4 /32", "16x64", f"{record['sqnr_db']:.2f}",
            f"{record['relative_error']:.4f}", f"{record['max_abs_error']:.3g}",
            f"{record['clipped_fraction']:.3%}" if record["clipped"] else "0", "5.00", "4.1 kB",
            "640 B",
        ]  # fmt: skip
        assert "\n".join(row) in "\n".join(cells)
    exact = [record["sqnr_db"] for record in found["tensors"]]
    shown = [float(v) for v in page.attribute("td", "data-v") if v]
    for value in exact:
        assert min(abs(value - other) for other in shown) < 1e-7
    text = page.all("body")[0]
    assert f"{found['totals']['sqnr_db']:.2f} dB" in text
    assert f"qtool {found['tool']['version']}" in text
    assert ("block_size", "32") in list(zip(page.all("dt"), page.all("dd"), strict=True))


def test_its_parts_are_named_for_screen_readers(report: Path) -> None:
    page = html(report)
    ids = [a["id"] for _, a, _ in page.elements if "id" in a]
    assert len(set(ids)) == len(ids)
    for _, attributes, _ in page.elements:
        for key in ("aria-labelledby", "aria-controls", "for"):
            assert set((attributes.get(key) or "").split()) <= set(ids)
        target = attributes.get("href") or ""
        assert target.startswith("data:") or target[1:] in {*ids, ""}
    assert page.attribute("html", "lang") == ["en"]
    assert page.all("label", for_="filter") == [] or page.all("label")
    assert page.all("a", class_="skip") or page.all("a")[0] == "Skip to the content"
    svgs = [a for tag, a, _ in page.elements if tag == "svg"]
    assert len(svgs) == 6
    assert all(a["role"] == "img" for a in svgs)
    assert "Histogram of a.0.weight" in page.all("title")
    assert len(page.all("caption")) == 5
    assert page.attribute("th", "aria-sort") == ["ascending"]
    assert page.attribute("p", "aria-live") == ["polite"]


def test_it_asks_for_nothing_and_runs_its_own_script_alone(report: Path) -> None:
    page = html(report)
    for tag, attributes, _ in page.elements:
        assert not {name for name in attributes if name.startswith("on")}
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "data:,", "data:image/png;base64,")), (tag, value)
    (script,) = [text for tag, _, text in page.elements if tag == "script"]
    digest = base64.b64encode(hashlib.sha256("".join(script).encode()).digest()).decode()
    (policy,) = [a["content"] for t, a, _ in page.elements if "Policy" in str(a.get("http-equiv"))]
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    assert not re.search(r"@import|url\((?!#)", ok("report", report, "-o", "-").out.decode())


def test_the_same_report_gives_the_same_bytes(report: Path, tmp_path: Path) -> None:
    for kind in ("html", "png", "md", "csv"):
        first = ok("report", report, "-o", "-", "--to", kind).out
        target = tmp_path / f"other.{kind}"
        done = process("report", report, "-o", target, env={"PYTHONHASHSEED": "7", "HOME": "/"})
        assert done.returncode == 0, done.stderr
        assert target.read_bytes() == first


def test_names_are_text_wherever_they_stand(tmp_path: Path) -> None:
    named = quantized(tmp_path, weights(*HOSTILE), "--dtype", "int8")
    gate = {
        "expression": HOSTILE[0],
        "passed": False,
        "failed": [{"tensor": n, "figures": {n: n}, "limit": n, "reason": n} for n in HOSTILE],
        "undefined": [{"tensor": n, "figure": n, "why": n} for n in HOSTILE],
    }
    page = html(
        edited(
            named, "hostile.json", gates=[gate], warnings=HOSTILE, recipe="\n".join(HOSTILE),
            command=HOSTILE[0], settings={name: name for name in HOSTILE},
            tool={"name": "qtool", "version": HOSTILE[1], "libraries": {HOSTILE[2]: HOSTILE[2]}},
            skipped=[{"name": name, "reason": name} for name in HOSTILE],
            problems=[{"tensor": name, "problem": name} for name in HOSTILE],
            outputs=[{"name": name, "relative_error": name} for name in HOSTILE],
            checks={"report": HOSTILE[0], "run": HOSTILE[1], "random": None},
        )
    )  # fmt: skip
    kept = {"red" if "red" in name else name for name in HOSTILE}
    assert set(page.all("th", scope="row")) == kept
    tags = {tag for tag, _, _ in page.elements}
    assert tags.isdisjoint({"img", "iframe", "object"})
    assert [tag for tag, _, _ in page.elements].count("script") == 1
    assert "49" not in page.all("body")[0].split()
    assert "\x1b" not in page.all("html")[0]


@pytest.mark.parametrize("count", [0, 1, 31, 2000])
def test_any_number_of_tensors(count: int, report: Path) -> None:
    many = grown(report, count)
    done = ok("report", many, "-o", "-", "-q").out
    assert len(done) < 2_000_000
    page = Page(done.decode())
    assert len(page.all("th", scope="row")) == count
    assert ("Error by layer" in page.all("h2")) == (count > 0)
    assert ok("report", many, "-o", "-", "-q", "--to", "png").out.startswith(b"\x89PNG")
    rows = csv.reader(io.StringIO(ok("report", many, "-o", "-", "--to", "csv").out.decode()))
    assert len(list(rows)) == 1 + count
    assert ok("report", many, "-o", "-", "--to", "md").out.decode().count("| a.") == 0


@pytest.mark.parametrize("kind", ["html", "png", "md", "csv"])
def test_whatever_is_missing_null_or_odd_is_a_dash(kind: str, report: Path) -> None:
    found = data(report)
    head = {"tool": {"name": "qtool"}, "report_version": 1}
    bare = {"tensors": [{"name": "w"}], "totals": {}}
    nulls = found | {"tensors": [dict.fromkeys(r) | {"name": r["name"]} for r in found["tensors"]]}
    odd: dict[str, Any] = {key: ["x", {"y": 1}] for key in found["tensors"][0].keys() - FIGURES}
    odd |= {"name": "w", "new": {"deep": [None]}}
    odds = [dict.fromkeys(found, other) | {"tensors": [odd], "totals": odd}
            for other in ([1], {"a": 1}, "x", 1e300, None, True)]  # fmt: skip
    for changed in (bare, nulls, *odds):
        path = report.with_name("odd.json")
        path.write_text(json.dumps(changed | head), encoding="utf-8")
        ok("report", path, "-o", "-", "--to", kind, "-q")


def test_words_say_why_there_is_no_sqnr(report: Path) -> None:
    (record, _) = data(report)["tensors"]
    record |= {"sqnr_db": None, "nan_count": 0}
    others = [{"mse": 0.0}, {"mse": None, "elements": 0}, {"mse": None, "inf_count": 1}]
    tensors = [record | other | {"name": str(i)} for i, other in enumerate(others)]
    cells = html(edited(report, "nulls.json", tensors=tensors)).all("td")
    assert [w for w in cells if w in ("exact", "empty", "not finite")] == [
        "exact", "empty", "not finite"
    ]  # fmt: skip


def verified(report: Path, *options: str | Path, code: int = 0) -> Path:
    """The report of verifying what another report is of."""
    found, path = data(report), report.with_name("verified.json")
    source, output = (report.with_name(Path(found[k]["name"]).name) for k in ("source", "output"))
    done = process("verify", source, output, "--report", path, "-q", *options)
    assert done.returncode == code, done.stderr
    return path


def test_what_verify_finds_wrong_is_on_the_page(report: Path) -> None:
    assert (
        html(verified(report))
        .all("p", **{"class": "lead"})[0]
        .startswith("Verified. 2 quantized tensors: ")
    )
    path = report.with_name("weights.q.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    failed = verified(report, "--fail-if", "sqnr_db < 99 on a.0*", "--force", code=3)
    problems = [p["tensor"] + ": " + p["problem"] for p in data(failed)["problems"]]
    assert len(problems) == 1
    page = html(failed)
    assert page.all("h2")[:2] == ["Problems", "Gates"]
    assert page.all("p", **{"class": "lead"})[0].startswith("Failed. 2 quantized tensors: ")
    assert problems[0] in page.all("li", **{"class": "failed"})
    told = ok("report", failed, "-o", "-", "--to", "md", "-q").out.decode()
    assert re.search(r"\nFailed\. .*\n## Problems\n\n- [^\n]*the report says", told, re.DOTALL)
    assert "## Settings" not in told


def test_outputs_that_verify_compares_are_on_the_page(tmp_path: Path) -> None:
    target = tmp_path / "q.onnx"
    ok("quantize", MODEL, "-o", target, "--dtype", "int4", "--block-size", "32", "-q")
    path = tmp_path / "v.json"
    ok("verify", MODEL, target, "--run", INPUTS, "--report", path, "-q")
    (found,) = data(path)["outputs"]
    row = [
        f"{found['relative_error']:.4f}", f"{found['max_abs_error']:.3g}",
        f"{found['cosine_similarity']:.5f}", f"{found['argmax_agreement']:.1%}",
    ]  # fmt: skip
    page = html(path)
    assert page.all("td")[:4] == row
    assert ("Samples", str(INPUTS)) in list(zip(page.all("dt"), page.all("dd"), strict=True))
    told = ok("report", path, "-o", "-", "--to", "md", "-q").out.decode()
    assert f"| {found['name']} | {' | '.join(row)} |\n" in told


def test_tensors_without_a_finite_value_have_a_page(tmp_path: Path) -> None:
    values = {"nan": np.full((8, 32), np.nan, np.float32), "inf": np.full((8, 32), -np.inf, "f4")}
    page = html(quantized(tmp_path, values, "--dtype", "int8", "--nonfinite", "allow"))
    terms = dict(zip(page.all("dt"), page.all("dd"), strict=True))
    assert terms["NaN values"] == terms["Inf values"] == "256"
    captions = page.all("figcaption")
    assert sum("No value is finite." in text for text in captions) == 2
    assert sum("No error is finite." in text for text in captions) == 2


def test_gates_warnings_recipe_hashes_and_skipped_are_shown(report: Path) -> None:
    failed = {
        "tensor": "a.0.weight", "figures": {"sqnr_db": 12.3456789}, "limit": "sqnr_db < 20",
        "reason": None,
    }  # fmt: skip
    gates = [
        {"expression": "sqnr_db < 20", "passed": False, "failed": [failed], "undefined": []},
        {
            "expression": "mse > 1", "passed": True, "failed": [],
            "undefined": [{"tensor": "b", "figure": "mse", "why": "empty"}],
        },
        {
            "expression": "total.mse > 1", "passed": False, "undefined": [],
            "failed": [failed | {"tensor": None, "reason": "non-finite values", "limit": None}],
        },
    ]  # fmt: skip
    strict = {"passed": False, "failed": [{"tensor": None, "reason": "nothing matched"}]}
    changed = edited(
        report, "more.json", gates=gates, strict=strict, warnings=["mind this"],
        recipe='dtype = "int4"\n',
        skipped=[{"name": "c", "reason": "rank below 2"}],
        source=data(report)["source"] | {"files": [{"name": "f", "bytes": 1, "sha256": "ab12"}]},
    )  # fmt: skip
    page, text = html(changed), ok("report", changed, "-o", "-", "--to", "md").out.decode()
    assert page.all("strong") == ["Failed", "Passed", "Failed", "Failed"]
    items = page.all("li")
    for line in (
        "a.0.weight: sqnr_db = 12.3457 (sqnr_db < 20)",
        "b: no mse, empty",
        "all tensors: sqnr_db = 12.3457 (non-finite values)",
        "all tensors: nothing matched",
        "mind this",
        "c",
    ):
        assert line in items
    assert page.all("pre") == ['dtype = "int4"']
    assert ("f", "ab12") in list(zip(page.all("dt"), page.all("dd"), strict=True))
    assert "1 tensor: rank below 2" in page.all("summary")
    failure = "- **FAILED** \\--fail-if 'sqnr\\_db \\< 20'\n  - a.0.weight: sqnr\\_db = 12.3457"
    assert failure in text
    assert '```toml\ndtype = "int4"\n```\n' in text


def test_the_default_target_is_the_reports_name(report: Path) -> None:
    done = ok("report", report)
    page = report.with_suffix(".html")
    size = f"{page.stat().st_size / 1000:.1f} kB"
    assert done.err == f"{page}: 2 tensors, {size}\n"
    assert ok("report", report, "-o", "-", "-q").out == page.read_bytes()
    assert ok("report", report, "--force", "-q").err == ""


def test_what_exists_stays_without_force(report: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("mine", encoding="utf-8")
    assert refused("report", report, "-o", target) == (
        f"{target}: exists already; choose another name or --force"
    )
    assert target.read_text(encoding="utf-8") == "mine"
    ok("report", report, "-o", target, "--force", "-q")
    assert target.read_bytes().startswith(b"<!doctype html>")
    assert leftovers(tmp_path) == []
    source = report.rename(tmp_path / "report.md")
    assert "is the source" in refused("report", source, "-o", source, "--force")


def test_standard_input_and_output(report: Path) -> None:
    for kind in ("html", "md", "csv", "png"):
        options = ("-q", "--to", kind)
        piped = ok("report", "-", *options, stdin=report.read_bytes()).out
        assert piped == ok("report", report, "-o", "-", *options).out


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("-o", "page.pdf"), "page.pdf: cannot be written as pdf; use .html, .md, .csv, .png"),
        (("-o", "page"), "page: its name does not say what to write; use .html, .md, .csv, .png"),
        (
            ("-o", "page.md", "--to", "csv"),
            "page.md: its suffix contradicts --to csv; leave one of them out",
        ),
        (("--to", "pdf"), "--to: 'pdf' is unknown; use html, md, csv, png"),
    ],
)
def test_other_kinds_are_refused(options: tuple[str, ...], line: str, report: Path) -> None:
    assert refused("report", report, *options, code=2) == line


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"{}", b'{"totals": {}}', b'{"totals": {}, "tensors": [1]}',
        b'{"totals": {}, "tensors": [{"name": 1}]}', b'{"totals": 1, "tensors": []}',
        b"\xff\xfe{", b"{" * 100_000, b'{"a":' * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_report_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "no.json"
    path.write_bytes(content)
    for kind in ("html", "csv"):
        line = refused("report", path, "-o", "-", "--to", kind)
        assert line.startswith(f"{path}: ")
        assert line.endswith("; give a report that qtool has written")
    assert refused("report", "-", stdin=content) == line.replace(str(path), "standard input")


def test_a_file_of_weights_or_none_is_refused(tmp_path: Path) -> None:
    assert "is no JSON object" in refused("report", DIGITS, "-o", tmp_path / "page.html")
    missing = tmp_path / "none.json"
    line = refused("report", missing)
    assert line.startswith(f"{missing}: cannot be read (No such file or directory)")
    assert "cannot be read (Is a directory)" in refused("report", tmp_path, "-o", "-")


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
def test_without_the_extra_there_are_still_text_and_table(library: str, report: Path) -> None:
    code = f"import sys; sys.modules['{library}'] = None; from qtool.cli import main; main()"

    def run(kind: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, "report", str(report), "-o", "-", "--to", kind, "-q"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run("html")
    line = f"qtool: .html: needs {library}; install it: pip install {library}\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)
    assert run("md").returncode == run("csv").returncode == 0


def test_a_plan_has_sizes_and_no_pictures(tmp_path: Path) -> None:
    options = ("--dtype", "int4", "--dry-run", "--json", "-o", tmp_path / "q.safetensors")
    plan = tmp_path / "plan.json"
    plan.write_bytes(ok("quantize", DIGITS, *options).out)
    done = ok("report", plan, "-o", "-")
    page = Page(done.out.decode())
    assert "warning" not in done.err
    assert page.all("h2") == ["Totals", "All tensors", "Left alone", "How it was done"]
    assert page.all("p", class_="lead")[0].startswith(
        "A plan; nothing was written. 3 quantized tensors: int4 axis 0. 69.4 kB would become "
    )
    heads = list(page.all("button"))
    assert heads == ["#", "tensor", "type", "shape", "bits", "before", "after"]
    assert ok("report", plan, "-o", "-", "--to", "png", "-q").out.startswith(b"\x89PNG")


def test_a_page_of_very_many_tensors_lists_the_worst_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = quantized(tmp_path, weights(*"abcdef"), "--dtype", "int8")
    records = data(made)["tensors"]
    for record, error in zip(records, (0.1, 0.4, None, 0.2, 0.3, 0.4), strict=True):
        record["relative_error"] = error
    many = edited(made, "many.json", tensors=records)
    assert html(many).all("th", scope="row") == [*"abcdef"]
    monkeypatch.setattr("qtool.render.page.html._MOST", 3)
    page = html(many)
    assert page.all("th", scope="row") == [*"bcf"]
    assert page.attribute("td", "data-v")[0] == "2"  # its number in model order
    assert "The 3 of 6 tensors with the largest errors" in page.all("body")[0]
