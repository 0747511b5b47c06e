"""Make the pictures of README and docs: ``python docs/pictures.py [speed] [rounds] [timeline]``.

``speed`` draws ``images/speed.svg`` from records of ``benchmarks/speed.py``, and ``rounds`` draws
``images/rounds.svg`` from those of ``benchmarks/quality.py drift --rounds``; the same records give
the same file. ``timeline`` trains ``examples/profile_timeline.py`` for some seconds and
takes ``images/timeline.png`` of its page with a headless Chromium, which ``.ci/browser`` installs.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
RESULTS = ROOT / "benchmarks" / "results"
RECORD = RESULTS / "peers-2-cores-2026-11-22.json"
SHARES = RESULTS / "shares-2-cores-2026-11-25.json"
"""A record with measured shares under ``SYNC``, and DDP on the same devices."""
ROUNDS = {
    "LeNet, SGD with momentum": RESULTS / "drift-rounds-lenet-2-cores-2026-11-27.json",
    "GPT, AdamW": RESULTS / "drift-rounds-gpt-2-cores-2026-11-27.json",
}
"""Records of ``benchmarks/quality.py drift --rounds``, of one model each."""
SPEED, AVERAGINGS = DOCS / "images" / "speed.svg", DOCS / "images" / "rounds.svg"
TIMELINE = DOCS / "images" / "timeline.png"

MODELS = {"mlp": "MLP", "lenet": "LeNet"}
SYSTEMS = {
    "ddp": ("DistributedDataParallel", "#b9c0ca"),
    "averager": ("PeriodicModelAverager", "#8a7fd0"),
    "sync": ("gpuworker, SYNC", "#e6a11c"),
    "balanced": ("gpuworker, SYNC balanced", "#d0552d"),
    "cadence": ("gpuworker, CADENCE", "#3a9d76"),
}
DEVICES = {1: "equal", 2: "one 2x slower", 3: "one 3x slower", 5: "one 5x slower"}

BAR, GAP, PLOT_HEIGHT = 19, 20, 170
TOP, LEFT, PANEL_GAP = 58, 34, 40
PANEL_WIDTH, PANEL_HEIGHT, PANEL_SPACE = 380, 130, 56
LINE = "#3a9d76"
NAMES = ("chromium", "chromium-browser", "google-chrome")
PAGE_WIDTH, PAGE_HEIGHT = 1280, 656


def speed_svg(record: Path = RECORD, shares: Path = SHARES) -> str:
    """Samples/s of each system as a multiple of DDP's on the same devices, as SVG."""
    peers = json.loads(record.read_text(encoding="utf-8"))["sections"]["peers"]
    ratios = ratios_to_ddp(peers)
    balanced = json.loads(shares.read_text(encoding="utf-8"))["sections"]["shares"]
    ratios |= {cell: r for cell, r in ratios_to_ddp(balanced).items() if cell[2] == "balanced"}
    top = max(ratios.values()) * 1.05
    group = BAR * len(SYSTEMS)
    panel = len(DEVICES) * (group + GAP)
    width = LEFT + len(MODELS) * (panel + PANEL_GAP)
    bottom = TOP + PLOT_HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 70}" '
        f'viewBox="0 0 {width} {bottom + 70}" font-family="sans-serif" font-size="12" '
        'fill="#1d2530">',
        "<title>Samples a second as a multiple of DistributedDataParallel's</title>",
        f'<rect width="{width}" height="{bottom + 70}" fill="#ffffff"/>',
        text(LEFT, 20, "Samples/s of 2 CPU workers, as a multiple of DDP on the same devices", 15),
    ]
    for column, (model, name) in enumerate(MODELS.items()):
        left = LEFT + column * (panel + PANEL_GAP)
        step_ms = peers[model]["step_s"] * 1e3
        lines.append(text(left, 44, f"{name}, {step_ms:.1f} ms a step", 13))
        for value in range(int(top) + 1):
            y = bottom - PLOT_HEIGHT * value / top
            lines.append(f'<path d="M{left} {y:.1f}h{panel}" stroke="#e3e7ec"/>')
            lines.append(text(left - 6, y + 4, str(value), 11, "end"))
        for place, (slow, label) in enumerate(DEVICES.items()):
            x = start = left + place * (group + GAP) + GAP / 2
            for system, (title, color) in SYSTEMS.items():
                ratio = ratios.get((model, slow, system))
                if ratio is None:  # nothing to balance among equal devices
                    continue
                height = PLOT_HEIGHT * ratio / top
                end = bottom - height
                lines.append(
                    f'<rect x="{x:.1f}" y="{end:.1f}" width="{BAR - 2}" height="{height:.1f}" '
                    f'fill="{color}"><title>{title}: {ratio:.2f}</title></rect>'
                )
                lines.append(text(x + BAR / 2 - 1, end - 3, f"{ratio:.1f}", 9, "middle"))
                x += BAR
            lines.append(text((start + x) / 2, bottom + 17, label, 11, "middle"))
    x = LEFT
    for title, color in SYSTEMS.values():
        lines.append(f'<rect x="{x}" y="{bottom + 42}" width="11" height="11" fill="{color}"/>')
        lines.append(text(x + 16, bottom + 52, title, 12))
        x += 40 + 7 * len(title)
    return "\n".join([*lines, "</svg>", ""])


