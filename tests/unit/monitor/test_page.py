"""The page of a monitor, in a headless browser."""

from __future__ import annotations

import math
import time

import pytest

from runtime import Cause, Monitor, Timeline, record_scalar
from tests.support.browsing import show
from tests.support.running import WAIT_S, Gate, builder, count_up
from tests.unit.timeline.test_outputs import HOSTILE, run_hostile

pytestmark = pytest.mark.slow

pytest.importorskip("aiohttp")
pytest.importorskip("plotly")

RANKS = 8
POLL_S = 0.1
TALL = 12_000  # plots are drawn where they can be seen


@pytest.fixture(scope="module")
def monitored():
    """An ended run of eight ranks, its timeline and its monitor."""

    def fit(model, batch):
        time.sleep(0.001 * (1 + int(batch[0][0]) % 3))
        record_scalar("accuracy", 0.25)
        return count_up(model, batch)

    timeline = Timeline(poll_s=0.02)
    b = builder(train=fit, ranks=RANKS, dataset=600, epochs=3).timeline(timeline)
    b.eval_fn(lambda model, epoch: {"accuracy": 0.5 + epoch / 10}).anchor(4)
    with Monitor(poll_s=POLL_S) as monitor:
        handle = b.run().attach(monitor)
        handle.join(WAIT_S)
        yield monitor, handle, timeline


def visit(driver, url, width=1200):
    """Open a page; returns the browser's errors."""
    size = {"width": width, "height": TALL, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(url)
    wait(driver, "return document.body.dataset.ready === 'yes'")
    return complaints(driver)


def complaints(driver):
    return [entry["message"] for entry in driver.get_log("browser")]


def wait(driver, script, *arguments):
    """Wait until a script returns a true value, and return it."""
    deadline = time.monotonic() + WAIT_S
    while True:
        found = driver.execute_script(script, *arguments)
        if found:
            return found
        assert time.monotonic() < deadline, script
        time.sleep(0.02)


def text(driver, selector):
    return driver.execute_script(
        "return document.querySelector(arguments[0]).textContent", selector
    )


def values(driver, selector, name):
    script = (
        "return [...document.querySelectorAll(arguments[0])].map(e => e.getAttribute(arguments[1]))"
    )
    return driver.execute_script(script, selector, name)


def value(driver, name, within="#head"):
    (found,) = values(driver, f'{within} [data-name="{name}"]', "data-value")
    return float(found)


def wait_until_drawn(driver, chart, xs):
    """Wait until the first curve of a chart has these points; it is drawn after the data."""
    deadline = time.monotonic() + WAIT_S
    while (found := drawn(driver, chart)[0][0]) != xs:
        assert time.monotonic() < deadline, (found, xs)
        time.sleep(0.02)


def drawn(driver, chart):
    """Points of each curve of a drawn chart, from Plotly."""
    wait(driver, "return document.querySelector(arguments[0] + ' .main-svg') !== null", f"#{chart}")
    return driver.execute_script(
        "return document.querySelector(arguments[0]).data.map(t => [[...t.x], [...t.y]])",
        f"#{chart} .chart",
    )


def test_the_page_shows_the_counters_of_the_run(browser, monitored):
    monitor, handle, timeline = monitored
    assert visit(browser, monitor.url) == []
    statistics, summary = handle.statistics(), timeline.summary()
    assert text(browser, "#state") == "finished"
    assert text(browser, "#ended").startswith("The run has finished after")
    assert text(browser, "#link") == "live"
    for name, wanted in (
        ("progress", 1.0),
        ("epoch", 3),
        ("step", statistics.global_step),
        ("anchor", statistics.anchor),
        ("averagings", statistics.num_averagings),
        ("loss", handle.state.metrics[-1].avg_loss),
    ):
        assert value(browser, name) == pytest.approx(wanted)
    assert values(browser, ".rank", "data-rank") == [str(rank) for rank in range(RANKS)]
    for rank in statistics.ranks:
        panel = f'.rank[data-rank="{rank.rank}"]'
        for name in ("share", "throughput", "num_batches", "num_throttles"):
            assert value(browser, name, panel) == pytest.approx(getattr(rank, name))
        assert value(browser, "memory", panel) > 2**20
        parts = zip(
            values(browser, f"{panel} .causes .fill", "data-cause"),
            values(browser, f"{panel} .causes .fill", "data-value"),
            strict=True,
        )
        shown = {cause: float(spent) for cause, spent in parts}
        causes = summary.ranks[rank.rank].causes
        for cause in Cause:
            assert shown.get(cause.label, 0.0) == pytest.approx(causes[cause.label], abs=1e-3)
        assert int(values(browser, f"{panel} canvas", "data-columns")[0]) >= 2


def test_the_curves_are_those_of_the_run(browser, monitored):
    monitor, handle, _ = monitored
    visit(browser, monitor.url)
    metrics = handle.state.metrics
    means, running = drawn(browser, "loss")
    assert means == [[0, 1, 2], [m.avg_loss for m in metrics]]
    assert sorted(running[0]) == running[0]
    assert -0.5 < running[0][0] <= running[0][-1] == 2.5
    scalars = (
        [m.scalars["accuracy"] for m in metrics],
        [m.scalars["eval/accuracy"] for m in metrics],
        # NaN in an epoch in whose rounds only one rank has trained.
        [m.divergence for m in metrics if not math.isnan(m.divergence)],
        [m.param_norm for m in metrics],
    )
    shown = [drawn(browser, f"scalar-{index}")[0] for index in range(len(scalars))]
    assert sorted(y for _, y in shown) == sorted(map(list, scalars))
    assert len(drawn(browser, "throughput")) == RANKS
    for rank, (x, y) in enumerate(drawn(browser, "throughput")):
        widths = [after - before for before, after in zip([0.0, *x], x, strict=False)]
        total = sum(rate * width for rate, width in zip(y, widths, strict=True))
        assert total == pytest.approx(handle.statistics().ranks[rank].num_samples, rel=1e-6)
    assert drawn(browser, "anchor")[0][1][-1] == handle.statistics().anchor
    assert len(drawn(browser, "load")) == 2
    assert max(drawn(browser, "memory")[0][1]) > 1
    assert complaints(browser) == []


def test_the_page_leads_with_the_headline_and_the_loss(browser, monitored):
    monitor, handle, _ = monitored
    visit(browser, monitor.url)
    assert text(browser, "#headline") == handle.summary().headline
    order = browser.execute_script(
        "return ['#headline', '#loss', '#ranks', '#throughput'].map("
        "s => document.querySelector(s).getBoundingClientRect().top)"
    )
    assert order == sorted(order)


def test_bars_and_the_memory_of_a_rank_are_labelled(browser, monitored):
    monitor, _, _ = monitored
    visit(browser, monitor.url)
    panel = '.rank[data-rank="0"]'
    labels = browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)",
        f"{panel} .label",
    )
    assert labels == ["share of the samples", "time by cause", "time by cause over the run"]
    memory = "return document.querySelector(arguments[0]).parentElement.lastChild.textContent"
    named = browser.execute_script(memory, f'{panel} [data-name="memory"]')
    assert named == "memory of the process"
    assert " %" in text(browser, f"{panel} .listed")


