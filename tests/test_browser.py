"""The page of `qtool report` in Chromium: `pytest -m browser`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import ok
from pages import HOSTILE, edited, grown, quantized, weights

pytestmark = pytest.mark.browser

EXAMPLE = Path(__file__).parents[1] / "examples" / "digits.safetensors"
Visit = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def digits(folder: Path) -> Path:
    """The page of the digits network."""
    report = folder / "digits.report.json"
    options = ("--dtype", "int4", "--block-size", "32", "-q", "--report", report)
    ok("quantize", EXAMPLE, "-o", folder / "digits.q.safetensors", *options)
    return page_of(report)


@pytest.fixture(scope="module")
def hostile(folder: Path) -> Path:
    """The page of a report with hostile names everywhere, and failed gates."""
    named = quantized(folder, weights(*HOSTILE), "--dtype", "int8", name="hostile")
    gate = {
        "expression": HOSTILE[0],
        "passed": False,
        "failed": [
            {"tensor": name, "figures": {name: 1.5}, "limit": name, "reason": name}
            for name in HOSTILE
        ],
        "undefined": [{"tensor": name, "figure": name, "why": name} for name in HOSTILE],
    }
    passed = {"expression": "sqnr_db < 9", "passed": True}
    report = edited(
        named, "hostile.gates.json", gates=[gate, passed], warnings=HOSTILE, command=HOSTILE[2],
        recipe="\n".join(HOSTILE), settings={name: name for name in HOSTILE},
        skipped=[{"name": name, "reason": name} for name in HOSTILE],
        problems=[{"tensor": name, "problem": name} for name in HOSTILE],
        outputs=[{"name": name} for name in HOSTILE],
    )  # fmt: skip
    return page_of(report)


def page_of(report: Path) -> Path:
    page = report.with_suffix(".html")
    ok("report", report, "-o", page, "--force", "-q")
    return page


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options, Service("/usr/bin/chromedriver")) as started:
        yield started


@pytest.fixture
def visit(driver: Any) -> Visit:
    """Opens a page, which must ask for nothing and have nothing to complain about."""

    def visited(page: Path, width: int = 1200, theme: str = "light") -> Any:
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        driver.get_log("performance")
        driver.get(page.as_uri())
        assert driver.get_log("browser") == []
        assert requests(driver) == {page.as_uri()}
        return driver

    return visited


def requests(driver: Any) -> set[str]:
    """What has been asked for, but for what a page carries in itself."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = {
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    }
    return {url for url in urls if not url.startswith("data:")}


def column(driver: Any, index: int) -> list[str]:
    """The texts of a column of the rows that are shown."""
    script = """
        return [...document.querySelectorAll("#table tbody tr")].filter((row) => !row.hidden)
          .map((row) => row.cells[arguments[0]].textContent)"""
    return driver.execute_script(script, index)  # type: ignore[no-any-return]


def focused(driver: Any) -> str:
    script = "const e = document.activeElement; return e.id || e.textContent.trim()"
    return driver.execute_script(script)  # type: ignore[no-any-return]


