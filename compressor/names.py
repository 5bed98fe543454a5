"""Names in messages: close ones, and lists of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def close_names(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the known names nearest to ``name``, best first."""
    return get_close_matches(name, list(known), n=count, cutoff=0.5)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a remedy such as ``did you mean 'epochs'?``, or the whole list where none is near."""
    known = list(known)
    near = close_names(name, known, 1)
    if near:
        return f"did you mean {near[0]!r}?"
    shown = ", ".join(sorted(known)[:12]) or "nothing"
    return f"there is: {shown}" + (" ..." if len(known) > 12 else "")


def listed(names: Sequence[str], limit: int = 5) -> str:
    """Return the first names quoted, and how many more there are."""
    shown = ", ".join(repr(n) for n in names[:limit])
    more = len(names) - limit
    return shown + (f" and {more} more" if more > 0 else "")
