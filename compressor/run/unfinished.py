"""Trainings that were begun and not ended: where their states lie, and to which spec they belong.

The folder of a training is named by the key of its result, so only the very same training finds it
again. Beside the states lies a file with what the key was made from, to be able to tell people why
a state that they expect to be used is not.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from compressor.files import disk_errors, json_text, remove_stale_staging, write_text
from compressor.store import Store
from compressor.types.options import kebab

_PARTS = "training.json"
_SHOWN = 3  # differences that a note tells
# What a key holds as a hash, and so cannot be shown.
_OPAQUE = {
    "upstream": "another model to start from",
    "data": "other calibration data",
    "training.data": "other training data",
    "metric.code": "other code of the metric",
    "code": "other code of the user's",
}
_PREFIXES = {
    "options.": "",
    "versions.": "",
    "library.": "",
    "training.": "data.training.",
    "batch": "data.calibration.batch",
    "metric.name": "metric",
    "ranks": "processes",
    "version": "version of the pass",
}


def begin(store: Store, key: str, parts: Mapping[str, Any], base: Path) -> tuple[str, ...]:
    """Make the folder of a training, or find it again; say which states of others are not used.

    Args:
        store: has the folders.
        key: of the training's result.
        parts: what the key was made from; ``name`` is the pass's.
        base: the folder that paths in notes start from.

    Raises:
        CompressorError: the disk is full, or the folder cannot be written.
    """
    folder = store.training(key)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale_staging(folder)
        if not (folder / _PARTS).is_file():
            write_text(folder / _PARTS, json_text(dict(parts)))
    notes = []
    for other in store.trainings():
        saved = _read(other) if other != folder else None
        if saved is None or saved.get("name") != parts["name"]:
            continue
        if not any(path.name != _PARTS for path in other.iterdir()):
            shutil.rmtree(other, ignore_errors=True)  # it came to no state
            continue
        place = Path(os.path.relpath(other, base)).as_posix()
        notes.append(
            f"a saved state of {parts['name']} at {place} belongs to another spec "
            f"({_told(differences(saved, parts))}): it is not used; --fresh removes it"
        )
    return tuple(notes)


def end(store: Store, key: str) -> None:
    """Remove the state of a training whose result has been stored."""
    shutil.rmtree(store.training(key), ignore_errors=True)


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Say in which parts two keys differ, each such as ``epochs 3, here 5``."""
    before, now = dict(_leaves(saved)), dict(_leaves(own))
    found = []
    for name in sorted(before.keys() | now.keys(), key=_rank):
        if before.get(name) == now.get(name):
            continue
        opaque = next((text for part, text in _OPAQUE.items() if _within(name, part)), None)
        if opaque is None and _within(name, "models"):
            opaque = f"another model as {name.removeprefix('models.')}"
        shown = (_value(before.get(name)), _value(now.get(name)))
        found.append(opaque or f"{_label(name)} {shown[0]}, here {shown[1]}")
    return list(dict.fromkeys(found))


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        parts = json.loads((folder / _PARTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # killed before anything was saved
        return None
    return parts if isinstance(parts, dict) else None


def _told(found: list[str]) -> str:
    rest = len(found) - _SHOWN
    return "; ".join(found[:_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _leaves(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item


def _rank(name: str) -> tuple[bool, str]:
    return not name.startswith("options."), name  # what people change most comes first


def _within(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _label(name: str) -> str:
    for prefix, label in _PREFIXES.items():
        if name == prefix or (prefix.endswith(".") and name.startswith(prefix)):
            return kebab(label + name.removeprefix(prefix))
    return name


def _value(value: Any) -> str:
    if value is None or value in ({}, []):
        return "none"
    return value if isinstance(value, str) else json.dumps(value)
