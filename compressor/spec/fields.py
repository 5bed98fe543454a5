"""Look inside the type annotations of options."""

from __future__ import annotations

from typing import Any, get_args

from compressor.types.options import Options


def nested_options(annotation: Any) -> type[Options] | None:
    """Return the ``Options`` class inside an annotation such as ``tuple[X, ...] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return annotation
    for argument in get_args(annotation):
        found = nested_options(argument)
        if found is not None:
            return found
    return None
