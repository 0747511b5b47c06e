"""The page of a timeline, in a headless browser."""

from __future__ import annotations

import time
from xml.etree import ElementTree

import pytest

from runtime import Cause, Kind, Timeline
from tests.support.browsing import show
from tests.support.running import WAIT_S, builder, count_up
from tests.unit.timeline.test_outputs import HOSTILE, run_hostile

pytestmark = pytest.mark.slow

RANKS = 8
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of eight ranks of unequal speed."""

    def fit(model, batch):
        time.sleep(0.001 * (1 + int(batch[0][0]) % 3))
        return count_up(model, batch)

    timeline = Timeline(poll_s=0.02)
    b = builder(train=fit, ranks=RANKS, dataset=600, epochs=3).timeline(timeline)
    b.eval_fn(lambda model, epoch: {"accuracy": 0.5 + epoch / 10})
    b.checkpoint_dir(tmp_path_factory.mktemp("kept"))
    b.eval_rank(0).checkpoint_fn(lambda version, model: None).anchor(4).run().join(WAIT_S)
    return timeline


@pytest.fixture(scope="module")
def page(recorded, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "run.html"
    recorded.save_html(path)
    return path


def texts(driver, selector):
    script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
    return driver.execute_script(script, selector)


def values(driver, selector, name):
    script = (
        "return [...document.querySelectorAll(arguments[0])].map(e => e.getAttribute(arguments[1]))"
    )
    return driver.execute_script(script, selector, name)


def test_the_page_shows_a_lane_for_each_rank_and_the_coordinator(browser, page):
    assert show(browser, page) == []
    assert values(browser, ".lane", "data-lane") == ["coordinator", *map(str, range(RANKS))]
    assert browser.execute_script("return document.body.dataset.ready") == "yes"
    for rank in range(RANKS):
        causes = values(browser, f'.lane[data-lane="{rank}"] .cause', "data-cause")
        assert {"startup", "compute"} <= set(causes)


def test_the_table_equals_the_summary(browser, page, recorded):
    show(browser, page)
    for rank in recorded.summary().ranks:
        for name in ("wall_s", "num_steps", "num_samples", "num_throttles", "idle_share"):
            (shown,) = values(
                browser, f'[data-rank="{rank.rank}"][data-name="{name}"]', "data-value"
            )
            assert float(shown) == pytest.approx(getattr(rank, name), abs=1e-8)
        for cause in Cause:
            shown = values(
                browser, f'[data-rank="{rank.rank}"][data-name="{cause.label}"]', "data-value"
            )
            if shown or rank.causes[cause.label]:
                assert float(shown[0]) == pytest.approx(rank.causes[cause.label], abs=1e-8)
    assert texts(browser, "#state") == ["finished"]


def test_curves_have_a_point_for_each_value(browser, page, recorded):
    show(browser, page)
    rates = recorded.throughput()[1]
    assert values(browser, "#throughput .legend li", "data-points") == [str(len(rates))] * RANKS
    assert values(browser, "#anchor .legend li", "data-points") == [
        str(len(recorded.anchor_curve()))
    ]
    assert values(browser, "#loss .legend li", "data-points") == ["3"]
    for drawn in ("divergence", "param_norm", "scalar-0"):
        assert values(browser, f"#{drawn} .legend li", "data-points") == ["3"], drawn
    assert texts(browser, "#scalar-0 h2")[0].startswith("eval/accuracy")
    readings = recorded.resources()[1]
    assert set(values(browser, "#cpu .legend li", "data-points")) == {str(len(readings))}
    assert len(values(browser, "#throughput .line", "d")) == RANKS


def test_evaluations_and_checkpoints_have_marks(browser, page, recorded):
    show(browser, page)
    marked = {Kind.EVALUATION, Kind.CHECKPOINT}
    for rank in (0, 5):
        shown = [e.kind.value for e in recorded.events() if e.rank == rank and e.kind in marked]
        assert "checkpoint" in shown
        kinds = values(browser, f'.lane[data-lane="{rank}"] .mark', "data-kind")
        assert sorted(kinds) == sorted(shown)
        assert kinds.count("evaluation") == (3 if rank == 0 else 0)
    parts = [e.args.get("part") for e in recorded.events() if e.kind is Kind.CHECKPOINT]
    saved = [part for part in parts if part and part.startswith("saved")]
    assert len(saved) >= 2
    kinds = values(browser, '.lane[data-lane="coordinator"] .mark', "data-kind")
    assert kinds == ["checkpoint"] * len(saved)
    titles = texts(browser, ".mark title")
    assert len(titles) == len(values(browser, ".mark", "x"))
    assert not [title for title in titles if "null" in title]


@pytest.mark.parametrize("width", [320, 480, 900, 1600])
def test_nothing_overflows_at_any_width(browser, page, width):
    assert show(browser, page, width=width) == []
    inner, whole = browser.execute_script(
        "return [innerWidth, document.documentElement.scrollWidth]"
    )
    assert inner == width
    assert whole <= width
    outside = browser.execute_script(
        "return [...document.querySelectorAll('svg text')].filter(e => {"
        "const b = e.getBoundingClientRect(), s = e.ownerSVGElement.getBoundingClientRect();"
        "return b.left < s.left - 1 || b.right > s.right + 1}).map(e => e.textContent)"
    )
    assert outside == []


def test_the_page_is_redrawn_when_the_window_is_resized(browser, page):
    show(browser, page, width=1200)
    before = values(browser, "#lanes-picture", "viewBox")
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 500, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    deadline = time.monotonic() + 5
    while values(browser, "#lanes-picture", "viewBox") == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(values(browser, ".lane", "data-lane")) == RANKS + 1


def test_pointing_at_a_lane_shows_the_causes_of_each_rank(browser, page):
    show(browser, page)
    browser.execute_script(
        "const s = document.getElementById('lanes-picture'), b = s.getBoundingClientRect();"
        "s.dispatchEvent(new PointerEvent('pointermove', {clientX: b.left + b.width / 2,"
        "clientY: b.top + 20, bubbles: true}))"
    )
    (readout,) = texts(browser, "#readout")
    assert all(f"rank {rank}: " in readout for rank in range(RANKS))


def test_hostile_names_are_shown_as_text(browser, tmp_path):
    timeline = Timeline(poll_s=0.005)
    run_hostile(timeline).join(WAIT_S)
    path = tmp_path / "hostile.html"
    timeline.save_html(path)
    assert show(browser, path) == []
    assert browser.title == "gpuworker timeline"
    assert browser.execute_script("return document.scripts.length") == 2
    assert browser.execute_script("return document.images.length") == 0
    assert browser.execute_script("return Object.prototype.polluted") is None
    (title,) = texts(browser, "h1")
    assert title.startswith("</script><script>")
    shown = texts(browser, "#charts h2")
    assert any(text.startswith("</script><script>document.title") for text in shown)
    assert len([t for t in values(browser, "#charts section", "id") if t.startswith("scalar")]) == (
        len(HOSTILE) + 1
    )
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")


def test_an_empty_timeline_has_a_page(browser, tmp_path):
    path = tmp_path / "empty.html"
    Timeline().save_html(path)
    assert show(browser, path) == []
    assert texts(browser, "#empty h2") == ["Nothing was recorded"]


def test_the_page_loads_no_other_resource(browser, page):
    show(browser, page)
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    policy = values(browser, "meta[http-equiv]", "content")[0]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_each_lane_is_filled_over_the_whole_run(browser, page):
    """In each sampled column the bars of a lane are stacked without gaps."""
    show(browser, page)
    markup = browser.execute_script(
        "return new XMLSerializer().serializeToString(document.getElementById('lanes-picture'))"
    )
    root = ElementTree.fromstring(markup)
    lanes = [g for g in root.iter(f"{SVG}g") if g.get("data-lane", "").isdigit()]
    assert len(lanes) == RANKS
    for lane in lanes:
        heights = {}
        for path in lane.iter(f"{SVG}path"):
            for column in path.get("d").split("z"):
                if column:
                    x, rest = column[1:].split(" ", 1)
                    height = float(rest.split("v")[1].split("h")[0])
                    heights[x] = heights.get(x, 0.0) + height
        assert len(heights) > 20
        assert all(25.0 < height < 26.3 for height in heights.values())
