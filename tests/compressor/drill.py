"""A pass that does what a training does, but trains nothing: it reads, saves, and can be killed."""

# ruff: noqa: ARG002

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from compressor.errors import SpecError
from compressor.types.carrier import Capability, Carrier
from compressor.types.passes import LayerOutcome, LayerPlan, Outcome, PassContext, Survey, TrainPass
from compressor.types.training import Training
from tests.compressor.spine_plugins import strike

STATE = "state.json"
TOLD = "told: "


class Drill(TrainPass):
    """Multiplies weights with a number that depends on all training data that it was given."""

    name: ClassVar[str] = "drill"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.RUN})

    epochs: int = Field(default=2, description="passes over the data")
    strike_at: int | None = Field(default=None, description="the step after which it strikes")
    labels: bool = Field(default=True, description="whether it needs them")
    loss: str | None = Field(default=None, description="a function of the user's")
    teacher: dict[str, Any] | None = Field(default=None, description="another model")
    calibrates: bool = Field(default=False, description="whether it reads the calibration data")

    @property
    def labelled(self) -> bool:
        return self.labels

    @property
    def replays(self) -> str:
        return "to look at them" if self.calibrates else ""

    @property
    def code(self) -> tuple[str, ...]:
        """The loss."""
        return () if self.loss is None else (self.loss,)

    @property
    def other_models(self) -> Mapping[str, Mapping[str, Any]]:
        """The teacher."""
        return {} if self.teacher is None else {"teacher": self.teacher}

    def check_models(self, carrier: Carrier, others: Mapping[str, Carrier]) -> None:
        own, theirs = (c.outputs[0].shape[1] for c in (carrier, others["teacher"]))
        if own != theirs:
            raise SpecError("teacher", f"has {theirs} outputs, not {own}", "give another")

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        layers = tuple(LayerPlan(layer.name, "train") for layer in carrier.layers())
        return Survey(layers)

    def apply_training(
        self,
        carrier: Carrier,
        context: PassContext,
        statistics: Mapping[str, Any],
        training: Training,
    ) -> Outcome:
        saved = training.folder / STATE
        state = json.loads(saved.read_text()) if saved.is_file() else {"step": 0, "sum": 0.0}
        started = state["step"]
        per_epoch = -(-training.data.samples // training.batch)
        with training.stage(self.name, self.epochs * per_epoch) as advance:
            for step in range(started, self.epochs * per_epoch):
                state = {"step": step + 1, "sum": state["sum"] + self._step(training, step)}
                if training.ranks.rank == 0:
                    saved.write_text(json.dumps(state))
                training.ranks.wait()
                advance(step + 1, f"sum {state['sum']:.3f}")
                if step + 1 == self.strike_at:
                    strike()
        factor = 1 + float(np.tanh(state["sum"])) / 10
        changes = {layer.weight: carrier.weight(layer) * factor for layer in carrier.layers()}
        facts = {"started": started, "sum": state["sum"], **self._facts(carrier, training)}
        outcomes = tuple(LayerOutcome(layer.name, "float32") for layer in carrier.layers())
        return Outcome(carrier.with_weights(changes), outcomes, (TOLD + json.dumps(facts),))

    def _step(self, training: Training, step: int) -> float:
        """Return this step's number, over all processes."""
        ranks, samples = training.ranks, training.data.samples
        rows = np.random.default_rng(step).permutation(samples)[: training.batch]
        own = training.data.batch(rows[ranks.rank :: ranks.size], (0, step))
        return sum(ranks.gathered(float(own["image"].astype(np.float64).mean())))

    def _facts(self, carrier: Carrier, training: Training) -> dict[str, Any]:
        """Return what the run gave, as tests want to see it."""
        first = training.source.layers()[0]
        teacher = None
        if self.teacher is not None:
            other = training.open_model(self.teacher, "teacher")
            probe = training.samples.probe(2)
            teacher = float(next(iter(other.runner().run(probe).values())).sum())
        own = None
        if self.loss is not None:
            own = training.load_symbol(self.loss, "loss")()
        return {
            "samples": training.data.samples,
            "target": training.data.target,
            "random": training.data.random,
            "batch": training.batch,
            "metric": None if training.metric is None else training.metric.name,
            "folder": training.folder.is_dir(),
            "cache": training.cache.is_dir(),
            "copies": len(list(training.cache.glob("data-*"))),
            "source": float(training.source.weight(first).sum()),
            "given": float(carrier.weight(carrier.layers()[0]).sum()),
            "made_up": training.samples.made_up,
            "ranks": training.ranks.size,
            "teacher": teacher,
            "loss": own,
        }

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        return carrier


def told(report: Mapping[str, Any], index: int = -1) -> dict[str, Any]:
    """Return what a drill found, from a run's report."""
    (note,) = (n for n in report["passes"][index]["notes"] if n.startswith(TOLD))
    facts: dict[str, Any] = json.loads(note.removeprefix(TOLD))
    return facts
