"""Configuration of Sphinx, which makes web pages of the user guide: ``make site``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from compressor import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "compressor"
release = version = __version__
# Pages in Markdown, and notebooks with the output that they are kept with.
extensions = ["myst_nb"]
nb_execution_mode = "off"
html_theme = "furo"
html_title = f"compressor {__version__}"
html_favicon = "favicon.svg"
myst_heading_anchors = 4
# Links that lead out of this folder, to samples and the README, work on the project's own pages
# only; a test checks all links.
suppress_warnings = ["myst.xref_missing"]

_TABLE = re.compile(r"^## (.+)\n\n\| page \|.*\n(?:\|.*\n)+", re.M)
_PAGE = re.compile(r"\]\(([\w/-]+)\.(?:md|ipynb)\)")


def setup(app: Sphinx) -> None:
    """Put the menu into the index, which reads without it elsewhere."""
    app.connect("source-read", _add_menu)


def _add_menu(app: Sphinx, name: str, source: list[str]) -> None:
    """Make each table of pages a group of the menu: its pages in their order, under its heading."""
    if name != app.config.root_doc:
        return
    for table in _TABLE.finditer(source[0]):
        pages = "\n".join(_PAGE.findall(table[0]))
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {table[1]}\n\n{pages}\n```\n"
