"""The page of a monitor, served or saved as one file."""

from __future__ import annotations

import html
import importlib.metadata
import re
from functools import cache
from importlib.resources import files

from runtime.timeline.page import asset, csp_digest, joined, page_around

TITLE = "gpuworker monitor"
_MAP_RULES = re.compile(rb'getElementById\("([0-9a-f]{64})"\)')
# Digest of an empty style element, to which Plotly adds its own rules.
_NO_STYLE = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="
_IMAGES = "img-src data:; "  # Plotly tests the browser with one

POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'self' '{_NO_STYLE}'; connect-src 'self'; "
    f"{_IMAGES}base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy of the served page: everything is loaded from its own server."""

SCRIPT_NAME = "monitor.js"
STYLE_NAME = "monitor.css"
_ICON = '<link rel="icon" href="data:,">\n'  # else browsers request one
_SCRIPT_PARTS = ("common.js", "curves.js", SCRIPT_NAME)


def style() -> str:
    """The style sheets of the timeline's page and of this one."""
    return asset("timeline", "page.css") + asset("monitor", STYLE_NAME)


def script() -> str:
    """The scripts of the page, in the order in which they depend on each other."""
    return joined(*(asset("monitor", name) for name in _SCRIPT_PARTS))


def plotly_name() -> str:
    """The name under which Plotly is served, with its version."""
    return f"plotly-{importlib.metadata.version('plotly')}.min.js"


def plotly_script() -> bytes:
    """The JavaScript library of the package ``plotly``."""
    return files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()


@cache
def served_page() -> str:
    """The page, which loads style, scripts and data from its server."""
    return page_around(
        TITLE,
        head=f'{_ICON}<link rel="stylesheet" href="{STYLE_NAME}">{_map_rules(plotly_script())}',
        end=f'<script src="{html.escape(plotly_name())}"></script>\n'
        f'<script src="{SCRIPT_NAME}"></script>',
    )


def saved_page(history: str) -> str:
    """A self-contained page.

    Args:
        history: The data, as encoded by :meth:`~runtime.monitor.feed.Feed.history`.
    """
    library = plotly_script()
    scripts = [library.decode("utf-8").replace("</script", "<\\/script"), script()]
    rules = style()
    digests = " ".join(f"'{csp_digest(text)}'" for text in scripts)
    policy = (
        f"default-src 'none'; script-src {digests}; style-src '{csp_digest(rules)}' '{_NO_STYLE}'; "
        f"{_IMAGES}base-uri 'none'; form-action 'none'"
    )
    data = f'<script type="application/json" id="data">{history}</script>'
    return page_around(
        TITLE,
        head=f'{_ICON}<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{rules}</style>{_map_rules(library)}",
        end="\n".join([data, *(f"<script>{text}</script>" for text in scripts)]),
    )


def _map_rules(library: bytes) -> str:
    """An empty style element with the id of Plotly's map rules, which the policy would block and
    this page does not need; empty if the library has no such rules.
    """
    found = _MAP_RULES.search(library)
    return f'<style id="{found[1].decode("ascii")}"></style>' if found else ""
