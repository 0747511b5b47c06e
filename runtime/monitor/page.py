"""The page of a monitor: served, or as one file."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.metadata
import re
from functools import cache
from importlib.resources import files

TITLE = "gpuworker monitor"
# Plotly adds its own rules to an empty style element, which this digest of nothing allows.
_END = "</style>"
_MAP_RULES = re.compile(rb'getElementById\("([0-9a-f]{64})"\)')
_EMPTY = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="
_IMAGES = "img-src data:; "  # Plotly looks at one to learn what the browser can draw

POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'self' '{_EMPTY}'; connect-src 'self'; "
    f"{_IMAGES}base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The policy of the served page: it loads from its own server alone, and runs nothing else."""

SCRIPT_NAME = "monitor.js"
STYLE_NAME = "monitor.css"
_SCRIPT_PARTS = ("words.js", "curves.js", SCRIPT_NAME)


def style() -> str:
    """The rules of a timeline's page, and those of this one."""
    timeline = files("runtime.timeline").joinpath("assets", "page.css")
    return timeline.read_text(encoding="utf-8") + _asset(STYLE_NAME)


def script() -> str:
    """What draws the page and follows the run: the parts in one function."""
    parts = "\n".join(_asset(name) for name in _SCRIPT_PARTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def plots_name() -> str:
    """The name under which the plots' library is served: another one for each version."""
    return f"plotly-{importlib.metadata.version('plotly')}.min.js"


def plots() -> bytes:
    """The plots' library, as the package ``plotly`` brings it."""
    return files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()


@cache
def served_page() -> str:
    """The page, which loads style, scripts and data from where it came."""
    return _document(
        head=f'<link rel="stylesheet" href="{STYLE_NAME}">{_unwanted_rules(plots())}',
        end=f'<script src="{html.escape(plots_name())}"></script>\n'
        f'<script src="{SCRIPT_NAME}"></script>',
    )


def saved_page(history: str) -> str:
    """One page that needs nothing else, and no network.

    Args:
        history: What it shows, as :meth:`~runtime.monitor.feed.Feed.history` encodes it.
    """
    library = plots()
    scripts = [library.decode("utf-8").replace("</script", "<\\/script"), script()]
    rules = style()
    digests = " ".join(f"'{_digest(text)}'" for text in scripts)
    policy = (
        f"default-src 'none'; script-src {digests}; style-src '{_digest(rules)}' '{_EMPTY}'; "
        f"{_IMAGES}base-uri 'none'; form-action 'none'"
    )
    data = f'<script type="application/json" id="data">{history}</script>'
    return _document(
        head=f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{rules}</style>{_unwanted_rules(library)}",
        end="\n".join([data, *(f"<script>{text}</script>" for text in scripts)]),
    )


def _unwanted_rules(library: bytes) -> str:
    """An empty element where the library would add its rules for maps, which nothing here
    needs and the policy refuses; nothing if it no longer does."""
    found = _MAP_RULES.search(library)
    return f'<style id="{found[1].decode("ascii")}">{_END}' if found else ""


def _document(head: str, end: str) -> str:
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # Else browsers ask for an icon.
            '<link rel="icon" href="data:,">',
            head,
            f"<title>{TITLE}</title>",
            "</head>",
            "<body>",
            '<main id="page"><noscript>This page draws itself with a script.</noscript></main>',
            end,
            "</body>",
            "</html>",
            "",
        ]
    )


def _asset(name: str) -> str:
    text = files("runtime.monitor").joinpath("assets", name).read_text(encoding="utf-8")
    assert "</" not in text, "it would end its own element"
    return text


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
