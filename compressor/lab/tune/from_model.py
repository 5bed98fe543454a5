"""The spec behind ``compress tune MODEL --data``: no spec and no labels are needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from compressor.calibration.sources.file_source import FileSource
from compressor.calibration.sources.folds import fold_numbers
from compressor.calibration.sources.tokens import TokenSource
from compressor.errors import DataError, SpecError, argument
from compressor.lab.found_data import Found
from compressor.lab.recipes import decides, judged_outputs, scores_classes
from compressor.lab.starter import starter_text
from compressor.lab.starter_arrays import preparation
from compressor.lab.starter_data import Choices, Given, settled
from compressor.lab.tune.recipe import REMEDIES
from compressor.run.data import open_data
from compressor.run.metrics.metrics import resolve_metric
from compressor.run.model import OpenedModel, open_model
from compressor.spec.keys import FEEDS
from compressor.spec.load import Spec, check_spec
from compressor.spec.source_text import Document, seen_from
from compressor.types.carrier import Capability, Carrier
from compressor.types.tensors import fixed_batch, samples_in

_FILES = (".onnx", ".safetensors", ".pt", ".pth", ".th")
_CALIBRATE, _SEARCH = 512, 2048  # samples at most
_ALONE = {"calibration": "2/4", "search": "4/4", "evaluation": "1/2"}
_APART = {"calibration": "1/2", "search": "2/2"}


def is_model(place: Path) -> bool:
    """Whether a path names a model, and no spec."""
    return place.is_dir() or place.suffix in _FILES


def spec_of_model(model: Path, data: Path | None, metric: str | None, folder: Path) -> Spec:
    """Return the spec that a model is tuned with: what ``compress init`` writes, made whole.

    What is found is parted, so that what calibrates, what recipes are compared on and what judges
    share no sample. Artifacts are judged by their fidelity to the float model: by the share of
    answers that agree where the model's last layer gives a score for each class, else by the cosine
    of its outputs.

    Args:
        data: a folder of images, WAV or npy files, or a file; ``None`` takes what lies beside the
            model.
        metric: a metric that needs no labels.
        folder: where the tuned spec will lie.

    Raises:
        CompressorError: the model or the data are unusable, or need a spec.
    """
    subject = f"model {str(model)!r}"
    if not model.exists():
        raise SpecError(subject, "does not exist", "check its spelling")
    choices, found = settled(model, Choices(data, metric=metric))
    if found is None:
        raise SpecError(
            subject, "is given without data", "add --data with typical samples, or write a spec"
        )
    relative = seen_from(folder, model)
    given = Given(model, folder, choices, found)
    text = starter_text(model, relative, "tuned.yaml", given)
    value = YAML(typ="safe", pure=True).load(StringIO(text))
    roles = value["data"]
    needs = ""
    if ":" in str(value["model"].get("factory", "")):
        needs = "needs a function that builds its network"
    elif any(entry.get("samples") == FEEDS for entry in roles.values()):
        needs = "takes each sample as a whole feed"
    if needs:
        remedy = f"write a spec with compress init {argument(model)}, fill it in, and tune that"
        raise SpecError(subject, needs, remedy)
    value["data"] = _parted(roles, found)
    value["exports"] = [e for e in value["exports"] if e["format"] != "safetensors"]
    value["limits"] = {"metric-drop": None, "size-ratio": None, "latency-ratio": None}
    if not any(entry["pass"] in REMEDIES for entry in value["passes"]):
        value["passes"] = [*value["passes"][:-1], {"pass": "quantize-static"}]
    document = Document(folder / model.name, value, stands_for=str(model))
    spec = check_spec(document)
    opened = open_model(spec)
    carrier = opened.carrier
    if preparation(given, carrier.inputs, model) is not None:
        remedy = f"write a spec with compress init {argument(model)}, check it, and tune that"
        raise SpecError(subject, "needs a transform of the arrays in the data", remedy)
    if metric is None and value.get("metric") in (None, "accuracy"):  # which needs labels
        numbers = given.answers(carrier.inputs, judged_outputs(carrier))
        classes = decides(carrier) or (scores_classes(carrier) and not numbers)
        value["metric"] = "agreement" if classes else "cosine"
    _map_only_array(value["data"], spec, carrier)
    spec = check_spec(document)
    _check_labels(spec, metric)
    fixed = fixed_batch(carrier.inputs)
    _whole_batches(value["data"], spec, fixed)
    if fixed is None and _lists(opened, spec):
        for entry in value["data"].values():
            entry["batch"] = 1
    return check_spec(document)


@contextmanager
def in_a_spec(spec: Spec) -> Iterator[None]:
    """Say in errors on data which spec would take their remedy, where none was written."""
    try:
        yield
    except DataError as error:
        model = spec.document.stands_for
        if model and (error.where or "").startswith(model):
            error.remedy += f", in a spec (compress init {argument(model)})"
        raise


def _parted(roles: Mapping[str, Any], found: Found) -> dict[str, Any]:
    """Return data by role, without labels; where one folder or file is all, as folds of it."""
    evaluation = {**roles["evaluation"]}
    if evaluation.get("target") != "labels":  # the tokens that follow
        evaluation.pop("target", None)
    calibration = {**evaluation, **roles.get("calibration", {})}
    calibration.pop("target", None)
    alone = found.calibration == found.evaluation
    if not alone and found.kind not in calibration:
        calibration = {**evaluation}
    folds = _ALONE if alone else _APART
    parted = {
        "calibration": {**calibration, "samples": _CALIBRATE},
        "evaluation": {**evaluation},
        "search": {**evaluation, found.kind: calibration[found.kind], "samples": _SEARCH},
    }
    for role, fold in folds.items():
        parted[role]["fold"] = fold
    return parted


def _check_labels(spec: Spec, metric: str | None) -> None:
    """Raise :class:`SpecError` where the metric that was asked for needs labels."""
    if metric is None or ":" in metric or spec.data["evaluation"].keys.target is not None:
        return
    known = resolve_metric(metric, True, spec.symbol, spec.where("metric"))
    if known.needs_labels and not known.against_float:
        raise SpecError(
            f"metric {metric!r}",
            "needs labels, and a model without a spec is judged without",
            "use agreement, mse or cosine, or write a spec that names the labels (compress init)",
        )


def _lists(opened: OpenedModel, spec: Spec) -> bool:
    """Whether no output has an axis of samples, as where boxes of all images are one list.

    A run of one sample at a time tells which sample they are of.
    """
    carrier = opened.carrier
    starts = {i.shape[0] for i in carrier.inputs if i.shape}
    named = [o.shape and o.shape[0] in starts for o in carrier.outputs]
    if Capability.RUN not in carrier.offers or any(named) or not carrier.outputs:
        return False
    data = open_data(spec, carrier.inputs, carrier.outputs)["evaluation"]
    batch = next(iter(data.source.batches(2, 2)))
    opened.load()
    outputs = carrier.runner().run(batch)
    return all(a.ndim == 0 or len(a) != samples_in(batch) for a in outputs.values())


def _map_only_array(roles: Mapping[str, Any], spec: Spec, carrier: Carrier) -> None:
    """Name the array of a file that holds only one, for a model with only one input."""
    for role, entry in roles.items():
        source = spec.data[role].options
        mapped = list((entry.get("inputs") or {}).values())
        if not isinstance(source, FileSource) or len(carrier.inputs) != 1:
            continue
        stored = list(source.readable())
        if len(stored) == 1 and mapped[:1] != stored:
            entry["inputs"] = {carrier.inputs[0].name: stored[0]}


def _whole_batches(roles: Mapping[str, Any], spec: Spec, fixed: int | None) -> None:
    """Use as many samples as fill the batches of a model that takes so many at a time."""
    for role, entry in roles.items():
        source = spec.data[role].options
        if fixed is None or not isinstance(source, FileSource | TokenSource):
            continue
        entry["batch"] = fixed
        entry.pop("samples", None)
        most = {"calibration": _CALIBRATE, "search": _SEARCH}.get(role)
        number, of = fold_numbers(entry.get("fold"))
        whole = source.model_copy(update={"samples": None}).info().samples or 0
        here = len(range(number - 1, whole, of))
        count = (here if most is None else min(here, most)) // fixed * fixed
        if count == 0:
            raise SpecError(
                f"data.{role}",
                f"has {here} samples, and the model takes {fixed} at a time",
                "give more data",
            )
        entry["samples"] = count
