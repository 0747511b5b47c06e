"""The convergence benchmark's judged results as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEAD = (
    "| mode | held-out loss | accuracy | time (s) | averagings | idle | "
    "loss less solo at the global batch | | loss less solo at the small batch |",
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: |",
)


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}"


def _spread(found: Mapping[str, Any], digits: int) -> str:
    text = _number(found["mean"], digits)
    return text if found["sd"] is None else f"{text} ± {_number(found['sd'], digits)}"


def _difference(found: Mapping[str, Any] | None, digits: int) -> str:
    if found is None:
        return ""
    text = f"{found['mean']:+.{digits}f}"
    return text if found["se"] is None else f"{text} ± {_number(found['se'], digits)}"


def _accuracy(row: Mapping[str, Any]) -> str:
    found = row["measures"].get("accuracy")
    if found is None:
        return ""
    percent = {key: found[key] and found[key] * 100 for key in ("mean", "sd")}
    text = f"{_spread(percent, 2)} %"
    against = found.get("against_global")
    return f"{text} (worse)" if against and against["verdict"] == "worse" else text


def _row(row: Mapping[str, Any], digits: int) -> str:
    loss = row["measures"]["loss"]
    against = loss.get("against_global")
    verdict = "" if against is None else against["verdict"]
    cells = [
        row["mode"],
        _spread(loss, digits),
        _accuracy(row),
        _spread(row["train_s"], 1),
        f"{row['num_averagings']['mean']:.0f}",
        f"{row['idle_share']['mean']:.0%}",
        _difference(against, digits),
        "**worse**" if verdict == "worse" else verdict,
        _difference(loss.get("against_small"), digits),
    ]
    return "| " + " | ".join(cells) + " |"


def model_table(found: Mapping[str, Any]) -> str:
    """The modes of one model."""
    smallest = min((row["measures"]["loss"]["mean"] for row in found["rows"]), default=1.0)
    digits = 6 if smallest < 0.005 else 5 if smallest < 0.05 else 4
    return "\n".join([*HEAD, *(_row(row, digits) for row in found["rows"])])


def markdown(report: Mapping[str, Any]) -> str:
    """The whole report.

    Args:
        report: What ``judge`` gave, with ``machine``, ``settings`` and each model's
            ``definition`` and ``missing`` added.
    """
    machine = report["machine"]
    lines = [
        "# Held-out quality of averaged training",
        "",
        f"{machine['cores']} cores ({machine['architecture']}), Python {machine['python']}, "
        f"torch {machine['torch']}; two CPU workers, one intra-op thread each. Mean ± standard "
        "deviation over the seeds; differences are paired by seed, mean ± standard error, and "
        "count as worse beyond two of them. " + _settings(report["settings"]),
        "",
    ]
    for name, found in report["models"].items():
        lines += [f"## {name}", "", f"{found['definition']}.", "", model_table(found), ""]
        lines += [f"- {fault}" for fault in found["faults"]]
        if found["missing"]:
            lines.append(f"- Not there yet: {', '.join(found['missing'])}.")
        if lines[-1]:
            lines.append("")
    lines += ["## Verdict", "", _verdict(report), ""]
    return "\n".join(lines)


def _settings(settings: Mapping[str, Any]) -> str:
    if not settings:
        return "Averaged modes run with the defaults of the builder."
    named = ", ".join(f"`{name}({value})`" for name, value in settings.items())
    return f"Averaged modes run with the defaults of the builder but for {named}."


def _verdict(report: Mapping[str, Any]) -> str:
    num_judged, worse = report["num_judged"], report["worse"]
    if not num_judged:
        return "No mode has two seeds yet that solo has as well."
    which = f": {', '.join(worse)}" if worse else ""
    disturbed = report["num_disturbed"]
    return (
        f"{len(worse)} of {num_judged} cells are worse than solo at an equal global batch{which}. "
        f"Of cells that are no worse in truth, {report['expected_false_alarms']:.1f} would be "
        f"judged worse by chance.\n\nOther processes used over {report['quiet']:.0%} of the cores "
        f"in {disturbed} of {report['num_runs']} runs, whose times say little."
    )
