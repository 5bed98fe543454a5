"""Checks of data: what is refused, and doubts about verdicts."""

from __future__ import annotations

import filecmp
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from compressor.calibration.sources.class_folders import ClassFolderSource
from compressor.calibration.sources.file_source import PathSource
from compressor.calibration.sources.folds import fold_numbers
from compressor.calibration.sources.tokens import TokenSource
from compressor.errors import SpecError, printable
from compressor.graph.costs import cannot_run
from compressor.models.onnx.checks import foreign_operators
from compressor.run.evaluate import Evaluation
from compressor.run.metrics.metrics import Metric
from compressor.run.verdicts.verdicts import COPIES, TRAINED_ON
from compressor.spec.keys import DataKeys
from compressor.spec.load import DataEntry, Spec
from compressor.types.carrier import Capability, Carrier
from compressor.types.passes import TrainPass
from compressor.types.tensors import Array, Batch

_COPIES = 0.01  # of the samples
_LINES, _CUT = 1000, 0.01  # lines that are looked at, and the share that is not worth a word
_MOST = 0.5  # of the samples: intervals are then at least 1.4 times too narrow
_SEEN = {
    "calibration": ("calibrate", "which flatters it"),
    "training": ("train", "so that it says nothing of others"),
}
_CHANGED_DB, _NAMED = 10.0, 3  # of outputs: a tenth of their variance, and those that are named
_FARTHEST = 16.0  # between values of one kind of data: pixels of 255 and of 1 are farther apart


def data_doubts(
    spec: Spec, carrier: Carrier, samples: Mapping[str, Batch], *, calibrates: bool
) -> tuple[str, ...]:
    """Return doubts about the calibration and evaluation data.

    Args:
        carrier: the float model.
        samples: the first sample of each role.
        calibrates: a pass reads the calibration data.
    """
    doubts = [*folders_missing(spec, carrier), *judged_on(spec, "training")]
    doubts += lines_that_are_cut(spec, carrier)
    if not calibrates or not {"calibration", "evaluation"} <= samples.keys():
        return tuple(doubts)
    apart = scales_apart(samples["calibration"], samples["evaluation"])
    return (*doubts, *judged_on(spec, "calibration"), *apart)


def no_evidence(spec: Spec, evaluation: Evaluation | None) -> str:
    """Return why the evaluation samples cannot show that a limit holds; empty if they can.

    Args:
        evaluation: of the float model; ``None`` where nothing was judged.
    """
    if evaluation is None:
        return ""
    if judged_on(spec, "training"):
        return TRAINED_ON
    share = evaluation.copies / int(evaluation.metric["samples"])
    return f"{100 * share:.0f} % {COPIES}" if share > _MOST else ""


def folders_missing(spec: Spec, carrier: Carrier) -> list[str]:
    """Return a doubt if the model scores more classes than there are evaluation folders.

    Folders are numbered in their order: one that is missing shifts the labels of all behind it.
    """
    entry = spec.data.get("evaluation")
    if entry is None or entry.keys.target is None:
        return []
    source = entry.options
    folders = source.numbered_by_order if isinstance(source, ClassFolderSource) else 0
    shape = carrier.outputs[0].shape if carrier.outputs else ()
    scores = shape[-1] if len(shape) == 2 else None
    if not folders or not isinstance(scores, int) or not scores >= 2 or folders >= scores:
        return []
    return [
        f"data.evaluation has {folders} class folders, numbered in their order, and the model "
        f"gives {scores} scores: a missing folder shifts all labels after it; name them "
        "(classes: {FOLDER: LABEL})"
    ]


def lines_that_are_cut(spec: Spec, carrier: Carrier) -> list[str]:
    """Return a doubt if evaluation lines are longer than samples.

    The model does not see the rest of a line, which may hold the answer.
    """
    entry = spec.data.get("evaluation")
    source = None if entry is None else entry.options
    if entry is None or not isinstance(source, TokenSource) or source.in_windows:
        return []
    source = source.fitted(carrier.inputs, entry.role, entry.keys.target)
    cut, lines = source.cut(_LINES)
    if cut <= _CUT * lines:
        return []
    return [
        f"{cut:,} of the first {lines:,} lines of data.evaluation are longer than "
        f"{source.length} tokens and are cut: raise length, as far as the model has positions"
    ]


def copied_samples(evaluation: Evaluation | None) -> list[str]:
    """Return a doubt if evaluation samples are copies of others, inputs and target.

    Args:
        evaluation: of the float model; ``None`` where nothing was judged.
    """
    if evaluation is None:
        return []
    samples = int(evaluation.metric["samples"])
    if evaluation.copies <= _COPIES * samples:
        return []
    return [
        f"{evaluation.copies:,} of the {samples:,} samples of data.evaluation are copies of "
        "others, which intervals count as new ones: use each once"
    ]


def outputs_not_judged(name: str, unread: Mapping[str, float | None]) -> list[str]:
    """Return a doubt if outputs that the metric does not look at have changed.

    Args:
        name: of the metric.
        unread: these outputs, with their variance over the squared difference from the float
            model's in dB; ``None`` where they are equal.
    """
    known = {output: db for output, db in unread.items() if db is not None and db < _CHANGED_DB}
    if not known:
        return []
    worst = sorted(known, key=lambda output: known[output])[:_NAMED]
    shares = {output: 10 ** (-db / 10) for output, db in known.items()}
    shown = ", ".join(f"{printable(output)!r} by {shares[output]:.0%}" for output in worst)
    others = f" and {len(known) - len(worst)} more" if len(known) > len(worst) else ""
    return [
        f"{name} does not look at all outputs, and no limit is about the others, which changed "
        f"(squared error over variance): {shown}{others}; judge them by a metric of your own"
    ]