def ratios_to_ddp(record: dict[str, Any]) -> dict[tuple[str, int, str], float]:
    """Ratio of the median rates to DDP's in the same record, by model, slowdown and system."""
    rates = {model: record[model]["median_rates"] for model in MODELS}
    return {
        (model, slow, system): rates[model][f"{system}@{slow}"] / rates[model][f"ddp@{slow}"]
        for model in MODELS
        for slow in DEVICES
        for system in SYSTEMS
        if f"{system}@{slow}" in rates[model]
    }


def rounds_svg(records: dict[str, Path] = ROUNDS) -> str:
    """Loss and accuracy relative to one device by the number of averagings, as SVG."""
    width = LEFT + len(records) * (PANEL_WIDTH + PANEL_SPACE)
    height = 2 * (PANEL_HEIGHT + PANEL_SPACE) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="#1d2530">',
        "<title>Loss and accuracy relative to one device by the number of averagings</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for column, (name, path) in enumerate(records.items()):
        record = json.loads(path.read_text(encoding="utf-8"))
        (num_steps,) = record["steps"].values()
        ways = sorted(record["summary"], key=lambda way: way["every"])
        numbers = [num_steps / way["every"] for way in ways]
        losses = [(100 * way["mean"], 100 * way["se"]) for way in ways]
        accuracies = [(way["points"]["mean"], way["points"]["se"]) for way in ways]
        left = LEFT + 10 + column * (PANEL_WIDTH + PANEL_SPACE)
        lines += panel_of(left, 44, f"{name}: loss above one device, %", numbers, losses)
        below = 44 + PANEL_HEIGHT + PANEL_SPACE
        lines += panel_of(left, below, f"{name}: accuracy, points", numbers, accuracies)
    return "\n".join([*lines, "</svg>", ""])


def panel_of(
    left: float, top: float, title: str, numbers: list[float], points: list[tuple[float, float]]
) -> list[str]:
    """A panel of means with their errors, by a number on a logarithmic axis."""
    low = min(0.0, *(mean - error for mean, error in points))
    high = max(0.0, *(mean + error for mean, error in points))
    unit = 10.0 ** math.floor(math.log10(high - low))
    unit = next(u for u in (unit / 5, unit / 2, unit, 2 * unit) if (high - low) / u < 7)
    xs = [left + PANEL_WIDTH * math.log10(n) / math.log10(max(numbers)) for n in numbers]
    bottom = top + PANEL_HEIGHT

    def y_of(value: float) -> float:
        return top + PANEL_HEIGHT * (high - value) / (high - low)

    lines = [text(left, top - 8, title, 12)]
    for value in (unit * i for i in range(math.ceil(low / unit), math.floor(high / unit) + 1)):
        color = "#e3e7ec" if value else "#8c95a1"
        lines.append(f'<path d="M{left} {y_of(value):.1f}h{PANEL_WIDTH}" stroke="{color}"/>')
        lines.append(text(left - 6, y_of(value) + 4, f"{value:g}", 11, "end"))
    line = " L".join(f"{x:.1f} {y_of(mean):.1f}" for x, (mean, _) in zip(xs, points, strict=True))
    lines.append(f'<path d="M{line}" fill="none" stroke="{LINE}" stroke-width="2"/>')
    for x, number, (mean, error) in zip(xs, numbers, points, strict=True):
        bar = f"M{x:.1f} {y_of(mean - error):.1f}V{y_of(mean + error):.1f}"
        lines.append(f'<path d="{bar}" stroke="{LINE}"/>')
        lines.append(f'<circle cx="{x:.1f}" cy="{y_of(mean):.1f}" r="3" fill="{LINE}"/>')
        lines.append(text(x, bottom + 15, f"{round(number):,}", 11, "middle"))
    return [*lines, text(left + PANEL_WIDTH, bottom + 30, "averagings", 11, "end")]


def text(x: float, y: float, content: str, size: int, anchor: str = "start") -> str:
    """A line of text."""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}>{content}</text>"


def take_timeline() -> None:
    """Train for some seconds on unequal workers and take a picture of the timeline's page."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        sys.exit("there is no Chromium to take the picture with: run .ci/browser")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "run"
        example = [sys.executable, str(ROOT / "examples" / "profile_timeline.py")]
        settings = ["--epochs", "12", "--samples", "40000", "--slow", "3", "--out", str(page)]
        subprocess.run([*example, *settings], check=True)
        camera = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        size = [f"--window-size={PAGE_WIDTH},{PAGE_HEIGHT}", f"--screenshot={TIMELINE}"]
        subprocess.run([browser, *camera, *size, f"file://{page}.html"], check=True)


def main() -> None:
    names = {"speed", "rounds", "timeline"}
    wanted = set(sys.argv[1:]) or names
    if unknown := wanted - names:
        sys.exit(f"there is no picture {', '.join(sorted(unknown))}; pass any of {sorted(names)}")
    if "speed" in wanted:
        SPEED.write_text(speed_svg(), encoding="utf-8")
    if "rounds" in wanted:
        AVERAGINGS.write_text(rounds_svg(), encoding="utf-8")
    if "timeline" in wanted:
        take_timeline()


if __name__ == "__main__":
    main()
