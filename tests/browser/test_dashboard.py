"""The page in a real browser: drawn quickly, without console errors, at two widths, in light and dark mode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from harness.analysis.dashboard.serve import open_server
from harness.core.rundir import RunDir
from launch.cli.report import write_run_index
from tests.analysis.dashboard.logs import BEGUN, long_run, record, write_load, write_setup
from tests.browser.chromium import Browser, Page, find, started

NUM_STEPS = 20_000
AS_MUCH = 2.0
"""Allowed ratio of the long page's main-thread time to the short page's, on the same machine."""
EVIL = "<img src=x onerror=alert(1)>"

pytestmark = pytest.mark.skipif(find() is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find()
    assert program is not None
    with started(program, tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two short runs, one with a post-mortem, each with its page, and an index over both."""
    root = tmp_path_factory.mktemp("runs")
    write_setup(long_run(root / "other", 800))
    write_setup(long_run(root / "short", 400), optim={"lr": 1e-3, "beta2": 0.95})
    write_load(root / "short", 60, last=400)
    folder = root / "short" / "incidents" / "001"
    folder.mkdir(parents=True)
    text = f"# Spike #1\n\nPre-spike loss: 3.4 {EVIL}\n\n| step | loss |\n|---|---|\n| 100 | 7.0 |\n"
    (folder / "postmortem.md").write_text(text, encoding="utf-8")
    write_run_index(root, None, build=True)
    return root


@pytest.fixture(scope="module")
def costs() -> dict[str, float]:
    """Main-thread seconds of each page after it was drawn."""
    return {}


@pytest.fixture(scope="module")
def long_page(browser: Browser, tmp_path_factory: pytest.TempPathFactory, costs: dict[str, float]) -> Page:
    root = tmp_path_factory.mktemp("long")
    long_run(root / "run", NUM_STEPS)
    write_run_index(root, None, build=True)
    page = drawn(browser.open((root / "run" / "dashboard.html").as_uri()))
    costs["long"] = page.busy_s()
    return page


@pytest.fixture(scope="module")
def short_page(browser: Browser, runs: Path, costs: dict[str, float]) -> Page:
    page = drawn(browser.open((runs / "short" / "dashboard.html").as_uri()))
    costs["short"] = page.busy_s()
    return page


def drawn(page: Page) -> Page:
    page.wait_for("document.body && document.body.dataset.drawn")
    return page


def middle_of(page: Page, selector: str) -> tuple[float, float]:
    page.evaluate(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
    measure = f"(r => [r.x, r.y, r.width, r.height])(document.querySelector({selector!r}).getBoundingClientRect())"
    x, y, width, height = page.evaluate(measure)
    return x + width / 2, y + height / 2


@pytest.mark.full
def test_page_of_a_long_run_is_drawn(long_page: Page) -> None:
    assert long_page.evaluate("document.querySelectorAll('.panel .js-plotly-plot').length") == 12
    num_points = long_page.evaluate("Math.max(...element('draw-loss').data.map((trace) => trace.x.length))")
    assert 500 <= num_points <= 1100
    # a spike of one step among many thousands is in the picture
    norms = "element('draw-grad').data.find((trace) => trace.name === 'gradient norm').y"
    assert long_page.evaluate(f"Math.max(...{norms})") > 20
    assert long_page.complaints() == []


@pytest.mark.full
def test_zooming_one_panel_zooms_all(long_page: Page) -> None:
    page = long_page
    x, y = middle_of(page, "#draw-grad .nsewdrag")
    page.drag((x - 20, y), (x + 20, y))
    page.wait_for("state.view && document.body.dataset.drawn")
    first, last = page.evaluate("element('draw-loss').layout.xaxis.range")
    assert NUM_STEPS * 0.4 < first < last < NUM_STEPS * 0.6
    page.evaluate("look([10100, 10200])")
    drawn(page)
    assert page.evaluate("element('draw-lr').data[0].x") == list(range(10_099, 10_202))
    page.evaluate("element('whole').click()")
    page.wait_for("state.view === null && document.body.dataset.drawn")
    assert page.evaluate("element('draw-loss').layout.xaxis.range[1]") > NUM_STEPS
    assert page.complaints() == []


def test_click_on_an_incident_opens_its_dialog(short_page: Page) -> None:
    page = short_page
    page.click(*middle_of(page, "[data-incident='1']"))
    page.wait_for("element('drawer').open")
    text = page.evaluate("element('drawer').innerText")
    assert "Incident 1: loss_spike" in text
    assert "restored snapshot of iteration 90" in text
    assert f"Pre-spike loss: 3.4 {EVIL}" in text
    assert page.evaluate("document.querySelectorAll('.postmortem td').length") == 2
    assert page.evaluate("location.hash") == "#incident-1"
    page.press("Escape")
    page.wait_for("!element('drawer').open")
    # the same from the timeline, at the marker of the third incident
    page.click(*middle_of(page, "#strip .scatterlayer .trace:last-child .points path:nth-child(2)"))
    page.wait_for("element('drawer').open && element('drawer-title').textContent.startsWith('Incident 3')")
    page.press("Escape")
    page.wait_for("!element('drawer').open")
    # and from the keyboard
    page.evaluate("document.querySelector('[data-incident=\"2\"]').focus()")
    page.press("Enter")
    page.wait_for("element('drawer').open && element('drawer-title').textContent.startsWith('Incident 2')")
    page.press("Escape")
    page.wait_for("!element('drawer').open")
    assert page.complaints() == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 400])
