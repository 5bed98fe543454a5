"""Everything that a run hands to a training pass, and the state of unfinished trainings."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from compressor.calibration.collect import collect_statistics
from compressor.calibration.sources.random_access import RandomAccess
from compressor.errors import located
from compressor.files import disk_errors, json_text, remove_stale_staging, write_text
from compressor.run.evaluate import RunSamples
from compressor.run.model import OpenedModel, open_other_model, option_path
from compressor.run.store import Store
from compressor.run.workspace import Workspace, metric_code
from compressor.spec.source_text import dotted
from compressor.spec.user_code import code_digest, importable
from compressor.types.carrier import Carrier
from compressor.types.data import share
from compressor.types.options import kebab
from compressor.types.passes import Pass, TrainPass
from compressor.types.statistics import Request
from compressor.types.tensors import Batch
from compressor.types.training import Rows, Training

_LIBRARY = "accelerate"  # used only for training


@dataclass(frozen=True)
class RunTrainingData:
    """The run's training data; see :class:`compressor.types.training.TrainingData`.

    It can be pickled for other processes, which then import the user's code themselves.

    Attributes:
        target: name of the array with the right answers, if there is one.
        digest: hash of the content and of the code that transforms it.
        where: place in the spec.
        access: the samples by number.
        folder: the spec's folder, which holds the user's code.
    """

    target: str | None
    digest: str
    where: str
    access: RandomAccess
    folder: Path

    def __reduce__(self) -> tuple[Callable[..., RunTrainingData], tuple[Path, bytes]]:
        """Make the user's code importable where it is unpickled."""
        content = (self.target, self.digest, self.where, self.access)
        return _unpickled, (self.folder, pickle.dumps(content))

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.access.samples

    @property
    def random(self) -> bool:
        """The transform draws random numbers."""
        return self.access.random

    def batch(self, rows: Rows, seed: Sequence[int]) -> Batch:
        """Return samples in the order of ``rows``, transformed.

        Raises:
            DataError: the source cannot be read, or the transform fails.
        """
        with located(self.where):
            return self.access.batch(rows, seed)


def _unpickled(folder: Path, content: bytes) -> RunTrainingData:
    with importable([folder]):
        target, digest, where, access = pickle.loads(content)
    return RunTrainingData(target, digest, where, access, folder)


def open_training_data(workspace: Workspace) -> RunTrainingData:
    """Open the spec's training data by sample number; streams are copied to the store first.

    Raises:
        CompressorError: they cannot be read, or the disk is full.
    """
    data, ranks = workspace.plan.data["training"], workspace.ranks

    def opened() -> RunTrainingData:
        with workspace.progress.stage("prepare the training data", data.samples) as advance:
            note = workspace.progress.note
            access = RandomAccess(data.source, workspace.store.cache, advance, note)
            folder = workspace.plan.spec.folder
            return RunTrainingData(data.target, data.digest, data.where, access, folder)

    with located(data.where):
        if not workspace.first:  # the first makes the copy that the others find
            ranks.wait()
        training_data = opened()
        if workspace.first:
            ranks.wait()
    return training_data


@dataclass(frozen=True)
class References:
    """The user's functions and the models that the options of a pass name."""

    workspace: Workspace
    index: int

    @property
    def declared(self) -> Pass:
        """The pass."""
        return self.workspace.plan.spec.passes[self.index]

    @property
    def label(self) -> str:
        """The pass's name, with a number if an earlier pass has the same."""
        name = self.declared.name
        before = [p.name for p in self.workspace.plan.spec.passes[: self.index]].count(name)
        return f"{name} {before + 1}" if before else name

    def symbol(self, reference: str, where: str) -> Callable[..., Any]:
        """Import a function of the user's; ``where`` is the option that names it.

        Raises:
            SpecError: it does not import.
        """
        symbol: Callable[..., Any] = self.workspace.plan.spec.symbol(
            reference, dotted(option_path(self.index, where))
        )
        return symbol

    def model(self, keys: Mapping[str, Any], where: str) -> Carrier:
        """Open a model with its weights; ``where`` is the option that names it.

        Raises:
            CompressorError: it cannot be opened.
        """
        with self.workspace.progress.stage(f"load {where}"):
            opened = self._opened(keys, where)
            opened.load()
        return opened.carrier

    def parts(self) -> dict[str, Any]:
        """Return the parts of a result's key besides the options themselves."""
        parts: dict[str, Any] = {}
        if self.declared.code:
            parts["code"] = {r: code_digest(self.symbol(r, "code")) for r in self.declared.code}
        if isinstance(self.declared, TrainPass) and self.declared.searches:
            parts["search"] = self.workspace.plan.data["search"].digest
        if self.declared.other_models:
            parts["models"] = {
                option: self._opened(keys, option).digest()
                for option, keys in self.declared.other_models.items()
            }
        return parts

    def _opened(self, keys: Mapping[str, Any], option: str) -> OpenedModel:
        plan = self.workspace.plan
        path = option_path(self.index, option)
        return open_other_model(plan.spec, keys, path, plan.model.carrier.inputs)


