"""How ``make docs`` builds this folder: Sphinx, with Markdown pages and docstrings."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

project = "gpuworker"
author = "gpuworker contributors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "gpuworker"
templates_path: list[str] = []

myst_heading_anchors = 3  # links such as policies.md#the-same-bits

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True

# A reference to a public name has to lead somewhere; types of others and private ones in
# signatures need not: looking them up would take a network.
nitpicky = True
nitpick_ignore_regex = [("py:class", r"(?!runtime\.[A-Za-z]+$).*")]


def link_files(app: Sphinx, name: str, source: list[str]) -> None:
    """Make links to Markdown files outside of this folder downloads: they are no pages here."""
    source[0] = re.sub(r"\[([^\]]+)\]\((\.\./[^)]+\.md)\)", r"{download}`\1 <\2>`", source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", link_files)