def test_page_is_readable_at_both_widths_and_themes(short_page: Page, width: int, dark: bool) -> None:
    page = short_page
    page.show_at(width, dark=dark)
    drawn(page)
    assert page.wait_for(f"document.documentElement.scrollWidth === {width} && innerWidth === {width}")
    sizes = (
        "[...document.querySelectorAll('p, td, .label, .more')].map((e) => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert page.evaluate(f"Math.min(...{sizes})") >= 11
    plots = "[...document.querySelectorAll('.draw .main-svg')].map((e) => e.getBoundingClientRect().right)"
    page.wait_for(f"Math.max(...{plots}) <= {width}")
    ink, paper = page.evaluate("['color', 'backgroundColor'].map((name) => getComputedStyle(document.body)[name])")
    assert contrast(ink, paper) > 7
    quiet, card = page.evaluate("[ink('quiet'), ink('card')]")
    assert contrast(quiet, card) > 4.5
    assert (luminance(paper) < 0.1) is dark
    page.wait_for(f"element('draw-lr').layout.font.color === {quiet!r}")
    columns = page.evaluate("getComputedStyle(element('panels')).gridTemplateColumns.split(' ').length")
    assert columns == (2 if width == 1280 else 1)
    assert page.complaints() == []


def test_every_panel_has_a_legend_axis_titles_and_units(short_page: Page) -> None:
    page = short_page
    parts = page.evaluate(
        "[...document.querySelectorAll('.panel .draw')].map((e) => [e.dataset.id, e.layout.xaxis.title.text, "
        "e.layout.yaxis.title.text, e.layout.yaxis2 ? e.layout.yaxis2.title.text : 'none', "
        "e.data[0].type === 'heatmap' ? e.data[0].colorbar.title.text : e.previousSibling.innerText])"
    )
    assert len(parts) == 18
    assert all(all(texts) for texts in parts)
    titles = {name: texts for name, *texts in parts}
    assert titles["loss"] == [
        "iteration",
        "nats per token",
        "none",
        "each step\ngate bound: the update is rejected above it\nmoving average, applied\n"
        "●rejected, not applied\nheld out",
    ]
    assert titles["speed"][1:3] == ["tokens per second", "MFU"]
    assert titles["activation"][3] == "RMS of the residual stream"
    assert titles["gputemperature"][1:] == ["°C", "none", "hottest GPU\nmean of all GPUs"]
    losses = "element('draw-loss').data.find((trace) => trace.name === 'rejected, not applied')"
    assert page.evaluate(f"{losses}.x.filter((_, i) => {losses}.y[i] !== null)") == [300]
    average = (
        "Math.max(...element('draw-loss').data.find((trace) => trace.name.startsWith('moving')).y.slice(280, 320))"
    )
    assert page.evaluate(average) < 5.5 < page.evaluate(f"Math.max(...{losses}.y)")
    drawn_bound = "element('draw-grad').data.find((trace) => trace.name.startsWith('gate bound')).line.dash"
    assert page.evaluate(drawn_bound) == "dot"


def test_legend_names_only_the_lines_in_range(short_page: Page) -> None:
    legend = "element('draw-loss').previousSibling.innerText"
    for view, is_shown in (("[350, 390]", False), ("null", True)):
        short_page.evaluate(f"look({view})")
        drawn(short_page)
        assert ("gate bound" in short_page.evaluate(legend)) is is_shown


def test_ticks_of_a_logarithmic_axis_are_labelled_with_their_values(short_page: Page) -> None:
    short_page.evaluate(
        "{const add = rangeOf; rangeOf = () => ({ log: true, range: [-0.5, 1.4] }); draw('grad'); rangeOf = add}"
    )
    labels = "[...element('draw-grad').querySelectorAll('.ytick')].map((tick) => tick.textContent)"
    assert short_page.evaluate(labels) == ["0.5", "1", "2", "5", "10", "20"]
    short_page.evaluate("draw('grad')")


def test_lost_time_is_shown_by_cause(short_page: Page) -> None:
    rows = "[...document.querySelectorAll('#causes tbody tr')].map((row) => row.cells[0].innerText)"
    causes = short_page.evaluate(rows)
    planned = ["rewind or rollback", "evaluation", "checkpoints", "first start"]
    assert causes == [*planned, "lost launcher", "rejected updates"]
    bar = short_page.evaluate("document.querySelectorAll('.shares')[1].getAttribute('aria-label')")
    assert bar.startswith("rewind or rollback 5.13 %, evaluation ")
    dots = (
        "[...document.querySelectorAll('#causes .dot, .shares i')].map((dot) => getComputedStyle(dot).backgroundColor)"
    )
    assert "rgba(0, 0, 0, 0)" not in short_page.evaluate(dots), "every cause has a color"


def test_setup_and_configuration_are_shown_and_searchable(short_page: Page) -> None:
    page = short_page
    assert "124M (124,000,000)" in page.evaluate("element('setup').innerText")
    rows = "[...document.querySelectorAll('#config-list tr[data-key]')]"
    shown = f"{rows}.filter((row) => row.offsetParent).map((row) => row.dataset.key)"
    assert "optim.lr" in page.evaluate(shown)
    assert "run.name" not in page.evaluate(shown)
    page.evaluate("element('config-search').value = 'SEED'; element('config-search').oninput()")
    assert page.evaluate(shown) == ["run.seed"]
    assert page.evaluate("element('config-count').textContent") == "1 key"
    page.evaluate("element('config-search').value = ''; element('config-search').oninput()")
    assert page.complaints() == []


@pytest.mark.full
def test_print_draws_every_figure_for_paper(short_page: Page) -> None:
    """Also figures that were not drawn yet, in light colours, at the width of a sheet."""
    page = short_page
    page.show_at(1600, dark=True)
    page.evaluate("Plotly.purge(element('draw-cpuload')); dispatchEvent(new Event('beforeprint'))")
    sizes = "[...document.querySelectorAll('.draw, #strip')].map((e) => [e._fullLayout.width, e.clientWidth])"
    drawn_sizes = page.evaluate(sizes)
    assert len(drawn_sizes) == 19
    assert all(figure == place < 701 for figure, place in drawn_sizes)
    assert luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) > 0.9
    assert page.evaluate("element('draw-cpuload').layout.font.color") == page.evaluate("ink('quiet')")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    drawn(page)
    assert luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) < 0.1
    page.show_at(1280, dark=False)
    drawn(page)
    assert page.complaints() == []


