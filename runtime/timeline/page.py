"""A timeline as one page that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from runtime.timeline.events import STRETCHES, Kind
from runtime.timeline.export import Recorded, document

MAX_PAGE_EVENTS = 2000
"""Events of each rank that the page holds, the newest; the totals hold all."""
MAX_PAGE_GAPS = 200
_LEFT_OUT = {Kind.STEP.value} | {kind.value for kind in STRETCHES.values()}


def html_text(timeline: Recorded) -> str:
    """The page: its data, its style and its script in one text.

    The data stands in a block that is not run, with every character escaped that could end
    it; the script writes names as text, never as markup. The page's policy lets nothing
    run but that script, and nothing be loaded.
    """
    return page_text(_for_page(document(timeline)))


def page_text(data: dict[str, Any]) -> str:
    """The page around this data; see :func:`html_text`."""
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<title>gpuworker timeline</title>",
            f"<style>{style}</style>",
            "</head>",
            "<body>",
            '<main id="page"><noscript>This page draws itself with a script.</noscript></main>',
            f'<script type="application/json" id="data">{embedded(data)}</script>',
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def embedded(data: object) -> str:
    """JSON that can stand inside a page: in ASCII, without ``<``, ``>`` and ``&``."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _for_page(data: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of a document."""
    by_rank: dict[Any, list[dict[str, Any]]] = {}
    for event in data["events"]:
        if event["kind"] not in _LEFT_OUT:
            by_rank.setdefault(event["rank"], []).append(event)
    kept = [event for events in by_rank.values() for event in events[-MAX_PAGE_EVENTS:]]
    num_events = sum(len(events) for events in by_rank.values())
    return {
        **data,
        "events": sorted(kept, key=lambda event: event["start_s"]),
        "num_events_left_out": num_events - len(kept),
        "gaps": data["gaps"][:MAX_PAGE_GAPS],
        "num_gaps": len(data["gaps"]),
    }


def _asset(name: str) -> str:
    text = files("runtime.timeline").joinpath("assets", name).read_text(encoding="utf-8")
    assert "</" not in text, "it would end its own element"
    return text


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
