"""Makes candidates and measures them: nothing twice, as everything goes through the store."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from compressor.calibration.statistics_cache import StatisticsCache
from compressor.errors import DataError, SpecError
from compressor.graph.costs import layer_bytes
from compressor.lab.tune.answer import Objective
from compressor.lab.tune.candidate import Candidate
from compressor.lab.tune.options import AS_IT_IS, STORED
from compressor.lab.tune.recipe import Recipe, identity, with_recipe
from compressor.lab.tune.search_data import SearchData
from compressor.lab.tune.searched import Searched, breaks, judged
from compressor.lab.tune.solver import Entry, samples_to_prove
from compressor.lab.tune.watch import LateError, Watch
from compressor.models.garbage import freeze_objects
from compressor.models.transformers.block_checkpoint import BlockCheckpoint
from compressor.passes.quantize.static.latency import layer_times
from compressor.passes.quantize.static.latency_facts import ORT_CPU_LATENCIES
from compressor.progress import Progress, Silent
from compressor.run.artifacts import (
    artifact_evaluation,
    artifact_runner,
    float_file,
    write_artifacts,
)
from compressor.run.evaluate import CachingRunner, Evaluation
from compressor.run.noise.attribution import attribution, noise_of_row
from compressor.run.pipeline import FUSE, Step, run_passes
from compressor.run.plan import Plan, make_plan
from compressor.run.store import Store
from compressor.run.verdicts.data_doubts import no_evidence
from compressor.run.verdicts.statistics import Difference, paired_difference
from compressor.run.verdicts.verdicts import Verdict, drop_verdict
from compressor.run.verify import compared_and_timed
from compressor.run.workspace import Workspace
from compressor.spec.load import Spec
from compressor.types.carrier import Carrier

_FEELING = 0.25  # share of the layers whose noise the metric has to feel, to be ranked by that
_MOST_SHARED = 99.0  # percent of the noise that inputs of several layers may have
_ONLY_STORED = 1.03  # what a byte of a weight counts that is computed with as a float
_SILENT = Silent()


@dataclass
class Workbench:
    """Where candidates are made.

    Args:
        spec: what all candidates share.
        plan: its plan.
        limit: the largest drop of the metric that is allowed; ``None`` for any.
        objective: what the layers' costs are in the tables.
        watch: ends a candidate within it when the time is up.
        helps: another process has what an answer needs, so that all may end.
        packed: by option, the share of a layer's bytes in memory that it takes in the file.
        references: the float model over each data, where it runs over these alone.
    """

    spec: Spec
    plan: Plan
    search: SearchData
    store: Store
    progress: Progress
    limit: float | None
    objective: Objective = "size"
    watch: Watch = field(default_factory=Watch)
    helps: bool = False
    packed: dict[str, float] = field(default_factory=dict)
    made: dict[str, Candidate] = field(default_factory=dict)
    evaluations: int = 0
    collected: StatisticsCache = field(default_factory=StatisticsCache)
    references: dict[str, CachingRunner] = field(default_factory=dict)

    @cached_property
    def base(self) -> Workspace:
        """The workspace of the float model, whose outputs are remembered."""
        return Workspace(self.plan, self.store, _SILENT)

    @property
    def evaluation_samples(self) -> int:
        """How many samples judge."""
        return len(self._float_evaluation.per_sample)

    @property
    def _float_evaluation(self) -> Evaluation:
        evaluation = self.base.baseline_evaluation
        assert evaluation is not None
        return evaluation

    def planned(self, recipe: Recipe) -> Plan:
        """Return a recipe's plan, which computes nothing.

        Raises:
            CompressorError: the recipe does not fit the model.
        """
        return make_plan(with_recipe(self.spec, recipe), self.plan)

    def candidate(self, name: str, recipe: Recipe, choice: Mapping[str, str]) -> Candidate:
        """Return the candidate of a recipe: its passes run, its artifacts written.

        Raises:
            CompressorError: a pass or an export fails, or the time is up and there are others.
        """
        key = identity(recipe)
        if key in self.made:
            return self.made[key]
        with self.progress.stage(name), self.watch.over("make", ends=self.helps or bool(self.made)):
            plan = self.planned(recipe)
            workspace, steps = self._run(plan)
            last = steps[-1].key if steps else workspace.source_key
            carrier = steps[-1].carrier if steps else plan.model.carrier
            written = write_artifacts(workspace, last, carrier)
            artifact = written[self.main]
            size, _ = float_file(workspace, artifact.exporter)
        made = Candidate(name, recipe, choice, plan, steps, written, artifact, workspace, size)
        self.made[key] = made
        freeze_objects()  # it stays to the end of the search
        return made

    def _run(self, plan: Plan) -> tuple[Workspace, list[Step]]:
        workspace = self._workspace(plan)
        return workspace, run_passes(workspace)

    def sqnr_behind(self, name: str, entry: Mapping[str, Any]) -> float | None:
        """Return the SQNR of what a model's last layer gives behind one pass alone, in dB.

        ``None`` where it is not known. The pass's result is in the store for whole recipes then.

        Raises:
            CompressorError: the pass fails, or the time is up.
        """
        with self.progress.stage(name), self.watch.over("make", ends=True):
            _, steps = self._run(self.planned(Recipe((entry,), 0)))
        known = [row["sqnr_db"] for row in steps[-1].result["layers"]]
        return known[-1] if known else None

    @cached_property
    def main(self) -> int:
        """The place of the export that is tuned for: the first that is deployed and runs here.

        Raises:
            SpecError: none runs here, so that nothing could be proved.
        """
        exports = self.spec.exports
        runs = [i for i, e in enumerate(exports) if not e.cannot_run]
        if not runs:
            raise SpecError(
                f"export {exports[0].format}",
                f"cannot be judged here: {exports[0].cannot_run}",
                "add an export that can be run, such as onnx",
                where=self.spec.where("exports", 0),
            )
        return next((i for i in runs if not exports[i].not_judged), runs[0])

    def _workspace(self, plan: Plan) -> Workspace:
        workspace = Workspace(plan, self.store, self.watch, collected=self.collected)
        workspace.source_key = self.base.source_key
        if isinstance(plan.model.carrier, BlockCheckpoint):  # runs over known data only
            digest = plan.data["evaluation"].digest
            runner = self.references.setdefault(digest, workspace.baseline_runner)
        else:
            runner = self.base.baseline_runner
        workspace.baseline_runner = runner
        return workspace

    def searching(self, candidate: Candidate, part: int = 0) -> Workspace:
        """Return a candidate's workspace in which a part of the search data is evaluated."""
        data = {**candidate.plan.data, "evaluation": self.search.parts[part]}
        return self._workspace(replace(candidate.plan, data=data, metric=self.search.metric))

    def searched(self, candidate: Candidate) -> Searched:
        """Evaluate a candidate on the search data, until it is known to break the limit.

        Raises:
            LateError: the time is up and there are others; this one is forgotten.
            DataError: the metric is not defined for it; it is forgotten, too.
        """
        if candidate.searched is None:
            others = any(c.searched for c in self.made.values())
            try:
                with (
                    self.progress.stage(f"search: {candidate.name}"),
                    self.watch.over("search", ends=self.helps or others),
                ):
                    candidate.searched = self._searched(candidate)
            except (LateError, DataError):
                self.made = {key: made for key, made in self.made.items() if made is not candidate}
                raise
        return candidate.searched

    def _searched(self, candidate: Candidate) -> Searched:
        try:
            return self._looked_at(candidate)
        except DataError:  # F1, say, where no sample is of the class
            if self.search.metric.figure is None:
                raise
            self.search = self.search.without_figure()
            return self._looked_at(candidate)

    def _looked_at(self, candidate: Candidate) -> Searched:
        pairs: list[tuple[Evaluation, Evaluation]] = []
        stopped, began = False, time.monotonic()
        for part in range(len(self.search.parts)):
            workspace = self.searching(candidate, part)
            ours = artifact_evaluation(workspace, candidate.artifact)
            theirs = workspace.baseline_evaluation
            assert ours is not None
            assert theirs is not None
            pairs.append((theirs, ours))
            stopped = breaks(pairs, self.search, self.limit)
            if stopped:
                break
        artifact_runner(candidate.workspace, candidate.artifact).close()
        found = judged(pairs, self.search, self._float_evaluation, stopped=stopped)
        share = self.evaluation_samples / found.samples
        self.watch.expect("prove", share * (time.monotonic() - began))
        return found

    def samples_to_prove(self, candidate: Candidate) -> int | None:
        """Return how many samples could prove a candidate, if it loses there what it did here.

        ``None`` where none could, or where neither proof nor search tells.
        """
        found, proof = self.searched(candidate), candidate.proof
        drop, bound = found.drop or 0.0, found.bound
        if proof is not None:
            drop, bound = proof.drop, proof.ci95[1]
        if self.limit is None or bound is None or found.stopped:
            return None
        return samples_to_prove(drop, bound, self.evaluation_samples, self.limit)

    def table(self, candidate: Candidate) -> dict[str, tuple[str, Entry]]:
        """Return each layer's option in a candidate, with its noise and bytes.

        Noise is what the metric feels of it where that is known, else what reaches the output, as
        in ``compress explain``.
        """
        options, recipe = set(candidate.choice.values()), candidate.recipe
        alone = STORED in options and options <= {STORED, *AS_IT_IS}
        index = recipe.stored_at if alone else recipe.index
        with (
            self.progress.stage(f"noise of layers: {candidate.name}"),
            self.watch.over("noise", ends=False),
        ):
            found = attribution(self.searching(candidate), index, candidate.steps)
        if found is None or not found["layers"]:
            return {}
        costs, rows = self.costs(candidate), found["layers"]
        felt = [row["metric_noise"] for row in rows]
        known = all(f is not None for f in felt)
        feels = known and sum(f > 0 for f in felt) > _FEELING * len(felt)
        noises = felt if feels else [noise_of_row(row) for row in rows]
        # Inputs that several layers read are rounded for all of them.
        share = min(found["shared_inputs"] or 0.0, _MOST_SHARED) / 100.0
        shared = found["shared_metric_noise"] if feels else sum(noises) * share / (1.0 - share)
        return {
            row["name"]: (
                candidate.choice.get(row["name"], ""),
                Entry(noise + shared / len(rows), costs.get(row["name"], 0.0)),
            )
            for row, noise in zip(rows, noises, strict=True)
        }

    def costs(self, candidate: Candidate) -> Mapping[str, float]:
        """Return the bytes of a candidate's layers, or their times in integers.

        Bytes that are only stored cost a little more than those that are computed with: of two
        choices of hardly another size, the one with more integers is faster.
        """
        if self.objective == "latency":
            times = self._times(candidate)
            return {name: integer or floating for name, (floating, integer) in times.items()}
        sizes, weights = layer_bytes(candidate.steps[-1].carrier), {STORED: _ONLY_STORED}
        weights |= self.packed
        return {
            name: size * weights.get(candidate.choice.get(name, ""), 1.0)
            for name, size in sizes.items()
        }

    def see_packing(self, uniform: Sequence[Candidate]) -> None:
        """Note what the file saves beside the model in memory, which holds 2 and 3 bits in four.

        Args:
            uniform: candidates of one width each, the widest first, which is stored as it is.
        """
        if self.objective == "latency":
            return
        rest = 0.0
        for place, candidate in enumerate(uniform):
            costs, options = self.costs(candidate), set(candidate.choice.values())
            total = sum(costs.get(name, 0.0) for name in candidate.choice)
            if place == 0:
                rest = candidate.bytes - total
            elif len(options) == 1 and total > 0:
                self.packed |= dict.fromkeys(options, min(1.0, (candidate.bytes - rest) / total))

    def float_entries(self, candidate: Candidate) -> dict[str, Entry]:
        """Return what layers cost that stay as they are before the tuned pass."""
        if self.objective == "latency":
            times = self._times(candidate)
            return {name: Entry(0.0, floating) for name, (floating, _) in times.items()}
        sizes = layer_bytes(self.before(candidate))
        return {name: Entry(0.0, float(size)) for name, size in sizes.items()}

    @staticmethod
    def before(candidate: Candidate) -> Carrier:
        """Return the model that the tuned pass is given."""
        steps = candidate.steps[: candidate.recipe.index]
        return steps[-1].carrier if steps else candidate.plan.model.carrier

    def _times(self, candidate: Candidate) -> Mapping[str, tuple[float, float]]:
        graph, shapes = self.before(candidate).graph(), self.plan.context.shapes
        return layer_times(graph, shapes, ORT_CPU_LATENCIES)

    def timed(self, candidate: Candidate) -> Mapping[str, Any] | None:
        """Time a candidate's artifact beside the float model.

        ``None`` where it is not judged, or where others were timed and no time is left.
        """
        if candidate.artifact.exporter.not_judged:
            return None
        if candidate.latency is None:
            others = any(c.latency is not None for c in self.made.values())
            if others and self.watch.late_for({"time": 1}):
                return None
            steps = candidate.steps
            fused = steps[0] if len(steps) > 1 and steps[0].name == FUSE else None
            final = steps[-1].carrier if steps else candidate.plan.model.carrier
            with (
                self.progress.stage(f"time: {candidate.name}"),
                self.watch.over("time", ends=False),
            ):
                found = compared_and_timed(candidate.workspace, candidate.artifact, final, fused)
            candidate.latency = found["latency"][0]["ratio"]
        return candidate.latency

    def proved(self, candidate: Candidate) -> Difference:
        """Evaluate a candidate's artifact on the evaluation data, paired with the float model.

        Raises:
            LateError: the time is up, and another one has been evaluated.
            DataError: the metric is not defined for it.
        """
        if candidate.proof is None:
            with (
                self.progress.stage(f"prove: {candidate.name}"),
                self.watch.over("prove", ends=self.evaluations > 0, kept={}),
            ):
                candidate.proof, candidate.verdict = self._evaluated(candidate)
            self.evaluations += 1
        return candidate.proof

    def _evaluated(self, candidate: Candidate) -> tuple[Difference, Verdict | None]:
        ours = artifact_evaluation(candidate.workspace, candidate.artifact)
        theirs = candidate.workspace.baseline_evaluation
        metric = candidate.plan.metric
        assert ours is not None
        assert theirs is not None
        assert metric is not None
        proof = paired_difference(theirs.per_sample, ours.per_sample, metric.scale)
        if self.limit is None:
            return proof, None
        constant, evidence = theirs.constant_drop(metric), no_evidence(candidate.plan.spec, theirs)
        # As in a run: of a mean's spread, one sample says nothing.
        alone = proof.samples == 1 and metric.unit != "%" and not proof.equal
        bounds = None if alone else proof.ci95
        verdict, _ = drop_verdict(proof.drop, bounds, self.limit, ours.sqnr_db, constant, evidence)
        return proof, verdict
