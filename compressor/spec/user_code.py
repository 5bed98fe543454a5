"""Import the user's code: the only way that code runs from a spec."""

from __future__ import annotations

import ast
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from compressor.errors import SpecError, suggestion


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
    except (Exception, SystemExit) as error:
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
    """Hash the source of the function's module and of all of the user's modules that it needs.

    These are the modules that it imports, and those that they import, if they lie in the same
    folder or below; and whatever was imported from the same top-level package. Installed
    libraries do not count: their versions are part of the store's keys elsewhere.
    """
    module_name = getattr(function, "__module__", "") or ""
    digest = hashlib.sha256(f"{module_name}:{getattr(function, '__qualname__', '')}".encode())
    for name, source in sorted(_needed_sources(module_name).items()):
        digest.update(name.encode())
        digest.update(source)
    return digest.hexdigest()


def _needed_sources(module_name: str) -> dict[str, bytes]:
    """Return name and source of the modules that a module of the user's needs, itself included."""
    root = module_name.partition(".")[0]
    folder = _folder_of(sys.modules.get(root))
    if folder is None:
        return {}
    waiting = [n for n in sys.modules if n == root or n.startswith(root + ".")]
    sources: dict[str, bytes] = {}
    while waiting:
        name = waiting.pop()
        for path in _files_of(folder, name):
            dotted = ".".join(path.relative_to(folder).with_suffix("").parts)
            if dotted not in sources:
                sources[dotted] = path.read_bytes()
                waiting += _imports(sources[dotted], dotted)
    return sources


def _folder_of(module: ModuleType | None) -> Path | None:
    """Return the folder that a top-level module is imported from, unless it is installed there."""
    places = [p for p in (getattr(module, "__file__", None), *getattr(module, "__path__", ())) if p]
    if not places:
        return None
    place = Path(places[0])
    folder = place.parent.parent if place.name == "__init__.py" else place.parent
    installed = {"site-packages", "dist-packages"} & set(folder.parts)
    return None if installed or folder == Path(hashlib.__file__).parent else folder


def _files_of(folder: Path, name: str) -> Iterator[Path]:
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        place = folder.joinpath(*parts[:count])
        for path in (place.with_name(place.name + ".py"), place / "__init__.py"):
            if path.is_file():
                yield path


def _imports(source: bytes, module: str) -> Iterator[str]:
    """Yield the dotted names that a module's source imports, wherever the statements stand."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # it was never imported, then
        return
    package = module.removesuffix(".__init__").split(".")
    if not module.endswith(".__init__"):
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" if start else alias.name for alias in node.names)
