"""Progress of a run: means over the last seconds, and the lines shown off a terminal."""

from __future__ import annotations

import math
import re
import threading
from dataclasses import replace

import pytest

from coordinator import CoordinatorConfig
from coordinator.machine import Coordinator
from coordinator.metrics import EpochMetrics, ReportStats
from runtime.loggers import progress
from runtime.loggers.progress import ProgressLines, duration_text, make_display
from runtime.timeline.recent_progress import RecentProgress
from tests.support.running import WAIT_S, builder


def machine():
    config = CoordinatorConfig(devices=("cpu",), num_samples=100, batch_size=1, num_epochs=2)
    return Coordinator(config)


class Counters:
    """Counters of a run of 200 batches, and the clock at which they are read."""

    def __init__(self):
        self.now = 0.0
        self.statistics = machine().statistics()
        self.recent = RecentProgress(
            lambda: self.statistics, total=200, num_epochs=2, clock=lambda: self.now
        )

    def trained(self, num_batches, loss, seconds, *, read=True):
        """Train batches of 10 samples with this loss."""
        before, samples = self.statistics, 10 * num_batches
        (rank,) = before.ranks
        finite = math.isfinite(loss)
        self.now += seconds
        self.statistics = replace(
            before,
            num_trained=before.num_trained + num_batches,
            ranks=(replace(rank, num_samples=rank.num_samples + samples),),
            loss_sum=before.loss_sum + loss * samples * finite if finite else before.loss_sum,
            loss_weight=before.loss_weight + samples * finite,
        )
        return self.recent.read() if read else None


def test_start_up_does_not_count_as_training():
    counters = Counters()
    for _ in range(20):
        counters.trained(0, math.nan, 1.0)
    now = counters.trained(10, 3.0, 1.0)
    assert (now.loss, now.rate, now.left_s) == (3.0, 100.0, 19.0)


def test_loss_and_rate_are_those_of_the_last_seconds():
    counters = Counters()
    for _ in range(30):
        counters.trained(1, 9.0, 1.0)
    for _ in range(11):
        now = counters.trained(4, 1.0, 1.0)
    assert (now.loss, now.rate) == (1.0, 40.0)


def test_the_last_values_stay_while_nothing_is_trained():
    counters = Counters()
    counters.trained(10, 2.0, 1.0)
    for _ in range(30):
        now = counters.trained(0, math.nan, 1.0)
    assert now.loss == 2.0
    assert now.rate == pytest.approx(10.0, abs=2)  # over the last ten seconds with training


def test_a_loss_that_is_not_finite_is_shown_and_forgotten_later():
    counters = Counters()
    assert math.isnan(counters.trained(1, math.nan, 1.0).loss)
    for _ in range(12):
        now = counters.trained(1, 5.0, 1.0)
    assert now.loss == 5.0


def test_the_coordinator_adds_up_finite_losses_of_reports():
    run = machine().run_state
    run.note_losses(ReportStats(num_samples=2, loss_sum=6.0, loss_samples=2))
    run.note_losses(ReportStats(num_samples=2, loss_sum=math.inf, loss_samples=2))
    run.note_losses(ReportStats(num_samples=1, loss_sum=2.0, loss_samples=1))
    assert (run.statistics().loss_sum, run.statistics().loss_weight) == (8.0, 3.0)


def lines_of(caplog):
    return [record.getMessage() for record in caplog.records]


def test_between_epochs_a_line_names_loss_speed_and_time_left(caplog):
    counters = Counters()
    lines = ProgressLines(counters.recent, total=200)
    with caplog.at_level("INFO", logger="runtime.loggers.progress"):
        lines.refresh()  # nothing was trained yet
        counters.trained(50, 0.25, 10.0)
        lines.refresh()
    assert lines_of(caplog) == ["epoch 0: loss 0.25, 50 samples/s, 25% of the run, 30 s left"]


def epoch_metrics(scalars):
    return EpochMetrics(
        epoch=3,
        avg_loss=0.123456,
        scalars=scalars,
        per_rank=(),
        epoch_s=200.0,
        num_samples=60_000,
        num_retrained=0,
        num_skipped=0,
        num_averagings=1,
        per_rank_throughput=(),
        per_rank_batch_share=(),
        devices=(),
    )


def line_of_epoch(scalars, caplog):
    """The line of an epoch with these scalars."""
    with caplog.at_level("INFO", logger="runtime.loggers.progress"):
        ProgressLines(Counters().recent, total=200).epoch_closed(epoch_metrics(scalars))
    (line,) = lines_of(caplog)
    return line


def test_the_line_of_an_epoch_has_its_scalars_as_far_as_they_fit(caplog):
    scalars = {f"scalar_number_{n}": 1.0 for n in range(9)}
    scalars |= {"short": 2.0, "val/loss": 0.5}
    line = line_of_epoch(scalars, caplog)
    assert line.startswith("epoch 3: loss 0.1235, val/loss 0.5, short 2;")
    assert line.endswith("; 60,000 samples in 3 min 20 s")
    assert len(line) < 80


def test_metrics_of_evaluations_are_shown_whatever_their_length(caplog):
    scalars = {f"val/{name}": 0.123456 for name in ("loss", "top_1_accuracy", "top_5_accuracy")}
    line = line_of_epoch(scalars, caplog)
    assert all(f", {name} 0.1235" in line for name in scalars)


def test_after_short_epochs_a_line_has_the_mean_of_the_last_of_them(caplog):
    counters = Counters()
    lines = ProgressLines(counters.recent, total=200)
    for loss in (9.0, 9.0, 9.0, 1.0):
        counters.trained(10, loss, 5.0, read=False)
        lines.epoch_closed(epoch_metrics({}))
    counters.trained(10, 1.0, 5.0, read=False)
    with caplog.at_level("INFO", logger="runtime.loggers.progress"):
        lines.refresh()
    assert "loss 1," in lines_of(caplog)[-1]


def test_a_long_epoch_has_lines_before_its_end(caplog, monkeypatch):
    caplog.set_level("INFO", logger="runtime.loggers.progress")
    lines, seen = [], threading.Event()

    def announce(log, text):
        lines.append(text)
        seen.set()

    monkeypatch.setattr(progress, "announce", announce)
    monkeypatch.setattr(ProgressLines, "refresh_s", 0.01)
    handle = builder(dataset=10**7, ranks=1).run()
    assert seen.wait(WAIT_S)
    handle.stop()
    handle.join(WAIT_S)
    assert re.fullmatch(
        r"epoch 0: loss -?[\d.e+]+, [\d,]+ samples/s, 0% of the run, .*left", lines[0]
    )


def test_nothing_is_displayed_with_progress_off():
    assert make_display(False, machine().statistics, 10, 1) is None


def test_lines_without_a_handler_are_not_formatted(monkeypatch):
    monkeypatch.setattr(progress, "is_announced", lambda log: False)
    assert make_display(True, machine().statistics, 10, 1) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.2 s"), (42, "42 s"), (80, "80 s"), (200, "3 min 20 s"), (7300, "2 h 1 min")],
)
def test_durations_are_short(seconds, text):
    assert duration_text(seconds) == text
