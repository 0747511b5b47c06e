"""``make first-contact`` with cases that hang, die and fail: the others run, all are recorded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import first_contact
from tests.gpu.contact_record import Record
from tests.gpu.probes import EXCHANGES, KINDS, pairs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PLANTED = ("--parts-from", "tests.support.planted_contact")


def run(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.first_contact", "--out", str(out), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )


def results_of(out: Path) -> dict[str, str]:
    lines = Record(out).lines()
    return {f"{e['part']}/{e['case']}": e["result"] for e in lines if e["event"] == "end"}


@pytest.mark.timeout(300)
def test_a_case_that_hangs_dies_or_fails_is_recorded_and_the_others_run(tmp_path, monkeypatch):
    # A debugger takes long to read the libraries; this one stands in for it.
    (tmp_path / "py-spy").write_text('#!/bin/sh\necho "native stack of $4"\n')
    (tmp_path / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    done = run(
        tmp_path, *PLANTED, "--parts", "hangs", "troubled", "last", "--case", "1", "--total", "200"
    )
    assert done.returncode == 1, done.stderr
    assert results_of(tmp_path) == {
        "hangs/waits": "hung",
        "hangs/after it": "passed",
        "troubled/fails": "failed",
        "troubled/begins anew": "passed",
        "troubled/dies": "died",
        "troubled/refuses": "not run",
        "troubled/passes": "passed",
        "last/passes": "passed",
    }
    log = (tmp_path / "log.txt").read_text()
    assert "native stack of" in log
    assert "wait_for_ever" in log  # by faulthandler
    assert "not run, there is no such device: troubled/refuses" in done.stdout
    assert "died: troubled/dies: the process died of SIGKILL" in done.stdout
    figures = [e.get("figures") for e in Record(tmp_path).lines("last") if e["event"] == "end"]
    assert figures == [{"answer": 42}]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("options", "case", "message"),
    [
        ("last --total 0", "last/*", "no time was left"),
        ("last --cases none", "last/*", "not run, no case matches: last/*"),
        (  # cut off, which is no hang
            "hangs --cases waits --limit hangs=4 --case 90",
            "hangs/waits",
            "the time of its part was over",
        ),
    ],
)
def test_cases_that_were_not_run_are_named_and_do_not_fail_the_run(
    options, case, message, tmp_path
):
    done = run(tmp_path, *PLANTED, "--parts", *options.split())
    assert done.returncode == 0
    assert results_of(tmp_path) == {case: "not run"}
    assert message in done.stdout


def test_an_earlier_record_is_kept_beside_the_new_one(tmp_path):
    record = Record(tmp_path)
    record.begin("facts", "software")
    record.clear()
    assert record.lines() == []
    assert "software" in (tmp_path / "record.jsonl.before").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parts", "fact"], "--parts fact: pass some of facts,"),
        (["--limit", "facts"], "--limit facts: pass PART=SECONDS"),
        (["--limit", "x=3"], "--limit x=3: pass PART=SECONDS, of facts,"),
    ],
)
def test_parts_and_limits_that_do_not_exist_are_refused(arguments, words, capsys):
    with pytest.raises(SystemExit):
        first_contact.parse_args(arguments)
    assert words in capsys.readouterr().err


def test_limits_are_arguments():
    options = first_contact.parse_args(["--limit", "train=20", "speed=5", "--total", "60"])
    assert (options.limits["train"], options.limits["speed"], options.total) == (20, 5, 60)
    assert options.limits["facts"] == first_contact.LIMITS_S["facts"]


def test_every_call_is_made_in_every_mode_and_each_occurs_early():
    order = pairs()
    assert sorted(order) == sorted((mode, kind) for mode in EXCHANGES for kind in KINDS)
    soon = order[: max(len(KINDS), len(EXCHANGES))]
    assert {mode for mode, _ in soon} == set(EXCHANGES)
    assert len({kind for _, kind in soon}) >= len(KINDS) - 1
