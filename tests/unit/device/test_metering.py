"""The time that reading the data adds to the steps, in a worker's report."""

from __future__ import annotations

import pytest

from runtime.device.metering import StepMeter, ValueLog


def wait_of(loads, compute_s, *, ahead, num_batches=2, num_empty=0):
    """The reported wait of batches with these reading times."""
    meter = StepMeter(ValueLog())
    for seconds in loads:
        meter.add_load(seconds, ahead=ahead)
    meter.add(num_batches, 10, compute_s)
    meter.add_empty(num_empty)
    return meter.take().data_wait_s


@pytest.mark.parametrize(("compute_s", "wait_s"), [(2.0, 6.0), (7.0, 1.0), (8.0, 0.0), (99.0, 0.0)])
def test_of_reads_ahead_the_part_above_the_compute_time_counts(compute_s, wait_s):
    assert wait_of((3.0, 5.0), compute_s, ahead=True) == pytest.approx(wait_s)


def test_reads_of_trained_batches_count_once_they_are_timed():
    assert wait_of((3.0, 5.0), 1.0, ahead=False) == pytest.approx(8.0)
    assert wait_of((4.0, 4.0, 4.0), 0.0, ahead=False) == pytest.approx(8.0)  # one for a later step
    assert wait_of((4.0, 4.0), 2.0, ahead=True, num_empty=3) == pytest.approx(6.0)
    assert wait_of((), 1.0, ahead=False) is None
    assert wait_of((1.0,), 0.0, ahead=True, num_batches=0) is None


def test_each_report_has_its_own_reads():
    meter = StepMeter(ValueLog())
    meter.add_load(9.0, ahead=False)
    meter.add(1, 5, 1.0)
    meter.take()
    meter.add_load(2.0, ahead=False)
    meter.add(1, 5, 1.0)
    assert meter.take().data_wait_s == pytest.approx(2.0)
