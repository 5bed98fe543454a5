"""Read shapes of inputs as they stand on a command line."""

from __future__ import annotations

from collections.abc import Sequence

from compressor.errors import SpecError


def parse_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return shapes by the input's name, from texts such as ``image=1,3,224,224``.

    Raises:
        SpecError: a text is of another form.
    """
    shapes = {}
    for text in texts:
        name, _, lengths = text.rpartition("=")
        parts = lengths.split(",")
        if not name or not all(part.strip().isdecimal() and int(part) for part in parts):
            raise SpecError(
                f"--shape {text}",
                "is not a name with lengths of 1 and more",
                "write it as in --shape image=1,3,224,224",
            )
        shapes[name] = tuple(int(part) for part in parts)
    return shapes
