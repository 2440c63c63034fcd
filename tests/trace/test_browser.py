"""The page in a real browser: `tox -e browser`, which needs Debian's packages chromium and chromium-driver.

No assertion depends on the speed of the machine: how long a frame takes is recorded in the report, and not judged.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.traces import MS, WrittenProcess, meet, write_job

from fscoord.trace.page import make_page
from fscoord.trace.reading import read

pytestmark = pytest.mark.browser

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--window-size=1440,1000",
)

PIXELS = """
const view = document.getElementById('view'), pen = view.getContext('2d'), found = new Set();
const data = pen.getImageData(0, 0, view.width, view.height).data;
for (let k = 0; k < data.length; k += 4) found.add(data[k] + ',' + data[k + 1] + ',' + data[k + 2]);
return [...found];
"""
"""The colours that the time line has."""

COLOUR = """
const hex = getComputedStyle(document.documentElement).getPropertyValue('--' + arguments[0]).trim();
return [1, 3, 5].map(k => parseInt(hex.slice(k, k + 2), 16)).join(',');
"""

ZOOMS = """
fscoordTrace.fit();
const first = fscoordTrace.view, times = [];
for (let k = 0; k < 120; k++) {
  const before = performance.now();
  fscoordTrace.view = { from: first.from + first.span * 0.4 * k / 120, span: first.span * Math.pow(0.94, k) };
  times.push(performance.now() - before);
}
times.sort((a, b) => a - b);
return { median: times[60], worst: times[119] };
"""

Open = Callable[[Path], Any]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    assert all(programs), "chromium and chromedriver must be on PATH: apt-get install chromium chromium-driver"
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.binary_location = programs[0]
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def shown(browser: Any, tmp_path: Path) -> Open:
    """Give `shown(directory)`: the browser with the page of that trace, which has drawn its time line."""

    def show(directory: Path) -> Any:
        page = tmp_path / "report.html"
        page.write_text(make_page(read(directory)), encoding="utf-8", errors="backslashreplace")
        browser.get(page.as_uri())
        browser.execute_script("fscoordTrace.paint()")
        assert browser.get_log("browser") == []
        return browser

    return show


@pytest.fixture
def job(tmp_path: Path, seed: int) -> Path:
    write_job(tmp_path / "traces", seed, ranks=8, hosts=2, barriers=20)
    return tmp_path / "traces"


def move_to(browser: Any, x: float, y: float) -> None:
    """Move the pointer to a place of the time line, in pixels from its left upper corner."""
    action_chains = pytest.importorskip("selenium.webdriver").ActionChains
    view = browser.find_element("id", "view")
    size = view.size
    offset = round(x - size["width"] / 2), round(y - size["height"] / 2)
    action_chains(browser).move_to_element_with_offset(view, *offset).perform()


def test_page_draws_barriers_stragglers_and_locks(shown: Open, job: Path) -> None:
    browser = shown(job)
    colours = set(browser.execute_script(PIXELS))
    for name in ("straggler", "lock", "held", "meet", "bad"):
        assert browser.execute_script(COLOUR, name) in colours, name
    assert browser.execute_script("return fscoordTrace.count") > 150


def test_page_asks_for_nothing_from_elsewhere(shown: Open, job: Path) -> None:
    browser = shown(job)
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_hover_shows_the_span_and_what_ended_it(shown: Open, tmp_path: Path) -> None:
    crew = [WrittenProcess("node0", 100 + rank, rank) for rank in range(3)]
    meet(crew, "epoch/<7>", [MS, 2 * MS, 9 * MS], [1000, 2000, 3000])
    for process in crew:
        process.write(tmp_path / "traces")
    browser = shown(tmp_path / "traces")
    place = browser.execute_script("return fscoordTrace.position(0)")
    move_to(browser, place["x"], place["y"])
    tip = browser.find_element("id", "tip")
    assert tip.is_displayed()
    for words in ("barrier epoch/<7>", "node0:100", "rank 2", "arrival of rank 2", "passed"):
        assert words in tip.text
    move_to(browser, 5, 5)
    assert not tip.is_displayed()


def test_zoom_keeps_the_time_under_the_pointer_and_drag_pans(shown: Open, job: Path) -> None:
    browser = shown(job)
    at = "const v = fscoordTrace.view; return v.from + (700 - 132) / (v.width - 132) * v.span"
    before = browser.execute_script(at)
    browser.execute_script("fscoordTrace.zoom(0.1, 700)")
    assert browser.execute_script(at) == pytest.approx(before, rel=1e-6)
    first = browser.execute_script("return fscoordTrace.view")
    move_to(browser, 600, 100)
    action_chains = pytest.importorskip("selenium.webdriver").ActionChains
    action_chains(browser).click_and_hold().move_by_offset(-200, 0).release().perform()
    second = browser.execute_script("return fscoordTrace.view")
    assert second["span"] == first["span"]
    assert second["from"] > first["from"]


def test_keys_and_buttons_zoom(shown: Open, job: Path) -> None:
    browser = shown(job)
    whole = browser.execute_script("return fscoordTrace.view.span")
    browser.find_element("id", "view").send_keys("w")
    nearer = browser.execute_script("return fscoordTrace.view.span")
    assert nearer < whole
    browser.find_element("id", "in").click()
    assert browser.execute_script("return fscoordTrace.view.span") < nearer
    browser.find_element("id", "fit").click()
    assert browser.execute_script("return fscoordTrace.view.span") == whole
    browser.find_element("id", "next").click()
    assert browser.execute_script("return fscoordTrace.view.span") < whole / 5


def test_theme_follows_the_system_and_the_button(shown: Open, job: Path) -> None:
    browser = shown(job)
    for scheme in ("dark", "light"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        assert browser.execute_script("return document.documentElement.dataset.theme") == scheme
    light = browser.execute_script("fscoordTrace.paint(); return getComputedStyle(document.body).backgroundColor")
    browser.find_element("id", "theme").click()
    browser.execute_script("fscoordTrace.paint()")
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") != light
    assert browser.execute_script(COLOUR, "straggler") in set(browser.execute_script(PIXELS))


def test_64_ranks_and_10000_spans_are_drawn(
    shown: Open, tmp_path: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    write_job(tmp_path / "traces", seed, ranks=64, hosts=8, barriers=150)
    browser = shown(tmp_path / "traces")
    assert browser.execute_script("return fscoordTrace.count") > 10_000
    found = browser.execute_script(ZOOMS)
    record_property("milliseconds of a frame, median", found["median"])
    record_property("milliseconds of a frame, longest", found["worst"])
    assert browser.execute_script("return fscoordTrace.view.span") < 1e6, "all 120 frames were drawn"


def test_narrow_window_shows_the_page_without_scrolling_sideways(shown: Open, job: Path) -> None:
    browser = shown(job)
    browser.set_window_size(600, 900)
    browser.execute_script("fscoordTrace.paint()")
    wide = browser.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0
