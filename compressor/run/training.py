"""What a run hands to a pass that trains, and what the result of a training depends on."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from compressor import catalog
from compressor.data import Data
from compressor.errors import CompressorError
from compressor.files import disk_errors
from compressor.model import OpenedModel
from compressor.other_model import open_other_model, option_path
from compressor.run.samples import RunSamples
from compressor.run.workspace import Workspace, metric_code
from compressor.spec.validate import dotted
from compressor.types.carrier import Carrier
from compressor.types.passes import Pass
from compressor.types.tensors import Batch
from compressor.types.training import Rows, Training
from compressor.user_code import code_digest, importable, load_symbol

_RANDOM_ACCESS = "compressor.calibration.sources.random_access:RandomAccess"
_LIBRARY = "accelerate"  # it computes, though only where something is trained


class _Access(Protocol):
    """Samples by number; see ``compressor.calibration.sources.random_access``."""

    @property
    def samples(self) -> int: ...

    @property
    def random(self) -> bool: ...

    def batch(self, rows: Rows, seed: Sequence[int]) -> Batch: ...


@dataclass(frozen=True)
class RunTrainingData:
    """The run's training data; see :class:`compressor.types.training.TrainingData`.

    It can be sent to other processes, which then import the user's code themselves.

    Attributes:
        data: as the spec names them.
        access: the same samples by number.
        folder: the spec's, where the user's code lies.
    """

    data: Data
    access: _Access
    folder: Path

    def __reduce__(self) -> tuple[Callable[..., RunTrainingData], tuple[Path, bytes]]:
        """Let the user's code be found where it is unpickled."""
        return _unpickled, (self.folder, pickle.dumps((self.data, self.access)))

    @property
    def samples(self) -> int:
        """How many there are."""
        return self.access.samples

    @property
    def target(self) -> str | None:
        """Name of the array with the right answers, if there is one."""
        return self.data.target

    @property
    def random(self) -> bool:
        """The transform draws random numbers."""
        return self.access.random

    @property
    def digest(self) -> str:
        """Hash of the content and of the code that transforms it."""
        return self.data.digest

    def batch(self, rows: Rows, seed: Sequence[int]) -> Batch:
        """Return samples in the order of ``rows``, transformed.

        Raises:
            DataError: the source cannot be read, or the transform fails.
        """
        try:
            return self.access.batch(rows, seed)
        except CompressorError as error:
            raise error.at(self.data.where) from error.__cause__


def _unpickled(folder: Path, content: bytes) -> RunTrainingData:
    with importable([folder]):
        data, access = pickle.loads(content)
    return RunTrainingData(data, access, folder)


def open_training_data(workspace: Workspace) -> RunTrainingData:
    """Open the spec's training data by number; what is a stream is copied to the store first.

    Raises:
        CompressorError: they cannot be read, or the disk is full.
    """
    data, ranks = workspace.plan.data["training"], workspace.ranks

    def opened() -> RunTrainingData:
        with workspace.progress.stage("prepare the training data", data.samples) as advance:
            make = catalog.resolve(_RANDOM_ACCESS)
            access = make(data.source, workspace.store.cache, advance)
            return RunTrainingData(data, access, workspace.plan.spec.folder)

    try:
        if workspace.first:  # which makes the copy; the others find it
            found = opened()
            ranks.wait()
        else:
            ranks.wait()
            found = opened()
    except CompressorError as error:
        raise error.at(data.where) from error.__cause__
    return found


@dataclass(frozen=True)
class References:
    """What the options of one of the run's passes name: functions of the user's, and models.

    Attributes:
        workspace: the run.
        index: which pass.
    """

    workspace: Workspace
    index: int

    @property
    def declared(self) -> Pass:
        """The pass."""
        return self.workspace.plan.spec.passes[self.index]

    def symbol(self, reference: str, where: str) -> Callable[..., Any]:
        """Import a function of the user's; ``where`` is the option that names it.

        Raises:
            SpecError: it does not import.
        """
        with importable([self.workspace.plan.spec.folder]):
            return load_symbol(reference, dotted(option_path(self.index, where)))

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
        """Return what a result depends on beside the options themselves, for its key."""
        found: dict[str, Any] = {}
        if self.declared.code:
            found["code"] = {r: code_digest(self.symbol(r, "code")) for r in self.declared.code}
        if self.declared.other_models:
            found["models"] = {
                option: self._opened(keys, option).digest()
                for option, keys in self.declared.other_models.items()
            }
        return found

    def _opened(self, keys: Mapping[str, Any], option: str) -> OpenedModel:
        plan = self.workspace.plan
        path = option_path(self.index, option)
        return open_other_model(plan.spec, keys, path, plan.model.carrier.inputs)


def training_parts(workspace: Workspace) -> dict[str, Any]:
    """Return what the result of a training depends on beside model and options, for its key."""
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
        "library": {_LIBRARY: _version(_LIBRARY)},
    }


def make_training(
    workspace: Workspace, references: References, folder: Path, carrier: Carrier
) -> Training:
    """Return what a pass trains with.

    Args:
        workspace: the run.
        references: what the pass's options name.
        folder: for the state; it exists.
        carrier: what is trained.

    Raises:
        CompressorError: the training data cannot be read, or the disk is full.
    """
    plan, store = workspace.plan, workspace.store
    data = open_training_data(workspace)
    with disk_errors(store.cache):
        store.cache.mkdir(parents=True, exist_ok=True)
    return Training(
        data=data,
        batch=data.data.batch,
        metric=plan.training_metric,
        folder=folder,
        cache=store.cache,
        source=workspace.baseline,
        open_model=references.model,
        samples=RunSamples(carrier.inputs, plan.data.get("calibration"), plan.spec.seed),
        ranks=workspace.ranks,
        stage=workspace.progress.stage,
        load_symbol=references.symbol,
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
