"""Text and tables in GitHub's Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

PASSED, FAILED = "✅", "❌"
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!$@])")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    """Lay out a table; ``align`` has one letter a column, ``l`` or ``r``."""
    rule = ["---:" if letter == "r" else "---" for letter in align]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def text(value: str) -> str:
    """Escape what Markdown would take for markup, and keep it on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(value.split()))


def code(value: str) -> str:
    """Set a name as code, whatever characters are in it."""
    flat = " ".join(value.split()) or " "
    longest = max((len(run) for run in re.findall("`+", flat)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {flat} {fence}" if longest else f"{fence}{flat}{fence}"


def cell(value: str) -> str:
    """Set a name as code inside a table, where a bar would end the cell."""
    return code(value).replace("|", "\\|")
