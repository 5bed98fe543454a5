"""Read YAML and remember on which line each value stands; write single values."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarbool import ScalarBoolean
from ruamel.yaml.scalarfloat import ScalarFloat

from compressor.errors import SpecError, argument
from compressor.types.option_errors import KeyPath as KeyPath


def dotted(path: KeyPath) -> str:
    """Write a key path as a user would.

    >>> dotted(("passes", 1, "weights", "bits"))
    'passes.1.weights.bits'
    """
    return ".".join(str(p) for p in path) or "spec"


@dataclass(frozen=True)
class Document:
    """A parsed YAML document.

    Attributes:
        value: plain dictionaries, lists and scalars.
        lines: the line (from 1) of each key path.
        settings: what was overridden from the command line, by key path.
        stands_for: what messages name in place of the path, where no file was read.
    """

    path: Path
    value: Any
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    settings: Mapping[KeyPath, str] = field(default_factory=dict)
    stands_for: str = ""

    @property
    def folder(self) -> Path:
        """The folder that relative paths start from."""
        return self.path.resolve().parent

    def where(self, path: KeyPath) -> str:
        """Return ``file:line`` of the nearest enclosing value that has a line, or its setting."""
        while path and path not in self.lines and path not in self.settings:
            path = path[:-1]
        line = self.lines.get(path)
        shown = self.stands_for or str(self.path)
        place = shown if line is None else f"{shown}:{line}"
        return self.settings.get(path, place)

    def error(self, path: KeyPath, problem: str, remedy: str) -> SpecError:
        """Return the error for the value of a key."""
        return SpecError(dotted(path), problem, remedy, where=self.where(path))


# What ruamel.yaml also raises, for brackets a thousand deep or numbers of thousands of digits.
_LIBRARY = (AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_QUOTED = "write a path with ${NAME} in quotes"
_MOST_VALUES = 100_000
_DEEPEST = 50
_NAMED = ("metric", "observer")  # keys whose text is short for a section with a name
_BEYOND = 1 << 63  # what arrays and files have no numbers for


def read_document(path: Path) -> Document:
    """Read a YAML file.

    Raises:
        SpecError: it is missing, not text, or not YAML.
    """
    tree = _tree(_text(path), path)
    lines: dict[KeyPath, int] = {}
    try:
        value = _plain(tree, (), lines)
    except SpecError as error:  # its line is the last that was read
        raise error.at(f"{path}:{next(reversed(lines.values()), 1)}") from None
    if not isinstance(value, dict):
        subject = f"spec {str(path)!r}"
        raise SpecError(subject, "is not a mapping of keys", "see compress init", where=f"{path}:1")
    return Document(path, value, lines)


def _text(path: Path) -> str:
    subject = f"spec {str(path)!r}"
    try:
        return path.read_text(encoding="utf-8")
    except IsADirectoryError as error:
        raise SpecError(
            subject,
            "is a folder",
            f"give a YAML file; compress init {argument(path)} writes one for a model",
        ) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SpecError(
            subject, "does not exist", "give the path of a YAML file; compress init writes one"
        ) from error
    except UnicodeDecodeError as error:
        raise SpecError(
            subject,
            f"is not text in UTF-8 ({error.reason} at byte {error.start})",
            "save it as UTF-8, or if it is a model: "
            f"compress init {argument(path)} writes a spec for it",
        ) from error
    except OSError as error:
        raise SpecError(
            subject,
            f"cannot be read ({error})",
            "give a YAML text file; compress init writes one for a model",
        ) from error


def _tree(text: str, path: Path) -> Any:
    """Return what a YAML text holds, with the places of keys."""
    try:
        return YAML(typ="rt").load(StringIO(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark
        line = mark.line + 1 if mark is not None else 1
        problem = str(error.problem).strip()
        variable = any("${" in here for here in text.splitlines()[line - 1 : line])
        raise SpecError(
            "YAML",
            f"{error.context}, {problem}" if problem.startswith("but ") else problem,
            _QUOTED if variable else "check indentation, brackets and quotes",
            where=f"{path}:{line}",
        ) from error
    except YAMLError as error:
        reason = str(error).splitlines()[0]
        raise SpecError("YAML", reason, "check the file", where=str(path)) from error
    except _LIBRARY as error:
        reason = f"{type(error).__name__}: {str(error)[:80]}"
        problem = f"cannot be read ({reason})"
        raise SpecError(f"spec {str(path)!r}", problem, "check its brackets") from error


def override(document: Document, settings: Sequence[str]) -> Document:
    """Apply ``key.path=value`` settings from the command line.

    Text that is short for a section becomes it: ``metric.expect=90`` makes ``metric: accuracy``
    to ``{name: accuracy, expect: 90}``.

    Raises:
        SpecError: a setting is malformed or its path leads nowhere.
    """
    value, lines, given = deepcopy(document.value), dict(document.lines), dict(document.settings)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise SpecError(f"--set {setting}", "is not key=value", "write passes.1.epochs=5")
        parts = tuple(int(p) if re.fullmatch(r"\d+", p) else p for p in key.split("."))
        try:
            parsed = _plain(YAML(typ="rt").load(StringIO(text)), parts, {})
        except (YAMLError, *_LIBRARY) as error:
            raise SpecError(f"--set {setting}", "has a malformed value", "quote it") from error
        except SpecError as error:
            raise error.at(f"--set {setting}") from None
        place = _assign(value, parts, parsed, setting)
        lines = {path: line for path, line in lines.items() if path[: len(place)] != place}
        given = {path: text for path, text in given.items() if path[: len(place)] != place}
        given[place] = f"--set {setting}"
    return replace(document, value=value, lines=lines, settings=given)


def _assign(value: Any, parts: KeyPath, new: Any, setting: str) -> KeyPath:
    """Put a value in place, and return that place."""
    place: KeyPath = ()
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            place += (part,)
            if last:
                value[part] = new
            value = value[part]
        elif isinstance(value, dict):
            place += (str(part),)
            if last:
                value[str(part)] = new
                return place
            below = value.get(str(part))
            if below is None:  # absent, or a key with nothing after it
                value[str(part)] = {}
            elif isinstance(below, str) and part in _NAMED:
                value[str(part)] = {"function" if ":" in below else "name": below}
            value = value[str(part)]
        else:
            above = dotted(place)
            single = f"{above} is a single value, without keys"
            remedy = "lists count from 0" if isinstance(value, list) else single
            what = dotted(parts[: depth + 1])
            raise SpecError(f"--set {setting}", f"{what} does not exist", remedy)
    return place


def _plain(node: Any, path: KeyPath, lines: dict[KeyPath, int]) -> Any:
    if len(lines) > _MOST_VALUES or len(path) > _DEEPEST:  # by anchors, perhaps
        raise SpecError("YAML", "becomes too large or too deep", "write it without anchors")
    if isinstance(node, CommentedMap):
        made: dict[str, Any] = {}
        for key, child in node.items():
            here = (*path, str(key))
            if key in (node.lc.data or ()):  # not where it came with a merge key
                lines[here] = node.lc.key(key)[0] + 1
            made[str(key)] = _plain(child, here, lines)
        return made
    if isinstance(node, CommentedSeq):
        items = []
        for index, child in enumerate(node):
            here = (*path, index)
            if index in (node.lc.data or ()):  # not after a tag
                lines[here] = node.lc.item(index)[0] + 1
            items.append(_plain(child, here, lines))
        return items
    if isinstance(node, ScalarBoolean):
        return bool(node)
    if isinstance(node, int) and not isinstance(node, bool):  # in hexadecimal, a ScalarInt
        if abs(node) >= _BEYOND:
            raise SpecError(dotted(path), "has more than 63 bits", "give a smaller number")
        return int(node)
    if isinstance(node, ScalarFloat):
        return float(node)
    if isinstance(node, str) and "\0" in node:
        raise SpecError(dotted(path), "holds a null character", "remove it")
    return str(node) if isinstance(node, str) else node


_PLAIN = re.compile(r"(\.{0,2}/)*[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def seen_from(folder: Path, place: Path) -> str:
    """Return the path of a file or folder as a spec in a folder writes it; links are kept.

    A dollar sign is written twice: a single one begins the name of an environment variable. A tilde
    gets ``./`` before it: alone it stands for a user's folder.
    """
    whole = place.resolve() if place.is_dir() else place.parent.resolve() / place.name
    path = Path(os.path.relpath(whole, folder.resolve())).as_posix().replace("$", "$$")
    return f"./{path}" if path.startswith("~") else path


def scalar(value: Any) -> str:
    """Write a value as a YAML scalar; text is quoted where it would be read as something else.

    >>> scalar("layer1.0.conv1"), scalar("no"), scalar(8)
    ('layer1.0.conv1', '"no"', '8')
    """
    if not isinstance(value, str):
        return json.dumps(value)
    plain = _PLAIN.fullmatch(value) is not None and value.lower() not in _WORDS
    return value if plain else '"' + "".join(map(_escaped, value)) + '"'


def _escaped(character: str) -> str:
    """Write a character as in a double-quoted scalar."""
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else f"\\U{ord(character):08x}"