def test_the_lane_of_a_rank_spans_the_whole_run(browser, monitored):
    monitor, _, _ = monitored
    for width in (480, 1280):
        visit(browser, monitor.url, width)
        # A pixel is painted at both ends; the marks below go from 0 to the end.
        painted = browser.execute_script(
            "const c = document.querySelector('.rank canvas'), x = c.getContext('2d');"
            "return [1, c.width / 2, c.width - 2].map("
            "at => x.getImageData(at, c.height - 2, 1, 1).data[3])"
        )
        assert min(painted) > 0
        first, last = browser.execute_script(
            "const t = document.querySelectorAll('.rank .times span');"
            "return [t[0].textContent, t[t.length - 1].textContent]"
        )
        assert first == "0 s"
        assert last == browser.execute_script(
            "return document.querySelector('[data-name=elapsed]').textContent"
        )


def test_events_are_listed_newest_first(browser, monitored):
    monitor, _, _ = monitored
    visit(browser, monitor.url)
    kinds = values(browser, "#events li", "data-kind")
    assert kinds[0] == "finished"
    assert kinds.count("epoch") == kinds.count("evaluation") == 3
    assert "averaging" in kinds


def test_pages_follow_the_run_and_survive_a_reload(browser):
    with Monitor(poll_s=POLL_S) as monitor:
        visit(browser, monitor.url)
        assert text(browser, "#model") == "No run yet"
        gate, steps = Gate(), []

        def fit(model, batch):
            steps.append(1)
            # Half of the second epoch is trained when the gate is reached.
            return gate(model, batch) if len(steps) > 30 else count_up(model, batch)

        handle = builder(train=fit, dataset=40, epochs=3, ranks=1).run().attach(monitor)
        gate.await_entry()
        wait(browser, "return document.querySelectorAll('#events [data-kind=epoch]').length === 1")
        assert text(browser, "#state") == "running"
        before = values(browser, "#events li", "data-kind")
        browser.refresh()
        wait(browser, "return document.querySelector('#state')?.textContent === 'running'")
        assert values(browser, "#events li", "data-kind")[-len(before) :] == before
        wait_until_drawn(browser, "loss", [0])
        first = browser.current_window_handle
        browser.switch_to.new_window("tab")
        visit(browser, monitor.url)
        second = browser.current_window_handle
        gate.opened.set()
        handle.join(WAIT_S)
        ends = []
        for window in (second, first):
            browser.switch_to.window(window)
            wait(browser, "return document.querySelector('#state').textContent === 'finished'")
            ends.append((value(browser, "step"), values(browser, "#events li", "data-kind")))
        assert ends[0] == ends[1]
        assert ends[0][0] == 60
        # Another run replaces the first, and the end of the server is shown.
        builder(epochs=7).run().attach(monitor).join(WAIT_S)
        wait(browser, "return document.querySelector('[data-name=epoch]').dataset.value === '7'")
        monitor.close()
        wait(browser, "return document.querySelector('#link').textContent === 'no longer served'")
        assert text(browser, "#state") == "finished"
        wait_until_drawn(browser, "loss", list(range(7)))
        browser.switch_to.window(second)
        browser.close()
        browser.switch_to.window(first)