@pytest.mark.full
def test_theme_button_and_time_axis(short_page: Page) -> None:
    page = short_page
    page.show_at(1280, dark=False)
    page.evaluate("element('theme').click()")
    drawn(page)
    assert luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) < 0.1
    page.evaluate("element('axis').value = 'time'; element('axis').onchange({ target: element('axis') })")
    drawn(page)
    assert page.evaluate("element('draw-loss').layout.xaxis.type") == "date"
    assert page.evaluate("element('draw-lr').data[0].x[0]") == pytest.approx((BEGUN + 0.5) * 1000)
    assert page.complaints() == []


@pytest.mark.full
def test_live_page_shows_new_steps(browser: Browser, tmp_path: Path) -> None:
    run = RunDir(long_run(tmp_path / "live", 60))
    with open_server(run, host="127.0.0.1", port=0) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            page = drawn(browser.open(f"http://127.0.0.1:{server.server_port}/"))
            assert page.evaluate("state.tables.steps.length") == 60
            with run.events.open("a", encoding="utf-8") as log:
                log.write(record(61, time=BEGUN + 99, loss=1.25) + "\n")
            page.wait_for("state.tables.steps.length === 61")
            page.wait_for("element('tiles').innerText.includes('1.2500') && document.body.dataset.drawn")
            assert page.evaluate("element('draw-loss').data[0].y.at(-1)") == 1.25
            long_run(run.path, 30, seed=1)  # another run under the same name
            page.wait_for("document.body?.dataset.drawn && state.tables.steps.length === 30")
            assert page.complaints() == []
            page.close()
        finally:
            server.shutdown()
            thread.join()


