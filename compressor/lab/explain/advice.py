"""What to do next about a finished run: a change of its spec, or nothing, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from compressor.errors import SpecError, argument, listed
from compressor.files import file_sha256, write_text
from compressor.lab.explain.by_sqnr import OVER_SIZE, FinishedRun, explain_by_sqnr
from compressor.lab.explain.explanation import Change, Explanation
from compressor.report.verdict import main_artifact
from compressor.spec.load import load_spec
from compressor.spec.source_text import KeyPath
from compressor.types.layer_rules import match_of

_MOST_CHANGES = 3
_NOTHING = "nothing is worth trying"
_SMALL = 0.1  # of a limit: more bytes for what nobody asks back
_MEASURE = "compress explain SPEC --method leave-one-out measures"


@dataclass(frozen=True)
class Advice:
    """What to do next.

    Attributes:
        explanation: what each layer costs; ``None`` where no pass has rules for single layers.
        reason: why nothing is suggested; empty where something is.
        diff: the lines of the spec around the change, those to add marked with ``+``.
    """

    explanation: Explanation | None
    reason: str = ""
    diff: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the entry of ``report.json``."""
        found = None if self.explanation is None else self.explanation.as_json()
        return {
            "reason": self.reason or None,
            "diff": list(self.diff),
            "suggested": [] if found is None or self.reason else found["suggested"],
            "predicted": None if found is None or self.reason else found["predicted"],
        }


def advise(run: FinishedRun) -> Advice:
    """Choose the change with the best predicted gain, if any is worth trying."""
    try:
        explanation = explain_by_sqnr(run, _MOST_CHANGES)
    except SpecError as error:
        return Advice(None, f"{_NOTHING}: the run {error.problem}")
    gain, reason = explanation.predicted, _unneeded(run.report)
    if not reason and OVER_SIZE in explanation.notes:
        reason = f"{_NOTHING}: {OVER_SIZE}"
    if not reason and gain is None:
        reason = "no rule for a layer would remove much of the noise"
    if not reason and explanation.doubt:
        how = f"; {_MEASURE}" if run.manifest.get("spec_file") else ""  # it runs the passes again
        reason = f"no gain can be predicted, because {explanation.doubt}{how}"
    if reason:
        return Advice(explanation, reason)
    passes = run.manifest["spec"]["passes"]
    return Advice(explanation, "", tuple(_diff(explanation, passes)))


def _unneeded(report: Mapping[str, Any]) -> str:
    """Return why a run needs no change of its layers' rules, if it does not."""
    artifact = main_artifact(report)
    if artifact is None or artifact["metric"] is None:
        return f"{_NOTHING} before quality is measured"
    name, drop = artifact["metric"]["name"], float(artifact["metric_drop"])
    limits = [e for e in report["limits"] if e["artifact"] == artifact["path"]]
    limited = next((e for e in limits if e["name"] == "metric-drop"), {"limit": 0.0})
    verdict, allowed = limited.get("verdict", "unknown"), float(limited["limit"])
    interval = artifact["metric_drop_ci95"]
    failed = [e["name"] for e in limits if e.get("verdict") == "failed"]
    little = verdict == "passed" and drop > 0 and interval[1] <= _SMALL * allowed
    lost = verdict == "failed" or (drop > 0 and interval[0] > 0)
    if failed and (little or not lost):
        return f"rules for layers win back {name}, and what failed is {listed(failed)}"
    if little:
        return f"{_NOTHING}: {name} lost less than a tenth of its limit"
    if lost:
        return ""
    if drop <= 0:
        return f"{_NOTHING}: {name} lost nothing"
    if verdict == "passed":
        return f"{_NOTHING}: {name} lost nothing beyond chance"
    return f"{_NOTHING} before more samples are evaluated: that {name} lost anything may be chance"


def _diff(explanation: Explanation, passes: Sequence[Mapping[str, Any]]) -> list[str]:
    if explanation.by_command:
        return [" compress quantize", *(f"+    {option}" for option in explanation.options)]
    lines = [" passes:"]
    for index, rules in explanation.spec_lines.items():
        lines.append(f"   - pass: {explanation.passes[index]} # passes.{index}")
        lines.append(f"{' ' if passes[index].get('layers') else '+'}    {rules[0]}")
        lines += [f"+    {rule}" for rule in rules[1:]]
    return lines


