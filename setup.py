"""What the distribution says of where it is published; all else is in ``pyproject.toml``.

The index's page shows the README, where pictures and links need whole addresses. They begin with
that of the repository, which is given when the distribution is built::

    COMPRESSOR_HOME=https://example.org/owner/compressor python -m build

Without it, the page has no pictures and no links to other pages, instead of broken ones.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import setup

_PICTURE = re.compile(r"!\[([^\]]*)\]\((?!\w+:)([^)]+)\)\n*")
_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:)([^)]+)\)")
_PAGES = {
    "Documentation": "blob/main/docs/index.md",
    "Changelog": "blob/main/CHANGELOG.md",
    "Issues": "issues",
}

home = os.environ.get("COMPRESSOR_HOME", "").rstrip("/")
readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
if home:
    readme = _PICTURE.sub(rf"![\1]({home}/raw/main/\2)\n\n", readme)
    readme = _LINK.sub(rf"[\1]({home}/blob/main/\2)", readme)
else:
    readme = _LINK.sub(r"\1", _PICTURE.sub("", readme))

setup(
    long_description=readme,
    long_description_content_type="text/markdown",
    project_urls={"Repository": home, **{n: f"{home}/{p}" for n, p in _PAGES.items()}}
    if home
    else {},
)
