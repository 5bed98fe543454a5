"""Explain a finished run by the noise that its report attributes to each layer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from compressor import catalog
from compressor.errors import CompressorError, ModelError, SpecError, argument
from compressor.files import settle
from compressor.lab.explain.doubts import doubts, own_drop, unknown_effect, whole_noise
from compressor.lab.explain.explanation import (
    FULL,
    INTEGER,
    WIDE,
    Change,
    Explanation,
    Gain,
    LayerCost,
    best,
    change_for,
    gained_db,
    together,
)
from compressor.lab.verify.forms import check_report, read_mapping
from compressor.lab.verify.manifests import MANIFEST, REPORT, unchanged_run
from compressor.passes.prune.structured.structured import PruneStructured
from compressor.progress import SILENT
from compressor.report.verdict import main_artifact
from compressor.run.noise.attribution import noise_of_row
from compressor.spec.load import Spec, load_spec
from compressor.types.exporter import Exporter, element_bits
from compressor.types.layer_rules import rule_class
from compressor.types.passes import Pass

_SPECS = (".yaml", ".yml")
OVER_SIZE = "the best rules for layers would break the limit size-ratio"
_AGAIN = "run the spec again with this version; finished passes are reused"


@dataclass(frozen=True)
class FinishedRun:
    """A run that came to its end.

    Attributes:
        report: the content of ``report.json``.
        manifest: the content of ``manifest.json``.
        spec: the spec, where that was named in place of the folder.
    """

    folder: Path
    report: Mapping[str, Any]
    manifest: Mapping[str, Any]
    spec: Spec | None

    @property
    def by_command(self) -> bool:
        """Whether ``compress quantize`` made it: no spec could take rules, and no program has."""
        if self.spec is None:
            written = bool(self.manifest.get("spec_file"))
        else:
            written = self.spec.document.path.is_file()
        return not written and not self.report.get("objects")


def finished_run(path: Path, settings: Sequence[str] = ()) -> FinishedRun:
    """Open a run by its output folder, its ``report.json``, or its spec.

    Args:
        settings: overrides, where it is a spec.

    Raises:
        SpecError: there is nothing, or no run made it.
        InputError: the report was changed after the run.
        ModelError: a file is damaged, or of another version.
    """
    spec = None
    if path.suffix in _SPECS:
        spec = load_spec(path, settings)
    elif settings:
        raise SpecError("--set", "changes a spec, and a run is named", "name the spec")
    folder = spec.output if spec else path if path.is_dir() else path.parent
    subject = f"run {str(spec.output if spec else path)!r}"
    if not (spec or path.exists()):
        raise SpecError(subject, "does not exist", "name the output folder of a run, or its spec")
    if not path.is_dir() and spec is None and path.name != REPORT:
        raise SpecError(
            f"file {str(path)!r}",
            "is not a report",
            "name the output folder of a run, its report.json, or its spec",
        )
    settle(folder)
    for name in (REPORT, MANIFEST):
        if not (folder / name).is_file():
            remedy = (
                f"compress run {argument(path)} first"
                if spec
                else "name the output folder of a run"
            )
            raise SpecError(subject, f"has no {name}", remedy)
    opened, _ = unchanged_run(folder, subject, SILENT, only=(REPORT,))
    report, manifest = read_mapping(folder / REPORT), opened.content
    check_report(report, subject)
    if spec is not None and manifest["spec"] != json.loads(json.dumps(spec.resolved)):
        made_by = (folder / str(manifest.get("spec_file") or path.resolve())).resolve()
        problem = "has changed since it was run"
        if made_by != path.resolve():
            problem = f"is not what was run last into {str(folder)!r}: that was {made_by.name!r}"
        raise SpecError(f"spec {str(path)!r}", problem, f"compress run {argument(path)} first")
    return FinishedRun(folder, report, manifest, spec)


_OUTPUTS = (
    "'alone' is the noise of a layer with the float model's inputs; shares compare the "
    "noise that each layer alone would add to the model's output, and gains assume that these add "
    "up, which is wrong where layers amplify or dampen each other's noise. --method leave-one-out "
    "measures instead"
)
_LAYERS = (
    "'alone' is the noise of a layer with the float model's inputs; the model is too "
    "large to follow each layer's noise to the output, so shares assume that all of it reaches the "
    "output alike. --method leave-one-out measures instead"
)
_WEIGHTS = (
    "the model cannot be run: only the noise of the weights is known, not how much of it reaches "
    "the output"
)
_FEW_ANSWERS = 4
_PAIR = 2  # bits
_NOTES = {"outputs": _OUTPUTS, "layers": _LAYERS, "weights": _WEIGHTS}


def explain_by_sqnr(run: FinishedRun, count: int) -> Explanation:
    """Explain a run by the noise of its layers.

    Raises:
        SpecError: no pass has rules for single layers, or a pass is not installed.
    """
    layers = suspects(run)
    passes = run.report["passes"]
    best_layers = best(layers, count, _room(run.report))
    over = [OVER_SIZE] if not best_layers and best(layers, count) else []
    doubt = doubts(run.report) or _divided(run, best_layers)
    predicted = _predicted(run.report, best_layers) if best_layers else None
    little = []
    if predicted is not None and (predicted.share or 0.0) < _WORTHWHILE:
        little = [
            f"the best rules would remove {predicted.share or 0.0:.1f} % of the noise together"
        ]
        best_layers, predicted = [], None
    bases = {p["attribution"]["basis"] for p in passes if p["attribution"]}
    last = passes[-1]
    no_rules = {"reason": "it has no rules for single layers, or trains"}
    reasons = [(entry["pass"], (entry["attribution"] or no_rules)["reason"]) for entry in passes]
    return Explanation(
        name=str(run.report["name"]),
        method="sqnr",
        data="",
        metric=last["metric"],
        bytes=written_bytes(run.report),
        sqnr_db=last["sqnr_db"],
        layers=tuple(layers),
        passes=tuple(p["pass"] for p in passes),
        suggested=tuple(cost.change for cost in best_layers),
        predicted=predicted,
        doubt=doubt,
        by_command=run.by_command,
        left_out=tuple(f"{name}: {reason}" for name, reason in reasons if reason),
        notes=(
            *over,
            *little,
            *_shared(passes),
            *_effect_note(layers, passes),
            *(_NOTES[basis] for basis in _NOTES if basis in bases),
        ),
    )


def _predicted(report: Mapping[str, Any], layers: Sequence[LayerCost]) -> Gain:
    """Return what changes would bring together; the metric's loss goes as the effect on it does.

    What other passes lost, such as those that train, stays. Of right-or-wrong answers, so few that
    twice the deviation of their count (Poisson's) is no less than it are not predicted.
    """
    gain = together([cost.gain for cost in layers])
    metric, own = report["passes"][-1]["metric"], own_drop(report["passes"])
    if gain.metric_share is None or own is None:
        return gain
    won = gain.metric_share / 100 * max(0.0, own)
    few = metric["unit"] == "%" and won / 100 * metric["samples"] <= _FEW_ANSWERS
    return gain if few else replace(gain, metric=won)


def written_bytes(report: Mapping[str, Any]) -> int:
    """Return the bytes of a run's main artifact; of its model after all passes without one.

    A format packs codes in its own way: ONNX files hold two-bit codes in tables, and the model that
    passes change holds them as four bits.
    """
    return int((main_artifact(report) or report["passes"][-1])["bytes"])


def _room(report: Mapping[str, Any]) -> float:
    """Return how many bytes more the main artifact may take; any number where it takes too many.

    Operators around a layer that is left out are not counted in what its change costs.
    """
    artifact = main_artifact(report)
    if artifact is None:
        return math.inf
    left = [
        float(entry["limit"]) * int(artifact["float_bytes"]) - int(artifact["bytes"])
        for entry in report["limits"]
        if entry["name"] == "size-ratio" and entry["artifact"] == artifact["path"]
    ]
    return left[0] / (1 + _AROUND) if left and left[0] >= 0 else math.inf


_AROUND = 0.1  # share of a change's bytes
_WORTHWHILE = 10.0  # percent of the noise, by which suggestions together reduce it at least


def _divided(run: FinishedRun, suggested: Sequence[LayerCost]) -> str:
    """Return which pass divides what is to go among layers; empty where none of those does."""
    for cost in suggested:
        declared = _declared(run, cost.change.index)
        if isinstance(declared, PruneStructured) and declared.target.kind != "ratio":
            return f"what a rule spares one layer, {cost.pass_name} takes from others"
    return ""


def suspects(run: FinishedRun) -> list[LayerCost]:
    """Return every layer that a pass with rules changed, the noisiest first.

    Shares are of the noise that all passes together add, and of its effect on the metric.

    Raises:
        SpecError: there is none, or a pass is not installed.
    """
    rows = [
        (index, entry, row)
        for index, entry in enumerate(run.report["passes"])
        for row in (entry["attribution"] or {"layers": ()})["layers"]
    ]
    if not rows:
        names = ", ".join(dict.fromkeys(entry["pass"] for entry in run.report["passes"]))
        raise SpecError(
            f"run {str(run.folder)!r}",
            f"has no layers that noise is attributed to: of {names}, each trains, has no rules for "
            "single layers, or changed none",
            "explain a run that quantizes or prunes without training",
        )
    whole = sum(whole_noise(entry["attribution"]) for entry in run.report["passes"])
    entries = [p["attribution"] for p in run.report["passes"] if p["attribution"]]
    unknown = unknown_effect(run.report["passes"][-1]["metric"], entries)
    whole_effect = 0.0 if unknown else sum(map(_effect, entries))
    costs = []
    for index, entry, row in rows:
        declared = _declared(run, index)
        if rule_class(type(declared)) is None:
            continue
        runs = entry["attribution"]["basis"] != "weights"
        scheme = str(row["scheme"])
        change = change_for(index, declared, str(row["name"]), scheme, alike=_alone(run, scheme))
        share = (
            noise_of_row(row) / whole * 100
            if whole > 0 and row["own_sqnr_db"] is not None
            else None
        )
        share = None if share is None else share * (1 - change.kept)
        effect = None if whole_effect <= 0 else row.get("metric_noise")
        gain = Gain(
            bytes=round(int(row["bytes_to_skip"]) * _cost(run, declared, change, scheme)),
            sqnr_db=gained_db(share) if share is not None and runs else None,
            noise_share=share,
            metric_share=None
            if effect is None
            else effect / whole_effect * 100 * (1 - change.kept),
        )
        costs.append(LayerCost(str(entry["pass"]), scheme, row["own_sqnr_db"], change, gain))
    costs.sort(key=lambda cost: -(cost.gain.noise_share or 0.0))
    return sorted(costs, key=lambda cost: -(cost.gain.share or 0.0))


def _alone(run: FinishedRun, scheme: str) -> bool:
    """Return whether a layer of this scheme can stand beside none of another.

    Directories of transformers have no place for packed zero points beside other schemes, and
    ``compress quantize`` has one preset for all layers.
    """
    return run.by_command or (_bare(run) and scheme.endswith("asym"))


def _bare(run: FinishedRun) -> bool:
    """Return whether the model is a checkpoint without a graph."""
    model = run.manifest["spec"].get("model") or {}
    return not model.get("factory") and not model.get("onnx")


def _cost(run: FinishedRun, declared: Pass, change: Change, scheme: str) -> float:
    """Return the bytes that a change takes in the files, as a share of ``bytes_to_skip``.

    That share is of the model in memory, whose graph holds codes of 4 or 8 bits; the exporter
    decides in how many bits they are stored.
    """
    narrow = INTEGER.match(scheme)
    if narrow is None:
        return 1.0
    bits = int(narrow[1])
    held = bits if _bare(run) else element_bits(bits)
    exporter = _main_exporter(run)
    pairs = bits == _PAIR and not getattr(declared, "activations", None)
    packed = exporter is not None and (exporter.packs or (pairs and exporter.packs_pairs))
    stored = bits if packed else held
    wide = FULL if "skip" in change.keys else WIDE if "bits" in change.keys else stored
    return (wide - stored) / (FULL - held)


def _main_exporter(run: FinishedRun) -> Exporter | None:
    """Return the exporter of the main artifact; ``None`` where there is none."""
    artifact = main_artifact(run.report)
    exports = run.manifest["spec"].get("exports") or []
    entry = next((e for e in exports if artifact and e["format"] == artifact["format"]), None)
    if entry is None:
        return None
    declared: type[Exporter] = catalog.load("exporter", entry["format"])
    options = {key: value for key, value in entry.items() if key != "format"}
    return declared.model_validate_json(json.dumps(options))


def _effect(attribution: Mapping[str, Any]) -> float:
    """Return the effect on the metric of the noise that a pass adds."""
    of_layers = sum(row.get("metric_noise") or 0.0 for row in attribution["layers"])
    return of_layers + float(attribution.get("shared_metric_noise") or 0.0)


def _declared(run: FinishedRun, index: int) -> Pass:
    name = str(run.report["passes"][index]["pass"])
    options = {k: v for k, v in run.manifest["spec"]["passes"][index].items() if k != "pass"}
    try:
        declared: type[Pass] = catalog.load("pass", name)
    except CompressorError as error:
        raise SpecError(
            f"run {str(run.folder)!r}",
            f"uses the pass {name!r}, which is not installed",
            "install the package that it came with",
        ) from error
    try:
        return declared.model_validate_json(json.dumps(options))
    except ValidationError as error:
        raise ModelError(
            f"run {str(run.folder)!r}", f"has options that {name!r} does not take", _AGAIN
        ) from error


def _effect_note(layers: Sequence[LayerCost], passes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not any(cost.gain.metric_share is not None for cost in layers):
        return
    bases = {entry["attribution"]["metric_basis"] for entry in passes if entry["attribution"]}
    what = " and ".join(text for basis, text in _EFFECTS.items() if basis in bases)
    yield (
        f"'effect' is the share of the noise's effect on the metric, {what}; layers are ranked by "
        "it"
    )


_EFFECTS = {
    "divergence": "the divergence of the answers' probabilities",
    "metric": "the change of each sample's value",
}


def _shared(passes: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{entry['pass']}: {entry['attribution']['shared_inputs']:.0f} % of the noise lies in "
        "values that stay rounded when one layer is left out, because an integer kernel writes "
        "them or several operators read them"
        for entry in passes
        if entry["attribution"] and (entry["attribution"]["shared_inputs"] or 0.0) >= 1
    ]
