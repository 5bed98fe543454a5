"""Import the user's code, the only way that code runs from a spec, and bear with what it does."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from compressor.errors import DataError, SpecError, suggestion

# Passes have versions of their own; what comes with Python is taken to stay as it is.
_OURS = frozenset({"compressor", *sys.stdlib_module_names})

HELD = "in-memory"
"""What stands for a package in references to objects of a Python program."""


@contextmanager
def importable(directories: Sequence[Path]) -> Iterator[None]:
    """Let modules in these directories be imported, after everything installed.

    Raises:
        DataError: code that was called in the block has tried to end the program.
    """
    added = [str(d) for d in directories if str(d) not in sys.path]
    sys.path.extend(added)
    try:
        yield
    except SystemExit as error:
        raise exit_error(error) from error
    finally:
        for entry in added:
            sys.path.remove(entry)


def exit_error(error: SystemExit) -> DataError:
    """Return the error for code of others that tried to end the program, such as ``sys.exit(0)``.

    As an exit it would pass for the end of the command, with an exit code of its own choice.
    """
    frames = [
        (Path(frame.f_code.co_filename), line)
        for frame, line in walk_tb(error.__traceback__)
        if not str(frame.f_globals.get("__name__")).startswith("compressor.")
    ]
    own = [frame for frame in frames if frame[0].is_file() and not _is_installed(frame[0].parent)]
    path, line = (own or frames or [(Path("?"), 0)])[-1]
    return DataError(
        f"file {path.name!r}, line {line}",
        f"tried to end the program (SystemExit: {error.code or 0})",
        "let it return, or raise an error; --debug shows who called it",
    )


def load_symbol(reference: str, key: str) -> Callable[..., Any]:
    """Import ``package.module:name``.

    Args:
        reference: the module's dotted path and the name in it.
        key: the spec key it was written under, for messages.

    Raises:
        SpecError: it is malformed, does not import, or is not callable.
    """
    module_name, colon, name = reference.partition(":")
    if module_name == HELD:
        raise SpecError(
            key,
            f"was an object of a Python program, which no file holds ({reference})",
            "run that program again, or give package.module:function",
        )
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
            names = [n for n, v in vars(target).items() if callable(v) and not n.startswith("_")]
            raise SpecError(key, f"{module_name!r} has no {part!r}", suggestion(part, names))
        target = getattr(target, part)
    if not callable(target):
        raise SpecError(
            key, f"{reference!r} is a {type(target).__name__}", "name a function or a class"
        )
    if reference_to(target) is None:
        _NAMED[id(target)] = target, reference
    return target  # type: ignore[no-any-return]  # callable() does not narrow Any


_NAMED: dict[int, tuple[object, str]] = {}
"""What specs name but does not know its name, such as an instance with ``__call__``, by its id."""


def code_digest(function: Callable[..., Any]) -> str:
    """Hash the source of the function's module and of all of the user's modules that it needs.

    These are the modules that it imports, and those that they import, wherever they lie; and
    whatever was imported from the same top-level package. Installed libraries count by version.
    """
    named = _NAMED.get(id(function), (None, ""))[1]
    module_name = named.partition(":")[0] or getattr(function, "__module__", "") or ""
    name = named or f"{module_name}:{getattr(function, '__qualname__', '')}"
    digest = hashlib.sha256(name.encode())
    for name, source in sorted(_needed_sources(module_name).items()):
        digest.update(name.encode())
        digest.update(source)
    if not named and reference_to(function) is None:  # its source may be in no file
        for piece in _pieces(function, []):
            digest.update(piece + b"\0")
    return digest.hexdigest()


def reference_to(function: object) -> str | None:
    """Return ``package.module:name`` of what can be imported so; ``None`` for anything else.

    >>> reference_to(reference_to)
    'compressor.spec.user_code:reference_to'
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is function else None