def test_the_index_sorts(browser: Browser, runs: Path) -> None:
    page = browser.open((runs / "index.html").as_uri(), width=400)
    names = "[...document.querySelectorAll('tbody tr td:nth-child(2)')].map((cell) => cell.innerText)"
    sorted_by = "[...document.querySelectorAll('th[aria-sort]')].map((head) => [head.innerText, head.ariaSort])"
    page.wait_for(f"{names}.length === 2")
    assert page.evaluate(names) == ["other", "short"]
    assert page.evaluate(sorted_by) == [["run", "ascending"]]
    page.evaluate("document.querySelectorAll('th button')[2].focus()")
    page.press("Enter")
    assert page.wait_for(f"{names}[0] === 'short'")
    assert page.evaluate(sorted_by) == [["steps", "ascending"]]
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert page.complaints() == []
    page.close()


@pytest.mark.full
def test_runs_selected_in_the_index_are_compared(browser: Browser, runs: Path) -> None:
    page = browser.open((runs / "index.html").as_uri(), width=400)
    page.wait_for("document.querySelectorAll('.pick').length === 2 && document.readyState === 'complete'")
    page.evaluate("document.querySelector('.pick').click(); document.querySelector('button.compare').click()")
    assert page.evaluate("document.querySelector('output').innerText") == "Select two or more runs."
    page.follow("document.querySelectorAll('.pick')[1].click(); document.querySelector('button.compare').click()")
    page.wait_for("location.pathname.endsWith('/compare.html')")
    drawn(page)
    assert page.evaluate("document.querySelectorAll('.panel .js-plotly-plot').length") == 16
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    curves = "element('draw-heldout').data.map((trace) => [trace.name, trace.x.length])"
    assert page.evaluate(curves) == [["other", 20], ["short", 20]]
    assert page.evaluate("element('legend-heldout').innerText") == "other\nshort"
    assert page.evaluate("element('legend-cpuload').innerText") == "short"
    lines = "[...document.querySelectorAll('#differences tr')].map((row) => row.innerText.split('\\t'))"
    assert page.evaluate(lines)[1:] == [["optim.lr", "0.0003", "0.001"]]
    page.evaluate("document.querySelectorAll('#runs input')[0].click()")
    drawn(page)
    assert page.evaluate(curves) == [["short", 20]]
    assert page.evaluate("decodeURIComponent(location.hash)") == "#run=short"
    assert "None: these runs" in page.evaluate("element('differences').innerText")
    page.evaluate("element('axis').value = 'tokens'; element('axis').onchange({ target: element('axis') })")
    drawn(page)
    assert page.evaluate("element('draw-heldout').data[0].x.at(-1)") == 400 * 1024
    assert page.evaluate("element('draw-loss').layout.xaxis.title.text") == "tokens"
    assert page.complaints() == []
    page.close()


def luminance(color: str) -> float:
    """Relative luminance as defined by WCAG."""
    channels = [int(part) / 255 for part in color.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    low, high = sorted([luminance(first), luminance(second)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.full
@pytest.mark.usefixtures("long_page", "short_page")
def test_page_of_a_long_run_costs_little_more_than_one_of_400_steps(costs: dict[str, float]) -> None:
    """Runs last, because only the foremost page receives mouse events."""
    assert costs["long"] < AS_MUCH * costs["short"]