@pytest.mark.parametrize("width", [320, 400, 900, 1600])
def test_nothing_overflows_at_any_width(browser, monitored, width):
    monitor, _, _ = monitored
    assert visit(browser, monitor.url, width) == []
    drawn(browser, "throughput")
    inner, whole = browser.execute_script(
        "return [innerWidth, document.documentElement.scrollWidth]"
    )
    assert inner == width
    assert whole <= width
    outside = browser.execute_script(
        "return [...document.querySelectorAll('section')].filter(s => [...s.querySelectorAll('*')]"
        ".some(e => e.getBoundingClientRect().right > s.getBoundingClientRect().right + 1"
        " && !e.closest('svg'))).map(s => s.id || s.className)"
    )
    assert outside == []


def test_hostile_names_are_shown_as_text(browser, tmp_path):
    with Monitor(poll_s=POLL_S) as monitor:
        run_hostile(Timeline(poll_s=0.005)).attach(monitor).join(WAIT_S)
        assert visit(browser, monitor.url) == []
        wait(browser, "return document.querySelector('#state').textContent === 'finished'")
        monitor.save_html(tmp_path / "hostile.html")
        check_hostile(browser)
    assert show(browser, tmp_path / "hostile.html", height=TALL) == []
    check_hostile(browser)
    assert text(browser, "#link") == "saved"


def check_hostile(browser):
    # The state is shown before the other data of its message.
    for shown in ("#events .failure", f"#scalar-{len(HOSTILE)} h2"):
        wait(browser, f"return document.querySelector('{shown}') !== null")
    scripts, images, polluted, fits = browser.execute_script(
        "return [[...document.scripts].filter(s => s.type !== 'application/json').length,"
        "document.images.length, Object.prototype.polluted ?? null,"
        "document.documentElement.scrollWidth <= innerWidth]"
    )
    assert (scripts, images, polluted, fits) == (2, 0, None, True)
    assert "owned" not in browser.title
    assert text(browser, "#model").startswith("</script><script>")
    titles = [text(browser, f"#scalar-{index} h2") for index in range(len(HOSTILE) + 1)]
    assert any(title.startswith("</script><script>document.title") for title in titles)
    assert "RuntimeError" in text(browser, "#events .failure")
    drawn(browser, "scalar-0")
    assert complaints(browser) == []


def test_the_saved_page_needs_no_server(browser, monitored, tmp_path):
    monitor, handle, _ = monitored
    monitor.save_html(tmp_path / "run.html")
    assert show(browser, tmp_path / "run.html", height=TALL) == []
    assert value(browser, "step") == handle.statistics().global_step
    assert drawn(browser, "loss")[0][1] == [m.avg_loss for m in handle.state.metrics]
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert complaints(browser) == []
