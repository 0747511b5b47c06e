"""The benchmark of a timeline's parts runs, on the workers as they are."""

from __future__ import annotations

from benchmarks import timeline_cost


def test_every_part_has_a_cost(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["timeline_cost.py", "--count", "50", "--readings", "1"])
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)  # would hold for all tests
    timeline_cost.main()
    printed = capsys.readouterr().out
    costs = [line.split("|")[2].split() for line in printed.splitlines() if line.endswith("s |")]
    assert [unit for _, unit in costs] == ["ns", "ns", "ns", "us", "us"]
    assert all(float(cost) > 0 for cost, _ in costs[1:])  # a step's is a small difference