def press(driver: Any, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(driver).send_keys(*keys).perform()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
@pytest.mark.parametrize("name", ["digits", "hostile"])
def test_it_renders_within_its_width(
    name: str, width: int, theme: str, visit: Visit, request: pytest.FixtureRequest
) -> None:
    driver = visit(request.getfixturevalue(name), width, theme)
    sizes = "const e = document.documentElement; return [e.scrollWidth, e.clientWidth]"
    scrolled, client = driver.execute_script(sizes)
    assert scrolled == client <= width
    shown = """
        return [...document.querySelectorAll("svg")].map((svg) => svg.getBoundingClientRect())
          .filter((box) => box.width > 0).map((box) => [box.width, box.right])"""
    boxes = driver.execute_script(shown)
    assert len(boxes) == (7 if name == "digits" else 9)
    assert all(box[0] > 250 and box[1] <= width for box in boxes)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
@pytest.mark.parametrize("name", ["digits", "hostile"])
def test_axe_finds_no_violation(
    name: str, width: int, theme: str, visit: Visit, request: pytest.FixtureRequest
) -> None:
    from axe_core_python.selenium import Axe

    driver = visit(request.getfixturevalue(name), width, theme)
    for details in driver.find_elements("tag name", "details"):
        driver.execute_script("arguments[0].open = true", details)
    found = Axe().run(driver)
    assert [(v["id"], v["nodes"][0]["html"]) for v in found["violations"]] == []
    assert len(found["passes"]) > 20


def test_dark_and_light_have_other_colours(digits: Path, visit: Visit) -> None:
    script = """
        const bar = document.querySelector(".wide svg [style*='--bar']");
        return [document.body, bar].map((e) => getComputedStyle(e).cssText || [
          getComputedStyle(e).backgroundColor, getComputedStyle(e).fill].join())"""
    light, dark = (visit(digits, theme=theme).execute_script(script) for theme in ("light", "dark"))
    assert light[0] != dark[0]
    assert light[1] != dark[1]


def test_every_column_sorts_both_ways(digits: Path, visit: Visit) -> None:
    driver = visit(digits)
    buttons = driver.find_elements("css selector", "#table thead button")
    names = ["fc1.weight", "fc2.weight", "fc3.weight"]
    orders = {
        "#": names, "tensor": names, "type": names, "shape": ["fc3.weight", *names[:2]],
        "SQNR, dB": names[::-1], "relative error": names, "max error": names,
        "clipped": names[::-1], "bits": names, "before": ["fc3.weight", *names[:2]],
        "after": ["fc3.weight", *names[:2]],
    }  # fmt: skip
    ties = {"type", "bits"}  # all alike: they stay in model order
    upside_down = {"shape", "before", "after"}  # two alike
    assert [button.text for button in buttons] == list(orders)
    for button, (title, order) in list(zip(buttons, orders.items(), strict=True))[1:]:
        head = button.find_element("xpath", "..")
        button.click()
        assert head.get_attribute("aria-sort") == "ascending"
        assert column(driver, 1) == order, title
        button.click()
        assert head.get_attribute("aria-sort") == "descending"
        down = [*names[:2], "fc3.weight"] if title in upside_down else order[::-1]
        assert column(driver, 1) == (order if title in ties else down), title
        assert len(driver.find_elements("css selector", "#table [aria-sort]")) == 1
    buttons[0].click()
    assert column(driver, 0) == ["1", "2", "3"]
    buttons[0].click()
    assert column(driver, 0) == ["3", "2", "1"]


def test_tensors_without_a_figure_come_last_and_exact_ones_are_the_best(
    folder: Path, visit: Visit
) -> None:
    report = quantized(folder, weights("a", "b", "c", "d"), "--dtype", "int8", name="nulls")
    records = json.loads(report.read_text(encoding="utf-8"))["tensors"]
    figures = [(None, 0.0, 0), (20.0, 1.0, 0), (None, None, 3), (30.0, 0.5, 0)]
    for record, (sqnr, mse, nan) in zip(records, figures, strict=True):
        record |= {"sqnr_db": sqnr, "mse": mse, "nan_count": nan}
    driver = visit(page_of(edited(report, "nulls.edited.json", tensors=records)))
    button = driver.find_elements("css selector", "#table thead button")[4]
    button.click()
    assert column(driver, 4) == ["20.00", "30.00", "exact", "not finite"]
    button.click()
    assert column(driver, 4) == ["exact", "30.00", "20.00", "not finite"]


def test_it_filters_and_says_how_many_are_left(digits: Path, visit: Visit) -> None:
    driver = visit(digits)
    field, count = (driver.find_element("id", name) for name in ("filter", "count"))
    assert count.get_attribute("aria-live") == "polite"
    field.send_keys("FC2")
    assert (column(driver, 1), count.text) == (["fc2.weight"], "1 of 3 tensors")
    field.clear()
    field.send_keys("10x64")
    assert (column(driver, 1), count.text) == (["fc3.weight"], "1 of 3 tensors")
    field.send_keys("?")
    assert (column(driver, 1), count.text) == ([], "0 of 3 tensors")
    field.clear()
    field.send_keys(" ")
    assert len(column(driver, 1)) == 3


def test_the_keyboard_alone_is_enough(digits: Path, visit: Visit) -> None:
    from selenium.webdriver.common.keys import Keys

    driver = visit(digits)
    press(driver, Keys.TAB)
    assert focused(driver) == "Skip to the content"
    box = driver.switch_to.active_element.rect
    assert box["y"] >= 0
    press(driver, Keys.ENTER)
    assert focused(driver) == "main"
    seen: list[str] = []
    while "filter" not in seen:
        press(driver, Keys.TAB)
        outline = "return getComputedStyle(document.activeElement).outlineStyle"
        assert driver.execute_script(outline) == "solid"
        seen.append(focused(driver))
        assert len(seen) < 30
    assert "Histogram as a table of fc3.weight" in seen
    press(driver, "fc", Keys.TAB, Keys.TAB, Keys.TAB, Keys.ENTER)
    assert focused(driver).startswith("tensor")
    press(driver, Keys.SPACE)
    assert column(driver, 1) == ["fc3.weight", "fc2.weight", "fc1.weight"]


def test_a_histogram_opens_as_a_table(digits: Path, visit: Visit) -> None:
    driver = visit(digits)
    driver.find_element("css selector", "article details summary").click()
    rows = driver.find_elements("css selector", "article details[open] tbody tr")
    assert sum(int(row.find_elements("tag name", "td")[2].text) for row in rows) == 640


def test_hostile_names_are_text(hostile: Path, visit: Visit) -> None:
    driver = visit(hostile)
    assert sorted(column(driver, 1)) == sorted(
        "red" if "red" in name else name.replace("\t", "?") for name in HOSTILE
    )
    assert len(driver.find_elements("tag name", "script")) == 1
    assert driver.find_elements("css selector", "img, iframe, [onerror], main > b, li b") == []


def test_two_thousand_tensors_are_quick(digits: Path, visit: Visit, folder: Path) -> None:
    page = page_of(grown(digits.with_suffix(".json"), 2000))
    assert page.stat().st_size < 2_000_000
    driver = visit(page)
    timing = "const t = performance.timing; return t.loadEventEnd - t.navigationStart"
    assert driver.execute_script(timing) < 3000
    script = """
        const started = performance.now();
        document.querySelectorAll("#table thead button")[4].click();
        const field = document.getElementById("filter");
        field.value = "layers.199."; field.dispatchEvent(new Event("input"));
        document.body.offsetHeight;
        return performance.now() - started"""
    assert driver.execute_script(script) < 1500
    assert len(column(driver, 1)) == 10