def training_parts(workspace: Workspace) -> dict[str, Any]:
    """Return the parts of a training's key besides model and options."""
    data, metric = workspace.plan.data["training"], workspace.plan.training_metric
    return {
        "training": {"data": data.digest, "batch": data.batch},
        "metric": None
        if metric is None
        else {
            "name": metric.name,
            "code": metric_code(metric),
            "higher_is_better": metric.higher_is_better,
            "against_float": metric.against_float,
        },
        "ranks": workspace.ranks.size,
        **({} if workspace.options.loop is None else {"loop": workspace.options.loop.digest}),
        "library": {_LIBRARY: _version(_LIBRARY)},
    }


def make_training(
    workspace: Workspace, references: References, folder: Path, carrier: Carrier
) -> Training:
    """Return the means of training for a pass.

    Args:
        references: the functions and models that the pass's options name.

    Raises:
        CompressorError: the training data cannot be read, or the disk is full.
    """
    plan, store = workspace.plan, workspace.store
    data = open_training_data(workspace)
    with disk_errors(store.cache):
        store.cache.mkdir(parents=True, exist_ok=True)

    def collected(
        model: Carrier, batches: Iterable[Batch], requests: Sequence[Request]
    ) -> Mapping[str, Any]:
        ranks = workspace.ranks
        return collect_statistics(model, share(batches, ranks), requests, ranks=ranks)

    return Training(
        data=data,
        batch=plan.data["training"].batch,
        metric=plan.training_metric,
        folder=folder,
        cache=store.cache,
        source=workspace.baseline,
        open_model=references.model,
        samples=RunSamples(
            carrier.inputs, plan.data.get("calibration"), plan.spec.seed, carrier=carrier
        ),
        collect=collected,
        ranks=workspace.ranks,
        stage=workspace.progress.stage,
        load_symbol=references.symbol,
        note=workspace.progress.note,
        search=plan.data.get("search"),
        loop=workspace.options.loop,
        base=plan.spec.folder,
        callbacks=workspace.options.callbacks,
        label=references.label,
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


_PARTS = "training.json"
_SHOWN = 3  # differences in a note
# Parts of a key that are hashes and cannot be shown.
_OPAQUE = {
    "upstream": "another model to start from",
    "data": "other calibration data",
    "training.data": "other training data",
    "search": "other search data",
    "metric.code": "other code of the metric",
    "loop": "a loop of the program's own",
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
    """Create the folder of a training, or find it again; return notes on unused states of others.

    Args:
        parts: the parts of the key; ``name`` is the pass's.
        base: the folder that paths in notes are relative to.

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
            shutil.rmtree(other, ignore_errors=True)  # it never saved a state
            continue
        place = Path(os.path.relpath(other, base)).as_posix()
        notes.append(
            f"a saved state of {parts['name']} at {place} belongs to another spec "
            f"({_summary(differences(saved, parts))}): it is not used; --fresh removes it"
        )
    return tuple(notes)


def end(store: Store, key: str) -> None:
    """Remove the state of a training whose result has been stored."""
    shutil.rmtree(store.training(key), ignore_errors=True)


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return the parts in which two keys differ, each such as ``epochs 3, here 5``."""
    before, now = dict(_leaves(saved)), dict(_leaves(current))
    texts = []
    for name in sorted(before.keys() | now.keys(), key=_rank):
        if before.get(name) == now.get(name):
            continue
        opaque = next((text for part, text in _OPAQUE.items() if _within(name, part)), None)
        if opaque is None and _within(name, "models"):
            opaque = f"another model as {name.removeprefix('models.')}"
        shown = (_value(before.get(name)), _value(now.get(name)))
        texts.append(opaque or f"{_label(name)} {shown[0]}, here {shown[1]}")
    return list(dict.fromkeys(texts))


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        parts = json.loads((folder / _PARTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # killed before anything was saved
        return None
    return parts if isinstance(parts, dict) else None


def _summary(texts: list[str]) -> str:
    rest = len(texts) - _SHOWN
    return "; ".join(texts[:_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


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
