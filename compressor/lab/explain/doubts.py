"""Reasons why the gain of rules for layers cannot be predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compressor.run.noise.attribution import noise_of_row
from compressor.run.verdicts.verdicts import same_function

_LEAST_LAYERS, _LEAST_SHARE = 3, 0.25
_MOST_APART = 2.0
_MOST_LOST = 0.5  # share of the metric's loss that passes with rules have at least


def doubts(report: Mapping[str, Any]) -> str:
    """Return why the gain of a change cannot be predicted; empty if it can."""
    passes = report["passes"]
    entries = [entry["attribution"] for entry in passes if entry["attribution"]]
    sqnr, trained = passes[-1]["sqnr_db"], any(entry.get("training") for entry in passes)
    reason = (
        unknown_effect(passes[-1]["metric"], entries)
        or _lost_before(passes)
        or _twice(passes)
        or _made_up_for(passes)
    )
    if reason or sqnr is None or trained or any(e["basis"] != "outputs" for e in entries):
        return reason
    found = sum(whole_noise(entry) for entry in entries) * 10.0 ** (float(sqnr) / 10.0)
    if not 1 / _MOST_APART < found < _MOST_APART:
        return (
            f"the noise of single layers adds up to {found:.2g} times that in the model's output: "
            "they amplify or dampen each other's, or other samples have more"
        )
    return ""


def _lost_before(passes: Sequence[Mapping[str, Any]]) -> str:
    """Return which pass without rules lost most of the metric; empty where none did."""
    drop, own = passes[-1]["metric_drop"], own_drop(passes)
    if own is None or drop <= 0 or own >= _MOST_LOST * drop:
        return ""
    drops = [float(entry["metric_drop"]) for entry in passes]
    lost = [drop - before for before, drop in zip([0.0, *drops], drops, strict=False)]
    most = max(range(len(passes)), key=lambda i: 0.0 if passes[i]["attribution"] else lost[i])
    name, metric = passes[most]["pass"], passes[-1]["metric"]["name"]
    return f"most of what {metric} lost was lost by {name}, which has no rules for single layers"


def own_drop(passes: Sequence[Mapping[str, Any]]) -> float | None:
    """Return by how much the passes with rules for layers made the metric worse."""
    drops = [entry["metric_drop"] for entry in passes]
    if any(drop is None for drop in drops):
        return None
    steps = zip([0.0, *drops], drops, passes, strict=False)
    return sum(float(drop - before) for before, drop, entry in steps if entry["attribution"])


def _made_up_for(passes: Sequence[Mapping[str, Any]]) -> str:
    """Return which pass trains behind one with rules for layers; empty where none does."""
    ruled = ""
    for entry in passes:
        if ruled and entry.get("training"):
            return f"{entry['pass']} trains behind {ruled}, and makes up for what its layers lose"
        ruled = ruled or (str(entry["pass"]) if entry["attribution"] else "")
    return ""


def _twice(passes: Sequence[Mapping[str, Any]]) -> str:
    """Return which pass rounds again what an earlier one changed; empty where none does."""
    changed: dict[str, str] = {}
    for entry in passes:
        for row in (entry["attribution"] or {"layers": ()})["layers"]:
            if same_function(row["own_sqnr_db"]):
                continue  # channels were scaled, and what reads them makes up for it
            before = changed.setdefault(str(row["name"]), str(entry["pass"]))
            if before != entry["pass"]:
                return (
                    f"{entry['pass']} changes layers behind {before}, and what a layer loses by "
                    "one of them depends on the other"
                )
    return ""


def unknown_effect(metric: Mapping[str, Any] | None, entries: Sequence[Mapping[str, Any]]) -> str:
    """Return why the effect of each layer on the metric is not known; empty if it is."""
    rows = [row for entry in entries for row in entry["layers"]]
    if metric is None:
        return "no metric was measured"
    effects = [row.get("metric_noise") for row in rows]
    known = [value for value in effects if value is not None]
    if not known:
        return f"the effect of each layer's noise on {metric['name']} is not known"
    changing = sum(value > 0 for value in known)
    steps = any(entry.get("metric_basis") == "metric" for entry in entries)
    if steps and changing < max(_LEAST_LAYERS, _LEAST_SHARE * len(known)):
        return (
            f"the noise of {changing} of {len(known)} layers alone changes {metric['name']} of any "
            "of the samples that noise is measured on"
        )
    return ""


def whole_noise(attribution: Mapping[str, Any] | None) -> float:
    """Return the noise that a pass adds, including that of inputs that several nodes read."""
    if attribution is None:
        return 0.0
    of_layers = sum(noise_of_row(row) for row in attribution["layers"])
    shared = float(attribution["shared_inputs"] or 0.0) / 100
    return of_layers / (1 - shared) if shared < 1 else of_layers