_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def _pieces(value: Any, seen: list[int]) -> Iterator[bytes]:
    """Yield what a function computes with: its code, and the values and functions that it holds.

    Of other objects it is what a copy would be made of, or else random: then no result is reused.
    """
    if isinstance(value, _PLAIN):
        yield repr(value).encode()
    elif isinstance(value, tuple | list | frozenset | set | dict):
        items = value.items() if isinstance(value, dict) else value
        texts = [b"".join(_pieces(item, seen)) for item in items]
        yield from sorted(texts) if isinstance(value, frozenset | set) else texts
    elif isinstance(value, ModuleType):
        yield value.__name__.encode()
    elif (reference := reference_to(value)) is not None:  # of a library, or a file of the user's
        yield reference.encode()
    elif isinstance(value, type):
        yield value.__name__.encode()
        held = (*value.__bases__, *vars(value).values())
        yield from _pieces([v for v in held if isinstance(v, FunctionType | type)], seen)
    elif isinstance(value, CodeType):
        yield value.co_code
        yield from _pieces((value.co_names, value.co_varnames, value.co_consts), seen)
    elif isinstance(value, FunctionType):
        if id(value) not in seen:
            seen.append(id(value))
            yield from _pieces(value.__code__, seen)
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            yield from _pieces((value.__defaults__, value.__kwdefaults__, cells), seen)
            outside = value.__globals__
            used = {n: outside[n] for n in value.__code__.co_names if n in outside}
            yield from _pieces(used, seen)
    elif isinstance(value, MethodType):
        yield from _pieces((value.__func__, value.__self__), seen)
    elif isinstance(value, partial):
        yield from _pieces((value.func, value.args, value.keywords), seen)
    elif id(value) not in seen:  # an array, a scaler, or whatever else stands outside
        seen.append(id(value))
        yield from _pieces(type(value), seen)
        try:
            yield pickle.dumps(value)
        except Exception:  # noqa: BLE001  # the object's own code runs
            yield os.urandom(16)


def _needed_sources(module_name: str) -> dict[str, bytes]:
    """Return name and source of the modules that a module of the user's needs, itself included.

    Of what is installed, the version stands in the place of sources.
    """
    root = module_name.partition(".")[0]
    own = _folder_of(sys.modules.get(root))
    if own is None:
        return {root: _version_of(root)} if root not in ("", "__main__") else {}
    waiting = [n for n in sys.modules if n == root or n.startswith(root + ".")]
    sources: dict[str, bytes] = {}
    seen: set[str] = set()
    folders: dict[str, dict[str, bool]] = {}
    while waiting:
        name = waiting.pop()
        root = name.partition(".")[0]
        if name in seen or root in _OURS:
            continue
        seen.add(name)
        module = _found(root)
        folder = own if module is None else _folder_of(module)
        if folder is None:
            sources.setdefault(root, _version_of(root))
            continue
        for path in _files_of(folder, name, folders.setdefault(root, {})):
            dotted = ".".join(path.relative_to(folder).with_suffix("").parts)
            sources[dotted] = path.read_bytes()
            waiting += _imports(sources[dotted], dotted)
    return sources


def _found(root: str) -> object:
    """Return a top-level module, or what tells where it would be imported from."""
    if root in sys.modules:
        return sys.modules[root]
    try:
        return importlib.util.find_spec(root)
    except (ImportError, ValueError):
        return None


@cache
def _version_of(root: str) -> bytes:
    """Return the version of the library that a top-level module belongs to; empty without one."""
    try:
        return version(root).encode()
    except PackageNotFoundError:
        holders = sorted(packages_distributions().get(root, ()))
        return " ".join(version(holder) for holder in holders).encode()


def _folder_of(module: object) -> Path | None:
    """Return the folder that a top-level module is imported from, unless it is installed there."""
    paths = getattr(module, "__path__", None) or getattr(module, "submodule_search_locations", None)
    file = getattr(module, "__file__", None) or getattr(module, "origin", None)
    places = [p for p in (file, *(paths or ())) if p and p not in ("built-in", "frozen")]
    if not places:
        return None
    place = Path(places[0])
    folder = place.parent.parent if place.name == "__init__.py" else place.parent
    return None if _is_installed(folder) else folder


def _is_installed(folder: Path) -> bool:
    """Return whether modules in a folder belong to Python or to an installed library."""
    installed = {"site-packages", "dist-packages"} & set(folder.parts)
    return bool(installed) or folder == Path(hashlib.__file__).parent


def _files_of(folder: Path, name: str, folders: dict[str, bool]) -> Iterator[Path]:
    """Yield the files of a module and of the packages around it, each once.

    Args:
        folders: whether there is a folder of a dotted name; those that are known have been yielded.
    """
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        dotted = ".".join(parts[:count])
        if dotted not in folders:
            place = folder.joinpath(*parts[:count])
            folders[dotted] = place.is_dir()
            files = (place.with_name(place.name + ".py"), place / "__init__.py")
            yield from (path for path in files if path.is_file())
        if not folders[dotted]:  # what follows is not a module
            return


@cache  # without a limit: a large repository would drive out each file before it is asked for again
def _imports(source: bytes, module: str) -> tuple[str, ...]:
    """Return the dotted names that a module's source imports, wherever the statements stand."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # it was never imported, then
        return ()
    package = module.removesuffix(".__init__").split(".")
    if not module.endswith(".__init__"):
        package = package[:-1]
    names: list[str] = []
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*above, *([node.module] if node.module else [])])
            names += [f"{start}.{alias.name}" if start else alias.name for alias in node.names]
    return tuple(names)


_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield all statements; to walk through expressions, too, takes most of the time."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        for block in _BLOCKS:
            waiting += getattr(node, block, ())
        yield node
