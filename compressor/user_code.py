"""Import of the user's own code: the only way that code runs from a spec."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compressor.errors import SpecError
from compressor.names import suggestion


@contextmanager
def importable(directories: Sequence[Path]) -> Iterator[None]:
    """Let modules in these directories be imported, after everything installed."""
    added = [str(d) for d in directories if str(d) not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        for entry in added:
            sys.path.remove(entry)


def load_symbol(reference: str, key: str) -> Callable[..., Any]:
    """Import ``package.module:name``.

    Args:
        reference: the module's dotted path and the name in it.
        key: the spec key it was written under, for messages.

    Raises:
        SpecError: it is malformed, does not import, or is not callable.
    """
    module_name, colon, name = reference.partition(":")
    if not colon or not module_name or not name:
        raise SpecError(
            key, f"{reference!r} is not package.module:name", "write it like my_package.model:build"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise SpecError(
            key,
            f"{module_name!r} does not import ({type(error).__name__}: {error})",
            "run from the folder that holds it, or install its package",
        ) from error
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            names = [n for n in dir(target) if not n.startswith("_")]
            raise SpecError(key, f"{module_name!r} has no {part!r}", suggestion(part, names))
        target = getattr(target, part)
    if not callable(target):
        raise SpecError(
            key, f"{reference!r} is a {type(target).__name__}", "name a function or a class"
        )
    return target  # type: ignore[no-any-return]  # callable() does not narrow Any


def code_digest(function: Callable[..., Any]) -> str:
    """Hash the source of the function's module and of the user's modules beside it.

    All imported modules below the same top-level package count; installed libraries do not,
    their versions are part of the store's keys elsewhere.
    """
    module_name = getattr(function, "__module__", "") or ""
    root = module_name.partition(".")[0]
    digest = hashlib.sha256(f"{module_name}:{getattr(function, '__qualname__', '')}".encode())
    for name in sorted(sys.modules):
        if name != root and not name.startswith(root + "."):
            continue
        source = getattr(sys.modules[name], "__file__", None)
        if source and source.endswith(".py") and "site-packages" not in source:
            digest.update(name.encode())
            digest.update(Path(source).read_bytes())
    return digest.hexdigest()
