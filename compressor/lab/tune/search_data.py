"""The samples that recipes are compared on, apart from those that judge the chosen ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from compressor.calibration.sources.class_folders import ClassFolderSource
from compressor.calibration.sources.folds import fold_numbers
from compressor.calibration.sources.tokens import TokenSource
from compressor.files import json_sha256
from compressor.lab.tune.from_model import is_model
from compressor.run.data import Data, open_data
from compressor.run.metrics.class_metrics import fitted
from compressor.run.metrics.judged import compared_parts
from compressor.run.metrics.metrics import Metric, resolve_metric
from compressor.run.plan import Plan
from compressor.spec.keys import FEEDS
from compressor.spec.load import DataEntry
from compressor.types.data import Source, SourceInfo
from compressor.types.tensors import Batch, cut, fixed_batch, samples_in

_PARTS = (256, 1024)  # samples after which a candidate may be dropped
_MOST = 2048
_LEAST = 128  # samples beyond those that calibrate, to be worth taking
_HELD = 4  # a quarter of the calibration data, where there are no others
_ENOUGH = 1024  # samples that calibrate as well as more would
_LEAST_HELD = 32


@dataclass(frozen=True)
class Slice:
    """Some of a source's samples, from ``start`` to before ``stop``."""

    source: Source
    start: int
    stop: int | None

    def info(self) -> SourceInfo:
        """Describe the source."""
        info = self.source.info()
        known = info.samples is not None
        end = info.samples if self.stop is None else min(self.stop, info.samples or self.stop)
        return replace(info, samples=max(0, (end or 0) - self.start) if known else None)

    def digest(self) -> str:
        """Return a hash of the content and of which part of it this is."""
        return json_sha256([self.source.digest(), self.start, self.stop])

    def batches(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Yield batches of up to ``size`` samples, at most ``limit`` samples in all."""
        stop = self.stop
        if limit is not None:
            stop = self.start + limit if stop is None else min(stop, self.start + limit)
        place = 0
        for batch in self.source.batches(size, stop):
            count = samples_in(batch)
            if place + count > self.start:
                yield cut(batch, max(self.start - place, 0), count)
            place += count


@dataclass(frozen=True)
class SearchData:
    """Samples to search on.

    Attributes:
        parts: the samples in the order in which they are looked at.
        metric: what they are judged by.
        same: it is the metric of the spec, so that a drop here is one there.
        tells: how much the spec's metric may lose shows. Without labels, what changes against the
            float model does so for shares: right answers, and edits of what was read, change no
            more than that, and F1 hardly more. An error of numbers, or a rank, also depends on
            the label.
        other: what judges them where the metric is a figure that they do not define.
        calibration: keys of the calibration data that change, so that both share no sample.
        words: where they are from.
    """

    parts: tuple[Data, ...]
    metric: Metric
    same: bool
    tells: bool
    other: Metric
    calibration: Mapping[str, Any]
    words: str

    def without_figure(self) -> SearchData:
        """Return the same samples for a metric whose figure they do not define."""
        return replace(self, metric=self.other, same=False, tells=False)


def search_data(plan: Plan) -> SearchData:
    """Choose the search data of a spec.

    These are ``data.search``; else what the source of the calibration data holds beyond the samples
    that calibrate, or of files in class folders every second one; else a quarter of the calibration
    data, or what they have beyond 1024 samples, which then calibrate no more.

    Raises:
        CompressorError: a source is unusable.
    """
    spec, given = plan.spec, plan.data.get("search")
    if given is not None:
        own = not is_model(spec.document.path)
        words = "data.search" if own else "samples that neither calibrate nor judge"
        return _search(plan, given, {}, words)
    calibration = plan.data["calibration"]
    if calibration.feeds or calibration.recurrence is not None:
        words = "the calibration data: whole feeds are not parted"
        return _search(plan, calibration, {}, words)
    entry = spec.data["calibration"]
    if isinstance(entry.options, ClassFolderSource):
        return _of_class_folders(plan, entry)
    used, beyond = calibration.samples, _unlimited(plan)
    total = None if beyond is None else beyond.samples
    if used is None:
        return _search(plan, calibration, {}, "the calibration data, whose number is not known")
    if beyond is not None and total is not None and total - used >= _LEAST:
        source = Slice(beyond.source, used, min(total, used + _MOST))
        words = f"samples {used + 1} to {min(total, used + _MOST)} of the calibration source"
        return _search(plan, replace(beyond, role="search", source=source), {}, words)
    held = max(used // _HELD, min(used - _ENOUGH, _MOST)) // calibration.batch * calibration.batch
    if held < _LEAST_HELD or entry.keys.samples == FEEDS:
        words = "the calibration data themselves: they are too few to hold some back"
        return _search(plan, calibration, {}, words)
    source = Slice(calibration.source, used - held, used)
    words = f"the last {held} of {used} calibration samples, which do not calibrate"
    left = {"samples": used - held}
    return _search(plan, replace(calibration, role="search", source=source), left, words)


def _of_class_folders(plan: Plan, entry: DataEntry) -> SearchData:
    """Return every second file: the first ones, or the last, are of a few classes only."""
    number, of = fold_numbers(entry.keys.fold)
    ours, theirs = f"{number}/{2 * of}", f"{number + of}/{2 * of}"
    fixed = fixed_batch(plan.model.carrier.inputs) or 1
    data = _reopened(plan, entry, {"fold": theirs, "samples": _MOST // fixed * fixed})
    found = (data.samples or 0) // fixed * fixed
    left = (_reopened(plan, entry, {"fold": ours}).samples or 0) // fixed * fixed
    if found < _LEAST_HELD:
        words = "the calibration data themselves: they are too few to hold some back"
        return _search(plan, plan.data["calibration"], {}, words)
    data = _reopened(plan, entry, {"fold": theirs, "samples": found})
    words = f"{found} files of the calibration source, which do not calibrate"
    return _search(plan, replace(data, role="search"), {"fold": ours, "samples": left}, words)


def _unlimited(plan: Plan) -> Data | None:
    """Return the calibration data without their limit of samples; ``None`` if they have none."""
    entry = plan.spec.data["calibration"]
    if entry.keys.samples is None or entry.options is None:
        return None
    return _reopened(plan, entry, {"samples": None})


def _reopened(plan: Plan, entry: DataEntry, keys: Mapping[str, Any]) -> Data:
    """Return the calibration data with other keys of a source."""
    carrier = plan.model.carrier
    changed = entry.keys.model_copy(update=dict(keys))
    limit = None if changed.fold is not None else changed.samples
    options = None if entry.options is None else entry.options.model_copy(update={"samples": limit})
    whole = {"calibration": replace(entry, options=options, keys=changed)}
    spec = replace(plan.spec, data=whole)
    return open_data(spec, carrier.inputs, carrier.outputs)["calibration"]


def _search(plan: Plan, data: Data, calibration: Mapping[str, Any], words: str) -> SearchData:
    metric, spec = plan.metric, plan.spec
    assert metric is not None
    judged = plan.data["evaluation"].target
    data = _with_next_tokens(plan, data, judged)
    same = metric.against_float or data.target is not None or judged is None
    parts = compared_parts(plan.model.carrier, data)
    decides = metric.about_classes or metric.of_numbers
    name = "agreement" if decides else "cosine"
    other = resolve_metric(name, False, spec.symbol, spec.where("metric"), parts=parts)
    other = fitted(other, plan.model.carrier.outputs)
    tells = metric.unit == "%"
    if not same and tells and not metric.needs_labels:
        where = spec.where("metric")
        metric = resolve_metric(metric.name, False, spec.symbol, where, parts=parts)
    elif not same:
        tells = tells and metric.figure is None and decides
        metric = other
    # What part of the samples gives of a figure is not what all give.
    pieces = [data] if metric.figure is not None else _parted(data)
    return SearchData(tuple(pieces), metric, same, tells, other, calibration, words)


def _with_next_tokens(plan: Plan, data: Data, target: str | None) -> Data:
    """Return text that carries the tokens that follow: it has its labels in itself."""
    entry = plan.spec.data.get("calibration")
    held = data.source if isinstance(data.source, Slice) else None
    source = data.source if held is None else held.source
    if not isinstance(source, TokenSource) or not source.in_windows or data.target is not None:
        return data
    if target is None or entry is None:
        return data
    fields = {**source.fields, target: target} if source.fields else {}  # none stands for all
    labelled: Any = source.model_copy(update={"fields": fields})
    whole = labelled if held is None else replace(held, source=labelled)
    return replace(data, source=whole, target=target)


def _parted(data: Data) -> Iterator[Data]:
    """Yield the data in parts, so that not all need be looked at."""
    if data.feeds or data.recurrence is not None or data.samples is None:
        yield data
        return
    ends = [n // data.batch * data.batch for n in _PARTS if n // data.batch]
    ends = [n for n in ends if n < data.samples]
    for start, stop in zip([0, *ends], [*ends, data.samples], strict=True):
        part = replace(data, role="search", source=Slice(data.source, start, stop))
        yield part.cached()  # for all candidates
