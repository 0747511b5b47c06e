"""Sphinx configuration of ``make docs``: Markdown pages, and an API reference from docstrings."""

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
html_search_scorer = str(Path(__file__).with_name("search_order.js"))
templates_path: list[str] = []

myst_heading_anchors = 3  # links such as policies.md#bit-exact-results

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True

# References to public names must resolve. Types of other libraries and private types in signatures
# are exempt, since resolving them would require a network.
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", r"(?!gpuworker\.[A-Za-z]+$).*"),
    ("py:exc", r"queue\.Empty"),
]


def link_files(app: Sphinx, name: str, source: list[str]) -> None:
    """Turn links to Markdown files outside this folder, which are not pages, into downloads."""
    source[0] = re.sub(r"\[([^\]]+)\]\((\.\./[^)]+\.md)\)", r"{download}`\1 <\2>`", source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", link_files)