def scales_apart(calibrating: Batch, judging: Batch) -> list[str]:
    """Return a doubt for each input of floats whose largest values are far apart.

    Different preprocessing, such as pixels that one of them divides by 255, makes ranges useless.
    """
    doubts = []
    for name in calibrating.keys() & judging.keys():
        reached = [_largest(arrays[name]) for arrays in (calibrating, judging)]
        if 0 < _FARTHEST * min(reached) < max(reached):
            doubts.append(
                f"input {name!r} reaches {reached[0]:.3g} in the first sample of data.calibration "
                f"and {reached[1]:.3g} in that of data.evaluation: prepare both alike"
            )
    return sorted(doubts)


def _largest(array: Array) -> float:
    """Return the largest magnitude of floats; 0 for other arrays, and where one is not finite."""
    if array.dtype.kind != "f" or not array.size:
        return 0.0
    largest = float(np.abs(array).max())
    return largest if math.isfinite(largest) else 0.0


def shares_samples(spec: Spec, role: str) -> bool:
    """Return whether evaluation reads samples that another role reads.

    Sources are compared by what names them, as a plan does not read their samples, and files by
    their bytes, too.
    """
    first, second = (spec.data.get(each) for each in (role, "evaluation"))
    if first is None or second is None or first.kind != second.kind:
        return False
    origins = _origin(spec, first), _origin(spec, second)
    same = origins[0] == origins[1] or _copies_of_a_file(*origins)
    return same and first.keys.inputs == second.keys.inputs and _overlap(first.keys, second.keys)


def judged_on(spec: Spec, role: Literal["calibration", "training"]) -> list[str]:
    """Return a doubt if evaluation reads samples that also calibrate or train."""
    if not shares_samples(spec, role):
        return []
    if role == "training" and not any(isinstance(each, TrainPass) for each in spec.passes):
        return []
    parted = ", or let each read every other sample (fold: 1/2 and fold: 2/2)"
    what, so = _SEEN[role]
    return [
        f"quality is judged on the samples that {what}, {so}: use other samples for "
        f"data.evaluation (--eval of compress quantize){parted}"
    ]


def check_data_is_of_use(spec: Spec, carrier: Carrier) -> None:
    """Raise ``SpecError`` for data of a model that cannot be run."""
    if carrier.offers & {Capability.RUN, Capability.BLOCKS} or not spec.data:
        return
    role = next(iter(spec.data))
    problem = cannot_run(carrier)
    remedy = "leave data out, or set model.factory, such as transformers.AutoModelForCausalLM"
    if Capability.GRAPH in carrier.offers:
        problem, remedy = why_foreign(carrier)
    raise SpecError(
        f"data.{role}",
        f"cannot be used: {problem}",
        remedy,
        where=spec.data[role].where,
    )


def check_output_apart(spec: Spec) -> None:
    """Check that results do not go where data are read: their folder would be one more class.

    Raises:
        SpecError: the output lies in a folder of data.
    """
    output = spec.output.resolve()
    for entry in spec.data.values():
        if not isinstance(entry.options, PathSource) or not entry.options.path.is_dir():
            continue
        if output.is_relative_to(entry.options.path.resolve()):
            raise SpecError(
                "output",
                f"{str(spec.output)!r} lies in the folder that data.{entry.role} reads",
                "name a folder outside of it",
                where=spec.where("output"),
            )


def _origin(spec: Spec, entry: DataEntry) -> object:
    """Return the path that an entry reads, or the object or function that yields its batches."""
    if isinstance(entry.options, PathSource):
        return entry.options.path.resolve()
    held = spec.objects.get(entry.reference or "")
    return entry.reference if held is None else id(held)


def _copies_of_a_file(first: object, second: object) -> bool:
    """Return whether two origins are files of the same bytes."""
    if not (isinstance(first, Path) and isinstance(second, Path)):
        return False
    return first.is_file() and second.is_file() and filecmp.cmp(first, second, shallow=False)


def _overlap(first: DataKeys, second: DataKeys) -> bool:
    """Return whether two folds share samples (by the Chinese remainder theorem)."""
    (number, of), (other, parts) = (fold_numbers(keys.fold) for keys in (first, second))
    return (number - other) % math.gcd(of, parts) == 0


def why_foreign(carrier: Carrier) -> tuple[str, str]:
    """Return why a graph cannot be run, and the remedy."""
    return (
        f"ONNX Runtime has no operator {foreign_operators(carrier.graph())[0]}",
        "leave data out and use passes that run nothing, such as fuse, cast and quantize-weights "
        "with method rtn, or export the model without that operator",
    )


def check_limit(
    limit: float | None, metric: Metric, subject: str, where: str | None = None
) -> None:
    """Check that an artifact can break the limit of a metric: that its range is wider.

    Args:
        limit: how much worse the metric may be, in its unit.
        subject: what states the limit, and ``where`` it stands.

    Raises:
        SpecError: none can.
    """
    most = (metric.bounds[1] - metric.bounds[0]) * metric.scale.factor
    if limit is not None and limit >= most:
        raise SpecError(
            subject,
            f"is {limit:g}, and {metric.name} can lose {most:g} at most, so that no artifact "
            "breaks it",
            "state a smaller one" + (", or null for none" if where else ""),
            where=where,
        )
