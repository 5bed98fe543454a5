"""Whole feeds to time artifacts on, for inputs that samples cannot be stacked in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from compressor.calibration.sources.feeds import FeedFolder
from compressor.calibration.sources.file_source import PathSource
from compressor.calibration.sources.folds import fold_numbers
from compressor.errors import DataError
from compressor.lab.bench.inputs import MOST_INPUTS
from compressor.lab.verify.manifests import MANIFEST, read_manifest
from compressor.run.recurrence import Recurrence
from compressor.spec.keys import FEEDS
from compressor.spec.load import FACTORY, DataEntry, data_entry
from compressor.spec.source_text import Document
from compressor.types.tensors import Batch, TensorSpec

_ROLES = ("evaluation", "calibration")


def feeds_of_runs(
    paths: Sequence[Path], inputs: Sequence[TensorSpec], *, branches: bool
) -> list[Batch]:
    """Return the feeds that the first run among some folders was evaluated on; none if it has none.

    Only files are read. Feeds that code makes or transforms are left out, because opening an output
    folder runs no code.

    Args:
        inputs: what the artifacts take.
        branches: the time may depend on the values; up to 64 feeds are taken, as where their shapes
            differ, and otherwise one.

    Raises:
        ModelError: the manifest of a run is damaged.
        DataError: a feed is unusable, or does not fit the inputs.
        SpecError: the files are no longer where the run read them.
    """
    for path in paths:
        if path.is_dir() and (path / MANIFEST).is_file():
            feeds = _of_run(path, read_manifest(path).content, inputs)
            if feeds:
                shapes = {tuple((n, a.shape) for n, a in feed.items()) for feed in feeds}
                return feeds if branches or len(shapes) > 1 else feeds[:1]
    return []


def _of_run(folder: Path, manifest: Mapping[str, Any], inputs: Sequence[TensorSpec]) -> list[Batch]:
    stated = manifest.get("spec_file")
    data = manifest["spec"].get("data") or {}
    role = next((r for r in _ROLES if (data.get(r) or {}).get("samples") == FEEDS), None)
    if stated is None or role is None or FACTORY in data[role] or data[role].get("transform"):
        return []
    spec_file = (folder / str(stated)).resolve()
    # None in a manifest stands for a key that the spec does not have.
    value = {key: each for key, each in data[role].items() if each is not None}
    document = Document(spec_file, manifest["spec"])
    entry = data_entry(role, value, document)
    return [_checked(feed, inputs, entry) for feed in _read(entry, inputs)]


def _read(entry: DataEntry, inputs: Sequence[TensorSpec]) -> list[Batch]:
    assert isinstance(entry.options, PathSource)
    keys, state = entry.keys, tuple(entry.keys.state)
    fold = fold_numbers(keys.fold)
    source = FeedFolder(entry.options.path, entry.options.fields, keys.feeds, state, fold)
    feeds = list(islice(source.batches(1), MOST_INPUTS))
    if not state:
        return feeds
    # The first step of a sequence needs no output, whose places are therefore not looked up.
    steps = Recurrence(tuple(inputs), dict.fromkeys(state, 0), 1, f"{entry.role} data")
    return [steps.first(feed) for feed in feeds]


def _checked(feed: Batch, inputs: Sequence[TensorSpec], entry: DataEntry) -> Batch:
    for spec in inputs:
        wrong = "it is missing"
        if spec.name in feed:
            array = feed[spec.name]
            wrong = spec.mismatch(array.shape, str(array.dtype)) or ""
        if wrong:
            subject = f"{entry.role} data of the run, array {spec.name!r}"
            raise DataError(subject, wrong, "give --data FEED.npz, or run the spec again")
    return {spec.name: feed[spec.name] for spec in inputs}