def write_changed(run: FinishedRun, changes: Sequence[Change]) -> Path:
    """Write the spec of a run with changes, beside it and under a new name.

    Comments stay as they are; what ``--set`` changed is written too, as the run had it.

    Returns:
        The new file.

    Raises:
        SpecError: the spec is not there, or is not the one that was run.
    """
    path = _spec_of(run)
    yaml = YAML(typ="rt")
    yaml.preserve_quotes = True
    yaml.width = 1 << 16
    tree = yaml.load(path.read_text(encoding="utf-8"))
    if run.spec is not None:
        for place in run.spec.document.settings:
            _put(tree, place, run.spec.document.value)
    passes = tree.get("passes") if isinstance(tree, CommentedMap) else None
    for change in reversed(changes):  # the first stands in front
        _insert(path, passes, str(run.report["passes"][change.index]["pass"]), change)
    offset = passes.lc.col if isinstance(passes, CommentedSeq) and passes.lc.data else 2
    yaml.indent(mapping=2, sequence=offset + 2, offset=offset)
    number, new = 1, path.with_name(f"{path.stem}.next{path.suffix}")
    while new.exists():
        number += 1
        new = path.with_name(f"{path.stem}.next{number}{path.suffix}")
    text = StringIO()
    yaml.dump(tree, text)
    write_text(new, text.getvalue())
    try:
        load_spec(new)
    except SpecError:
        new.unlink()
        raise
    return new


def _put(tree: Any, place: KeyPath, value: Any) -> None:
    """Put the value at a place of one tree at the same place of another, whose part may be less."""
    *above, last = place
    for part in above:
        value = value[part]
        if isinstance(tree, dict) and not isinstance(tree.get(part), dict | list):
            tree[part] = CommentedMap(value)  # of nothing, or of text that is short for it
        tree = tree[part]
    tree[last] = value[last]


def _spec_of(run: FinishedRun) -> Path:
    if run.spec is not None:
        return run.spec.document.path
    subject, stated = f"run {str(run.folder)!r}", run.manifest.get("spec_file")
    path = None if stated is None else (run.folder / str(stated)).resolve()
    if path is None and run.report.get("objects"):
        problem = "was run by a Python program, and no file holds its spec"
        raise SpecError(subject, problem, "change the program's passes as the rules say")
    if path is None and run.by_command:
        problem = "was made by compress quantize, which reads no spec"
        raise SpecError(subject, problem, "call it again with the options that are suggested")
    if path is None or not path.is_file():
        problem = "does not say where its spec is" if path is None else f"has no spec at {path}"
        raise SpecError(subject, problem, "pass the spec instead of the folder")
    if file_sha256(path) != next(iter(run.manifest["inputs"]))["sha256"]:
        raise SpecError(
            f"spec {str(path)!r}",
            "has changed since it was run",
            f"compress run {argument(path)} first",
        )
    if run.manifest["spec"] != json.loads(json.dumps(load_spec(path).resolved)):
        problem = "was run with other settings (--set) than its spec holds"
        remedy = f"compress explain {argument(path)} --apply, with the same --set"
        raise SpecError(subject, problem, remedy)
    return path


def _insert(path: Path, passes: Any, name: str, change: Change) -> None:
    entry = passes[change.index] if _has(passes, change.index, name) else None
    if entry is None:
        raise SpecError(
            f"spec {str(path)!r}, passes.{change.index}",
            f"is not the pass {name!r} that was run",
            "run the spec again, or paste the rules where they belong",
        )
    rules = entry.setdefault("layers", CommentedSeq())
    if not isinstance(rules, list):
        raise SpecError(
            f"spec {str(path)!r}, passes.{change.index}.layers", "is not a list", "paste the rules"
        )
    rule = CommentedMap({"match": match_of(change.layer), **change.keys})
    rule.fa.set_flow_style()
    rules.insert(0, rule)


def _has(passes: Any, index: int, name: str) -> bool:
    known = isinstance(passes, list) and index < len(passes)
    return known and isinstance(passes[index], dict) and passes[index].get("pass") == name
