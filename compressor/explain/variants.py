"""Run a spec's passes once more with other rules, as far as a change reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from compressor.explain.changes import Change
from compressor.run.pipeline import Step, apply_pass, collect_statistics, pass_parts
from compressor.run.plan import PassPlan
from compressor.run.store import result_key
from compressor.run.workspace import Workspace
from compressor.types.carrier import Carrier
from compressor.types.passes import Pass, Survey
from compressor.types.statistics import Request


@dataclass
class Variants:
    """Makes variants of a finished run; statistics are collected once.

    Attributes:
        workspace: the run.
        steps: its passes, finished.
    """

    workspace: Workspace
    steps: Sequence[Step]
    _collected: dict[int, dict[str, tuple[Request, Any]]] = field(default_factory=dict)

    def key(self, changes: Sequence[Change]) -> str:
        """Return the key of a variant, without making it: the same that a run would give it.

        Raises:
            SpecError: a pass cannot be changed so.
        """
        return self._follow(changes, make=False)[0]

    def make(self, changes: Sequence[Change]) -> Carrier:
        """Apply the changed passes and those after them, and return the model after all.

        Raises:
            CompressorError: a pass fails.
        """
        self.workspace.load()
        carrier = self._follow(changes, make=True)[1]
        assert carrier is not None
        return carrier

    def _follow(self, changes: Sequence[Change], *, make: bool) -> tuple[str, Carrier | None]:
        passes = list(self.workspace.plan.spec.passes)
        for change in reversed(changes):  # the first stands in front
            passes[change.index] = change.applied(passes[change.index])
        first = min(change.index for change in changes)
        workspace = self._with(passes)
        before = self.steps[first - 1] if first else None
        key = workspace.source_key if before is None else before.key
        carrier = workspace.plan.model.carrier if before is None else before.carrier
        for index in range(first, len(passes)):
            planned = workspace.plan.passes[index]
            key = result_key("pass", key, **pass_parts(workspace, index, planned))
            if make:
                carrier = self._applied(workspace, index, carrier)
        return key, carrier if make else None

    def _with(self, passes: Sequence[Pass]) -> Workspace:
        """Return a workspace for other options of the passes; the model's key is known."""
        plan = self.workspace.plan
        other = replace(plan, spec=replace(plan.spec, passes=tuple(passes)))
        workspace = Workspace(other, self.workspace.store, self.workspace.progress)
        workspace.source_key = self.workspace.source_key
        return workspace

    def _applied(self, workspace: Workspace, index: int, carrier: Carrier) -> Carrier:
        declared = workspace.plan.spec.passes[index]
        torch.manual_seed(workspace.plan.spec.seed)
        survey = declared.survey(carrier, workspace.plan.context)
        statistics = None
        if not survey.blockwise:
            statistics = self._statistics(workspace, index, carrier, survey)
        return apply_pass(workspace, declared, carrier, survey, statistics).carrier

    def _statistics(
        self, workspace: Workspace, index: int, carrier: Carrier, survey: Survey
    ) -> Mapping[str, Any]:
        """Collect what no earlier variant has collected from the same model."""
        before = self.steps[index - 1].carrier if index else workspace.plan.model.carrier
        # What comes after a changed pass has other activations: nothing of it is known.
        known = self._collected.setdefault(index, {}) if carrier is before else {}
        missing = [r for r in survey.requests if known.get(r.key, (None,))[0] != r]
        label = workspace.plan.spec.passes[index].name
        found = collect_statistics(workspace, label, carrier, tuple(missing))
        known.update({r.key: (r, found[r.key]) for r in missing})
        return {r.key: known[r.key][1] for r in survey.requests}


def obstacle(plans: Sequence[PassPlan], index: int) -> str:
    """Say why a pass's layers are not measured one by one; empty where they are."""
    own, later = plans[index], plans[index + 1 :]
    if own.trains:
        return f"{own.name} trains, and would train once for every layer"
    for follower in later:
        if follower.trains:
            return f"{follower.name} comes after it, and would train once for every layer"
    return ""
