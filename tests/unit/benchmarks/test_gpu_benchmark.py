"""The GPU benchmark without a GPU: its dry run, and its handling of failing sections."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.bench import (
    GRACE_S,
    RESERVE_S,
    Bench,
    Rates,
    Report,
    Row,
    Section,
    SectionResult,
    Supervisor,
    SystemFailed,
    budgets,
    interleaved,
    run_here,
    run_section,
    section_table,
    summary,
)
from benchmarks.gpu.models import StepClock
from benchmarks.gpu.sections import smaller_of
from benchmarks.harness import environment

pytestmark = pytest.mark.slow

# Module run by the process of the sections in the tests below. It starts without PyTorch.
TABLE = """
import os, threading
from benchmarks.gpu.bench import Section

def facts():
    return {"gpu": "Test GPU 9000"}

def good(bench):
    bench.row("ratio", 1.5, target=1.0)
    bench.raw("rates", [1.0, 2.0, float("nan")])

def bad(bench):
    bench.row("before", 1.0)
    raise ValueError("the reason")

def hangs(bench):
    bench.row("before", 2.0)
    threading.Event().wait()

def dies(bench):
    bench.row("before", 3.0)
    os._exit(7)

SECTIONS = [
    Section(name=run.__name__, title=run.__name__, seconds=1.0, run=run)
    for run in (good, bad, hangs, dies)
]
"""


def nothing(bench):
    pass


def section(name, run=nothing, seconds=10.0, **kwargs):
    return Section(name=name, title=name, seconds=seconds, run=run, **kwargs)


def report(**kwargs):
    return Report(date="2030-01-02", dry=False, minutes=8.0, **kwargs)


def raising(error):
    def run(bench):
        raise error

    return run


# -- figures and targets ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figure", "at_most", "met"),
    [
        (0.97, False, True),
        (0.969, False, False),
        (0.96, True, True),
        (0.98, True, False),
        (None, False, False),
        (None, True, False),
    ],
)
def test_a_target_is_met_at_its_bound_and_never_without_a_figure(figure, at_most, met):
    row = Row(name="x", figure=figure, target=0.97, at_most=at_most)
    assert row.met is met


def test_a_figure_without_a_target_has_no_verdict():
    assert Row(name="x", figure=0.1).met is None


def test_the_file_is_strict_json_under_the_name_of_the_gpu_and_the_day(tmp_path):
    result = SectionResult(name="a", title="A", status="done")
    result.apply({"type": "raw", "name": "rates", "values": [1.0, math.nan]})
    result.apply({"type": "row", "row": vars(Row(name="r", figure=2.0, target=1.0))})
    whole = report(facts={"gpu": "NVIDIA H200"}, sections=[result])
    path = whole.write(tmp_path / "new")
    assert path.name == "nvidia-h200-2030-01-02.json"
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert found["sections"][0]["raw"] == {"rates": [1.0, None]}
    assert found["sections"][0]["rows"][0]["met"] is True
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_the_tables_show_verdicts_and_the_reason_for_an_unfinished_section():
    result = SectionResult(name="a", title="A", status="failed", reason="no luck")
    result.rows = [
        Row(name="good", figure=1.0, target=0.9),
        Row(name="bad", figure=0.5, target=0.9),
        Row(name="reported", figure=3.0, unit="GB/s"),
    ]
    result.raw = {"worker, samples/s": [1.0, 9.0, 2.0]}
    table = section_table(result)
    assert "| good | 1 | >= 0.9 | met |" in table
    assert "| bad | 0.5 | >= 0.9 | MISSED |" in table
    assert "| reported | 3 GB/s |  |  |" in table
    assert "worker, samples/s: median 2 of 3" in table
    text = summary(report(facts={"gpu": "G"}, sections=[result]))
    assert "gpu G" in text
    assert "| a | bad | 0.5 | >= 0.9 | MISSED |" in text
    assert "| a | failed: no luck |" in text
    assert "reported" not in text


@pytest.mark.parametrize("status", ["failed", "timed out", "died", "not run", "running"])
def test_a_report_is_complete_only_if_every_section_ended(status):
    done = SectionResult(name="a", title="A", status="done")
    skipped = SectionResult(name="b", title="B", status="skipped")
    assert report(sections=[done, skipped]).complete
    other = SectionResult(name="c", title="C", status=status)
    assert not report(sections=[done, other]).complete


# -- rounds ---------------------------------------------------------------------------------


def bench(seconds=60.0, messages=None):
    sink = [] if messages is None else messages
    return Bench(dry=True, seconds=seconds, emit=sink.append)


def counting(calls, name, rate=1.0):
    def run():
        calls.append(name)
        return rate

    return run


def test_rounds_are_interleaved_and_every_other_one_is_reversed():
    calls = []
    systems = {name: counting(calls, name) for name in "abc"}
    interleaved(bench(), systems, rounds=3, unit="1/s")
    assert "".join(calls) == "abccbaabc"


def test_a_ratio_is_the_median_of_the_rounds_pairs():
    values = {"a": iter([2.0, 30.0, 4.0]), "b": iter([1.0, 1.0, 1.0])}
    systems = {name: lambda name=name: next(values[name]) for name in "ab"}
    rates = interleaved(bench(), systems, rounds=3, unit="1/s")
    assert rates.ratio("a", "b") == 4.0


def test_no_round_begins_that_the_budget_has_no_room_for():
    calls, messages = [], []
    rates = interleaved(bench(0.0, messages), {"a": counting(calls, "a")}, rounds=3, unit="1/s")
    assert calls == ["a"]
    assert rates.median("a") == 1.0
    assert {"type": "note", "text": "1 of 3 rounds: the time is up"} in messages


def test_a_system_that_fails_leaves_the_others_their_rounds():
    calls = []

    def broken():
        calls.append("x")
        raise AttributeError("no such method")

    systems = {"x": broken, "a": counting(calls, "a")}
    rates = interleaved(bench(), systems, rounds=2, unit="1/s")
    assert calls == ["x", "a", "a"]
    assert rates.ratio("x", "a") is None
    rates.require(["a"])
    with pytest.raises(SystemFailed, match="x: AttributeError: no such method"):
        rates.require(["a", "x"])


# -- parts of the rates -------------------------------------------------------------------


def clock_of(*epochs, num_edge_steps=2):
    clock = StepClock(None, num_edge_steps)
    clock.epochs = [list(stamps) for stamps in epochs]
    return clock


def test_a_steps_time_excludes_the_ends_of_epochs_which_are_returned_separately():
    """The first two steps of an epoch come at once: the device has nothing to do."""
    warm_up = [0.0, 50.0, 100.0, 200.0]
    first = [300.0, 300.0, 300.0, 302.0, 304.0]  # two steps of 2 s
    second = [314.0, 314.0, 314.0, 316.0, 318.0, 324.0]
    clock = clock_of(warm_up, first, second)
    assert clock.step_s() == (4.0 + 10.0) / 5
    assert clock.ends_s() == [pytest.approx(14.0 - 5 * 2.8)]
    assert clock_of(warm_up, first).step_s() == 2.0


def test_epochs_without_an_interior_are_refused():
    with pytest.raises(ValueError, match="no epoch has 4 steps"):
        clock_of([0.0], [1.0, 2.0, 3.0]).step_s()


def test_a_clock_notes_each_step_of_each_epoch():
    clock = StepClock(lambda model, batch: batch, 0)
    for epoch, num_steps in enumerate((2, 3)):
        clock.begin(epoch, None)
        assert [clock(None, step) for step in range(num_steps)] == list(range(num_steps))
    assert [len(stamps) for stamps in clock.epochs] == [2, 3]


def test_the_attainable_rate_is_the_smaller_rate_of_each_round():
    rates = Rates(values={"copy": [1.0, 5.0, 3.0], "gather": [2.0, 4.0]})
    assert smaller_of(rates, "copy", "gather") == [1.0, 4.0]


# As PyTorch 2.11 and later read them.
RECORDER_SIZES = ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"]


@pytest.mark.parametrize("name", [None, *RECORDER_SIZES])
def test_the_flight_recorder_is_off_unless_the_user_has_set_it(monkeypatch, name):
    for other in RECORDER_SIZES:
        monkeypatch.delenv(other, raising=False)
    if name is not None:
        monkeypatch.setenv(name, "77")
    found = {key: value for key, value in environment().items() if key in RECORDER_SIZES}
    assert found == (dict.fromkeys(RECORDER_SIZES, "0") if name is None else {name: "77"})


# -- one section --------------------------------------------------------------------------


def test_a_failed_section_is_recorded_and_the_others_still_run():
    whole, seen = report(), []
    sections = [
        section("bad", raising(ValueError("the reason"))),
        section("cuda", raising(AssertionError), needs_cuda=True),
        section("good", lambda b: b.row("x", 1.0, target=2.0)),
    ]
    run_here(sections, whole, seconds=60.0, changed=seen.append)
    bad, cuda, good = whole.sections
    assert (bad.status, bad.reason) == ("failed", "ValueError: the reason")
    assert "in run\n" in bad.traceback
    assert (cuda.status, cuda.reason) == ("skipped", "needs CUDA")
    assert good.status == "done"
    assert good.rows[0].target is None  # a dry run has no targets
    assert seen == whole.sections
    assert not whole.complete


def test_warnings_of_the_packages_become_notes():
    import logging

    def warns(bench):
        logging.getLogger("runtime.data.prefetch").warning("depth %d", 3)

    result = SectionResult(name="a", title="A")
    assert run_section(section("a", warns), dry=True, seconds=1.0, emit=result.apply)
    assert result.notes == ["runtime.data.prefetch: depth 3"]
    assert not logging.getLogger("runtime").handlers


# -- time -----------------------------------------------------------------------------------


def test_time_is_divided_by_plan_and_never_exceeds_the_time_left():
    plan = [section("a", seconds=10.0), section("b", seconds=30.0)]
    assert budgets(plan, 1000.0) == (15.0, 22.5 + GRACE_S)
    assert budgets(plan, 20.0) == (5.0, 7.5 + GRACE_S)
    assert budgets(plan, 4.0) == (1.0, 4.0)
    assert budgets(plan[1:], 4.0) == (4.0, 4.0)


def test_a_dry_run_omits_sections_without_time_left():
    whole = report()
    run_here([section("a", raising(AssertionError))], whole, seconds=0.0, changed=nothing)
    assert (whole.sections[0].status, whole.sections[0].reason) == ("not run", "no time was left")


# -- the process of the sections ----------------------------------------------------------


class Runs:
    """Runs sections of ``TABLE`` in a process of their own."""

    def __init__(self, tmp_path, monkeypatch):
        (tmp_path / "table_of_the_test.py").write_text(TABLE)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        self.out = tmp_path / "out"
        self.statuses = []

    def __call__(self, sections, seconds=60.0, between=nothing):
        whole = report()

        def changed(result):
            if result is not None:
                between(supervisor)
            path = whole.write(self.out)
            if result is not None:  # the file on the disk at the end of a section
                found = json.loads(path.read_text())["sections"]
                self.statuses.append([s["status"] for s in found])

        begin = time.monotonic()
        supervisor = Supervisor(
            sections,
            whole,
            table="table_of_the_test",
            deadline=begin + RESERVE_S + seconds,
            changed=changed,
        )
        supervisor.run()
        assert time.monotonic() - begin < RESERVE_S + seconds
        return whole


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.bench.GRACE_S", 0.5)
    monkeypatch.setattr("benchmarks.gpu.bench.LEAST_S", 0.5)
    return Runs(tmp_path, monkeypatch)


def test_whatever_a_section_does_the_others_run_and_results_are_kept(runs):
    names = ["bad", "dies", "good", "hangs", "good"]
    plan = [section(name, seconds=0.6 if name == "hangs" else 10.0) for name in names]
    whole = runs(plan)
    bad, died, good, hung, last = whole.sections
    assert bad.status == "failed"
    assert "ValueError: the reason" in bad.traceback
    assert (died.status, died.reason) == ("died", "its process ended with 7")
    assert hung.status == "timed out"
    assert "in hangs" in hung.traceback
    assert [r.rows[0].figure for r in (bad, died, hung)] == [1.0, 3.0, 2.0]
    assert (good.status, last.status) == ("done", "done")
    assert good.raw == {"rates": [1.0, 2.0, None]}
    assert whole.facts == {"gpu": "Test GPU 9000"}
    states = ["failed", "died", "done", "timed out", "done"]
    assert runs.statuses == [states[: i + 1] + ["not run"] * (4 - i) for i in range(5)]
    assert (runs.out / "test-gpu-9000-2030-01-02.json").exists()


def test_a_process_that_dies_between_two_sections_fails_the_second_one(runs):
    def kill_once(supervisor):
        if len(runs.statuses) == 0:
            supervisor._child._process.kill()
            supervisor._child._process.wait(10)

    whole = runs([section("good"), section("good"), section("good")], between=kill_once)
    assert [s.status for s in whole.sections] == ["done", "died", "done"]


def test_the_run_ends_at_the_deadline_and_names_the_omitted_sections(runs):
    whole = runs([section("hangs", seconds=1000.0), section("good", seconds=1.0)], 2.0)
    hung, left = whole.sections
    assert hung.status == "timed out"
    assert (left.status, left.reason) == ("not run", "no time was left")


def test_a_process_that_cannot_start_is_reported_with_its_last_output(runs, tmp_path):
    (tmp_path / "table_of_the_test.py").write_text("import no_such_module")
    whole = runs([section("good")])
    assert whole.sections[0].status == "died"
    assert "No module named 'no_such_module'" in whole.sections[0].traceback


# -- the whole ----------------------------------------------------------------------------


@pytest.fixture
def one_thread():
    """Models of a few parameters are slower with more workers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_dry_run_runs_every_section_and_writes_only_to_the_given_folder(tmp_path, capsys):
    out = tmp_path / "out"
    assert gpu.main(["--dry-run", "--out", str(out)]) == 0
    (path,) = out.iterdir()
    found = json.loads(path.read_text())
    assert found["dry"] is True
    statuses = {s["name"]: (s["status"], s["reason"]) for s in found["sections"]}
    skipped = {name for name, state in statuses.items() if state == ("skipped", "needs CUDA")}
    assert skipped == {"graphs", "memory"}
    assert {statuses[name] for name in statuses.keys() - skipped} == {("done", "")}
    for one in found["sections"]:
        if one["name"] not in skipped:
            assert one["rows"], one["name"]
            assert all(row["figure"] is not None for row in one["rows"]), one["name"]
    assert "a dry run: figures mean nothing" in capsys.readouterr().out


def test_a_dry_run_without_a_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    assert gpu.main(["--dry-run", "--sections", "crowd"]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_the_message_names_the_dry_run(capsys):
    assert gpu.main([]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_an_unknown_section_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--sections", "nonsense"])
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err
