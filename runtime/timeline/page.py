"""HTML pages drawn by a script from embedded data, with a content security policy."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from runtime.timeline.events import GAP_KINDS, Kind


def page_text(data: dict[str, Any]) -> str:
    """The timeline page for this data; see :func:`~runtime.timeline.export.html_text`."""
    style, script = asset("timeline", "page.css"), joined(asset("timeline", "page.js"))
    policy = (
        f"default-src 'none'; style-src '{csp_digest(style)}'; script-src '{csp_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return page_around(
        "gpuworker timeline",
        head=f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{style}</style>",
        end=f'<script type="application/json" id="data">{embedded(data)}</script>\n'
        f"<script>{script}</script>",
    )


def page_around(title: str, *, head: str, end: str) -> str:
    """An HTML page that is drawn by its script.

    Args:
        end: Elements after the drawing area: data and scripts.
    """
    return f"""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{head}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
</head>
<body>
<main id="page"><noscript>This page requires JavaScript.</noscript></main>
{end}
</body>
</html>
"""


def embedded(data: object) -> str:
    """JSON that is safe inside HTML: ASCII, without ``<``, ``>`` and ``&``."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


MAX_PAGE_EVENTS = 2000
"""Events of each rank in the page, the newest; the totals include all."""
MAX_PAGE_GAPS = 200
_OMITTED = {Kind.STEP.value} | {kind.value for kind in GAP_KINDS.values()}


def _for_page(data: dict[str, Any]) -> dict[str, Any]:
    """The part of a document that the page shows."""
    by_rank: dict[Any, list[dict[str, Any]]] = {}
    for event in data["events"]:
        if event["kind"] not in _OMITTED:
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


def asset(folder: str, name: str) -> str:
    """The text of a style sheet or script in a package of the runtime."""
    text = files(f"runtime.{folder}").joinpath("assets", name).read_text(encoding="utf-8")
    assert "</" not in text, "it would end its HTML element"
    return text


def joined(*scripts: str) -> str:
    """A page's script: the helpers that all pages share, and its own parts, in one function."""
    parts = "\n".join((asset("timeline", "shared.js"), *scripts))
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def csp_digest(text: str) -> str:
    """Digest of a script or style sheet for a content security policy."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
