"""A monitor, and the data sent to its pages."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import re
import socket
import threading
import time
import weakref
from itertools import pairwise

import pytest

from runtime import Cause, Monitor, Timeline, WorkerFailed, current_worker
from runtime.monitor import monitor_page as page_module
from runtime.monitor.feed import Feed
from runtime.monitor.run_reader import RunReader, tick_history
from runtime.monitor.viewer import MAX_WAITING, Viewer
from tests.support.running import SYNC, THREAD, WAIT_S, Counter, Gate, builder, count_up
from tests.support.watching import history_of, open_page, over, request
from tests.unit.timeline.test_outputs import HOSTILE, run_hostile

pytest.importorskip("aiohttp")
pytest.importorskip("plotly")

POLL_S = 0.05


@pytest.fixture
def monitor():
    with Monitor(poll_s=POLL_S) as made:
        yield made


def slow_count(model, batch):
    time.sleep(0.002)
    return count_up(model, batch)


def last(monitor):
    """The whole data of a page after the end of the run."""
    with open_page(monitor) as stream:
        return stream.until(over)


# -- a run ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", [True, False], ids=["timeline", "alone"])
def test_the_final_page_equals_the_counters_of_the_run(monitor, recorded):
    timeline = Timeline(poll_s=0.01) if recorded else None
    b = builder(train=slow_count, epochs=3, dataset=120, ranks=3).anchor(2)
    b.eval_fn(lambda model, epoch: {"accuracy": 0.5 + epoch / 8})
    if timeline is not None:
        b.timeline(timeline)
    handle = b.run()
    assert handle.attach(monitor) is handle
    state = handle.join(WAIT_S)
    whole, statistics = last(monitor), handle.statistics()
    now = whole["now"]
    assert (now["state"], now["error"], now["left_s"]) == ("finished", None, None)
    assert (now["step"], now["progress"]) == (statistics.global_step, 1.0)
    assert whole["facts"]["total_batches"] == statistics.global_step == 180
    assert (now["num_epochs"], whole["facts"]["num_epochs"]) == (3, 3)
    assert now["num_averagings"] == statistics.num_averagings
    assert now["anchor"] == statistics.anchor == whole["ticks"][-1]["anchor"]
    for shown, rank in zip(now["ranks"], statistics.ranks, strict=True):
        for name in ("rank", "device", "num_batches", "num_samples", "num_throttles", "share"):
            assert shown[name] == getattr(rank, name)
    assert whole["epochs"] == [
        {
            "epoch": metrics.epoch,
            "loss": metrics.avg_loss,
            "epoch_s": round(metrics.epoch_s, 3),
            "num_samples": metrics.num_samples,
            "scalars": [
                [name, value]
                for name, value in (
                    ("eval/accuracy", metrics.scalars["eval/accuracy"]),
                    ("divergence", metrics.divergence),
                    ("param_norm", metrics.param_norm),
                    ("learning_rate", metrics.learning_rate),
                )
                if not math.isnan(value)  # of an epoch without an averaging
            ],
        }
        for metrics in state.metrics
    ]
    assert whole["ticks"][-1]["samples"] == [rank.num_samples for rank in statistics.ranks]
    assert [e["args"]["epoch"] for e in whole["events"] if e["kind"] == "epoch"] == [0, 1, 2]
    assert whole["events"][-1]["kind"] == "finished"
    assert [len(causes) for causes in whole["ticks"][-1]["causes"]] == [len(Cause)] * 3
    assert now["headline"] == handle.summary().headline
    if timeline is not None:
        summary = timeline.summary()
        assert now["elapsed_s"] == round(summary.wall_s, 3)
        assert now["model"] == "Counter"
        for shown, rank in zip(whole["ticks"][-1]["causes"], summary.ranks, strict=True):
            assert shown == [round(rank.causes[cause.label], 3) for cause in Cause]


@pytest.mark.parametrize("balance", [True, False])
def test_shares_by_measured_speed_are_shown_over_time(monitor, balance):
    handle = builder(dataset=400, way=(SYNC, THREAD)).balance(balance).run()
    handle.attach(monitor)
    handle.join(WAIT_S)
    pieces = [rank.piece for rank in handle.statistics().ranks]
    whole = last(monitor)
    assert sum(pieces) == (4 if balance else 0)
    assert [rank["piece"] for rank in whole["now"]["ranks"]] == pieces
    assert whole["ticks"][-1].get("pieces") == (pieces if balance else None)


def between(monkeypatch, before=lambda: None, after=lambda: None):
    """Run hooks around the first call of ``Monitor.watch``; returns the calls."""
    watch, calls = Monitor.watch, []

    def watched(monitor, run):
        calls.append(run)
        first = len(calls) == 1
        if first:
            before()
        watch(monitor, run)
        if first:
            after()

    monkeypatch.setattr(Monitor, "watch", watched)
    return calls


def test_two_threads_that_attach_the_same_monitor_attach_it_once(monitor, monkeypatch):
    gate = Gate()
    handle = builder(train=gate, epochs=2).run()
    other = threading.Thread(target=handle.attach, args=(monitor,))

    def meanwhile():
        other.start()
        other.join(0.1)  # it waits until this one has ended

    calls = between(monkeypatch, before=meanwhile)
    try:
        handle.attach(monitor)
        other.join(WAIT_S)
        assert len(calls) == 1
    finally:
        gate.opened.set()
        handle.join(WAIT_S)


def test_a_run_that_ends_while_it_is_attached_is_released(monitor, monkeypatch):
    gate = Gate()
    handle = builder(train=gate, epochs=2).run()

    def end():
        gate.opened.set()
        handle.join(WAIT_S)

    between(monkeypatch, after=end)
    handle.attach(monitor)
    assert monitor._run is None


def test_pages_follow_a_run_from_its_first_to_its_last_batch(monitor):
    gate = Gate()
    handle = builder(train=gate, epochs=2).run().attach(monitor)
    with open_page(monitor) as one, open_page(monitor) as two:
        for stream in (one, two):
            standing = stream.until(lambda whole: whole["now"] is not None)["now"]
            assert (standing["state"], standing["step"], standing["progress"]) == ("running", 0, 0)
            assert standing["left_s"] is None
        gate.opened.set()
        handle.join(WAIT_S)
        ends = [stream.until(lambda w: w["now"]["state"] == "finished") for stream in (one, two)]
        assert ends[0]["now"] == ends[1]["now"]
    times = [tick["t"] for tick in ends[0]["ticks"]]
    assert times == sorted(times)


def test_a_reloaded_page_gets_the_same_history(monitor):
    handle = builder(train=slow_count, epochs=3, dataset=200).timeline(Timeline()).run()
    handle.attach(monitor)
    with open_page(monitor) as stream:
        first = stream.until(lambda w: len(w["ticks"]) >= 3 and w["epochs"])
        again = history_of(monitor)
    for name in ("ticks", "epochs", "events"):
        assert again[name][: len(first[name])] == first[name]
    handle.join(WAIT_S)
    assert last(monitor)["ticks"][: len(again["ticks"])] == again["ticks"]


def test_a_monitor_attached_late_shows_the_past_of_the_timeline(monitor):
    timeline = Timeline(poll_s=0.01)
    handle = builder(train=slow_count, epochs=2, dataset=200).timeline(timeline).run()
    handle.join(WAIT_S)
    handle.attach(monitor)
    whole = last(monitor)
    assert len(whole["ticks"]) > 10
    samples = [sum(tick["samples"]) for tick in whole["ticks"]]
    assert samples == sorted(samples)
    assert samples[-1] == 400
    for before, after in pairwise(whole["ticks"]):
        assert before["t"] <= after["t"]
        for shown, later in zip(before["causes"], after["causes"], strict=True):
            assert all(b >= a - 2e-3 for a, b in zip(shown, later, strict=True))
            assert sum(shown) == pytest.approx(before["t"], abs=0.05)
    assert whole["ticks"][:-1] == tick_history(timeline)
    assert [epoch["epoch"] for epoch in whole["epochs"]] == [0, 1]


def test_a_monitor_attached_after_the_end_shows_the_end(monitor):
    handle = builder(epochs=2).run()
    state = handle.join(WAIT_S)
    handle.attach(monitor)
    whole = last(monitor)
    assert whole["now"]["state"] == "finished"
    assert [epoch["loss"] for epoch in whole["epochs"]] == [m.avg_loss for m in state.metrics]
    assert whole["now"]["elapsed_s"] < WAIT_S


def test_the_page_shows_the_error_of_a_failed_run(monitor):
    def fit(model, batch):
        raise ValueError("planted\n<b>" + "x" * 10_000)

    handle = builder(train=fit).timeline(Timeline()).run().attach(monitor)
    with pytest.raises(WorkerFailed):
        handle.join(WAIT_S)
    whole = last(monitor)
    assert whole["now"]["state"] == "failed"
    assert whole["now"]["error"].startswith("WorkerFailed: ")
    assert len(whole["now"]["error"]) <= 200
    assert whole["events"][-1]["kind"] == "failed"
    assert any(event["kind"] == "failure" for event in whole["events"])


@pytest.mark.parametrize("recorded", [True, False], ids=["timeline", "alone"])
def test_the_page_shows_the_death_of_a_rank_while_the_others_continue(monitor, recorded):
    gate = Gate()

    def fit(model, batch):
        if current_worker().rank == 1:
            raise ValueError("planted")
        return gate(model, batch)

    b = builder(train=fit, ranks=3).on_worker_failure("continue")
    handle = (b.timeline(Timeline()) if recorded else b).run().attach(monitor)
    with open_page(monitor) as stream:
        # The first snapshot precedes the death, or has it in its counters.
        stream.until(lambda w: w["now"] is not None and not w["now"]["ranks"][1]["alive"])
    gate.opened.set()
    handle.join(WAIT_S)
    whole = last(monitor)
    assert [rank["alive"] for rank in whole["now"]["ranks"]] == [True, False, True]
    assert whole["now"]["state"] == "finished"
    if recorded:
        shown = next(event for event in whole["events"] if event["kind"] == "failure")
        assert (shown["rank"], shown["args"]["error"]) == (1, "ValueError: planted")


def test_the_page_shows_that_a_run_was_stopped(monitor):
    gate = Gate()
    handle = builder(train=gate, epochs=50).run().attach(monitor)
    gate.await_entry()
    handle.stop()
    gate.opened.set()
    assert handle.join(WAIT_S).stopped
    assert last(monitor)["now"]["state"] == "stopped"


def test_hostile_names_are_escaped_in_the_stream(monitor):
    handle = run_hostile(Timeline()).attach(monitor)
    handle.join(WAIT_S)
    with open_page(monitor) as stream:
        whole = stream.until(over)
        raw = b"".join(stream.raw)
    assert raw.isascii()
    data = [line for line in raw.splitlines() if line.startswith(b"data: ")]
    assert not any(set(b"<>&\r") & set(line) for line in data)
    names = [name for name, _ in whole["epochs"][0]["scalars"]]
    measured = {"divergence", "param_norm", "learning_rate"}  # where there was a round
    assert len(names) == len(set(names))
    assert len(set(names) - measured) == len(HOSTILE) + 1
    assert all(name.isprintable() and len(name) <= 200 for name in names)
    assert dict(whole["epochs"][0]["scalars"])["broken"] is None
    assert whole["now"]["model"].startswith("</script><script>")


# -- several runs, and none --------------------------------------------------------------------


def test_one_monitor_shows_one_run_after_the_other(monitor):
    first = builder(epochs=2).run().attach(monitor)
    first.join(WAIT_S)
    with open_page(monitor) as stream:
        assert len(stream.until(over)["epochs"]) == 2
        gate = Gate()
        second = builder(train=gate, epochs=3).run().attach(monitor)
        fresh = stream.until(lambda w: w["facts"]["num_epochs"] == 3)
        assert fresh["epochs"] == []
        third = builder().run()
        with pytest.raises(ValueError, match="another run that is still running"):
            third.attach(monitor)
        gate.opened.set()
        second.join(WAIT_S)
        assert len(stream.until(over)["epochs"]) == 3
    third.join(WAIT_S)


def test_attaching_the_same_monitor_again_changes_nothing(monitor):
    gate = Gate()
    handle = builder(train=gate).run().attach(monitor).attach(monitor)
    gate.opened.set()
    handle.join(WAIT_S)
    handle.attach(monitor)
    assert [event["kind"] for event in last(monitor)["events"]].count("finished") == 1


def test_a_run_may_have_several_monitors(monitor):
    with Monitor(poll_s=POLL_S) as other:
        handle = builder().run().attach(monitor).attach(other)
        handle.join(WAIT_S)
        assert last(monitor)["now"]["step"] == last(other)["now"]["step"] == 10


def test_attaching_anything_but_an_open_monitor_raises():
    handle = builder().run()
    with pytest.raises(TypeError, match=r"pass a gpuworker\.Monitor"):
        handle.attach(8080)
    closed = Monitor()
    closed.close()
    with pytest.raises(RuntimeError, match="closed: create a new one"):
        handle.attach(closed)
    handle.join(WAIT_S)


def test_a_monitor_may_be_closed_during_the_run():
    gate = Gate()
    with Monitor(poll_s=POLL_S) as monitor:
        handle = builder(train=gate).timeline(Timeline()).run().attach(monitor)
        gate.await_entry()
    gate.opened.set()
    assert not handle.join(WAIT_S).stopped


# -- the run is not harmed ---------------------------------------------------------------------


def test_a_failing_monitor_logs_once_and_continues(monitor, monkeypatch, caplog):
    readings, read = [], RunReader.read

    def broken(self):
        readings.append(1)
        if len(readings) <= 3:
            raise ZeroDivisionError("planted")
        return read(self)

    monkeypatch.setattr(RunReader, "read", broken)
    gate = Gate()
    with caplog.at_level(logging.ERROR, "runtime.monitor"):
        handle = builder(train=gate).run().attach(monitor)
        with open_page(monitor) as stream:
            stream.until(lambda whole: whole["now"] is not None)
        gate.opened.set()
        handle.join(WAIT_S)
        assert last(monitor)["now"]["state"] == "finished"
    assert len(readings) > 3
    assert len(re.findall("the monitor failed", caplog.text)) == 1


def test_the_end_is_shown_at_once_with_a_long_poll_interval():
    gate = Gate()
    with Monitor(poll_s=3600) as monitor:
        handle = builder(train=gate).run().attach(monitor)
        with open_page(monitor) as stream:
            stream.until(lambda whole: whole["now"] is not None)
            gate.opened.set()
            handle.join(WAIT_S)
            assert stream.until(over)["now"]["state"] == "finished"


def test_a_failing_request_is_logged_once(monitor, monkeypatch, caplog):
    def broken(folder, name):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(page_module, "asset", broken)
    for _ in range(3):
        status, _, body = request(monitor, "/monitor.css")
        assert status == 500
        assert b"planted" not in body
    assert len(re.findall("the monitor failed", caplog.text)) == 1
    assert request(monitor)[0] == 200


def test_a_page_that_reads_nothing_delays_neither_run_nor_other_pages(monitor):
    with socket.create_connection(("127.0.0.1", monitor.port), timeout=WAIT_S) as sock:
        sock.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        handle = builder(train=slow_count, dataset=100, epochs=3).timeline(Timeline()).run()
        handle.attach(monitor).join(WAIT_S)
        assert last(monitor)["now"]["state"] == "finished"


def test_a_monitor_holds_no_reference_to_an_ended_run():
    models = []

    def model(device):
        built = Counter()
        models.append(weakref.ref(built))
        return built

    with Monitor(poll_s=POLL_S) as monitor:
        handle = builder(model=model).timeline(Timeline()).run().attach(monitor)
        handle.join(WAIT_S)
        assert last(monitor)["now"]["state"] == "finished"
        gone = weakref.ref(handle)
        del handle
        gc.collect()
        assert [ref() for ref in models] == [None, None]
        assert gone() is None


# -- the page as a file ------------------------------------------------------------------------


def test_the_page_can_be_saved_as_one_file(tmp_path):
    with Monitor(poll_s=POLL_S) as monitor:
        run_hostile(Timeline()).attach(monitor).join(WAIT_S)
        whole = last(monitor)
    monitor.save_html(tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*)</script>', text)[1]
    assert json.loads(data)["epochs"] == whole["epochs"]
    assert text.count("<script") == text.count("</script>") == 3
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.search(r"<script src|<link rel=.stylesheet", text)


# -- parts ---------------------------------------------------------------------------------------


def test_the_feed_is_bounded():
    feed = Feed()
    feed.begin({})
    for number in range(3000):
        feed.add({"n": number}, [{"t": number}], [{"epoch": number}], [{"kind": str(number)}])
    whole = json.loads(feed.history())
    assert whole["now"] == {"n": 2999}
    assert len(whole["ticks"]) <= 601
    assert len(whole["epochs"]) <= 1001
    assert [event["kind"] for event in whole["events"]] == [str(n) for n in range(2800, 3000)]


def test_a_page_that_falls_behind_gets_the_history():
    async def play():
        viewer = Viewer(lambda: b"all")
        assert await viewer.next() == b"all"
        for number in range(MAX_WAITING):
            viewer.put(b"%d" % number)
        assert await viewer.next() == b"0"
        for _ in range(3):
            viewer.put(b"more")
        viewer.close()
        return [await viewer.next(), await viewer.next()]

    assert asyncio.run(play()) == [b"all", None]


def test_a_viewer_waits_for_messages():
    async def play():
        viewer = Viewer(lambda: b"all")
        assert await viewer.next() == b"all"
        waiting = asyncio.create_task(viewer.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        viewer.put(b"news")
        return await asyncio.wait_for(waiting, WAIT_S)

    assert asyncio.run(play()) == b"news"


@pytest.mark.parametrize("closed", [False, True])
def test_the_saved_page_of_an_ended_run_shows_its_end(closed, tmp_path):
    """Also with a long poll interval, directly after join()."""
    with Monitor(poll_s=60.0) as monitor:
        gate, busy = threading.Event(), threading.Event()

        def dawdle():
            busy.set()
            assert gate.wait(WAIT_S)

        running = Gate()
        handle = builder(train=running, epochs=2).run().attach(monitor)
        running.await_entry()
        monitor._server._call_soon(dawdle)
        assert busy.wait(WAIT_S)
        running.opened.set()
        handle.join(WAIT_S)
        threading.Timer(0.1, gate.set).start()  # a page saved earlier lacks the end
        if closed:
            monitor.close()
        monitor.save_html(tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert '"state":"finished"' in text
    assert '"state":"running"' not in text
