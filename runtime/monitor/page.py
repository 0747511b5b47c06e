"""The page of a monitor: served, or as one file."""

from __future__ import annotations

import html
import importlib.metadata
import re
from functools import cache
from importlib.resources import files

from runtime.timeline.page import asset, csp_digest, page_around

TITLE = "gpuworker monitor"
_MAP_RULES = re.compile(rb'getElementById\("([0-9a-f]{64})"\)')
# Plotly adds its own rules to an empty style element, which this digest of nothing allows.
_EMPTY = "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="
_IMAGES = "img-src data:; "  # Plotly looks at one to learn what the browser can draw

POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'self' '{_EMPTY}'; connect-src 'self'; "
    f"{_IMAGES}base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The policy of the served page: it loads from its own server alone, and runs nothing else."""

SCRIPT_NAME = "monitor.js"
STYLE_NAME = "monitor.css"
_ICON = '<link rel="icon" href="data:,">\n'  # else browsers ask for one
_SCRIPT_PARTS = ("words.js", "curves.js", SCRIPT_NAME)


def style() -> str:
    """The rules of a timeline's page, and those of this one."""
    return asset("timeline", "page.css") + asset("monitor", STYLE_NAME)


def script() -> str:
    """What draws the page and follows the run: the parts in one function."""
    parts = "\n".join(asset("monitor", name) for name in _SCRIPT_PARTS)
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
    return page_around(
        TITLE,
        head=f'{_ICON}<link rel="stylesheet" href="{STYLE_NAME}">{_unwanted_rules(plots())}',
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
    digests = " ".join(f"'{csp_digest(text)}'" for text in scripts)
    policy = (
        f"default-src 'none'; script-src {digests}; style-src '{csp_digest(rules)}' '{_EMPTY}'; "
        f"{_IMAGES}base-uri 'none'; form-action 'none'"
    )
    data = f'<script type="application/json" id="data">{history}</script>'
    return page_around(
        TITLE,
        head=f'{_ICON}<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{rules}</style>{_unwanted_rules(library)}",
        end="\n".join([data, *(f"<script>{text}</script>" for text in scripts)]),
    )


def _unwanted_rules(library: bytes) -> str:
    """An empty element where the library would add its rules for maps, which nothing here
    needs and the policy refuses; nothing if it no longer does."""
    found = _MAP_RULES.search(library)
    return f'<style id="{found[1].decode("ascii")}"></style>' if found else ""
