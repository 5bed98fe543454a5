"""The state that the stages of a run share: plan, store, float model and its results."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from compressor.calibration.statistics_cache import StatisticsCache
from compressor.graph.costs import batch_macs, cannot_run
from compressor.graph.output_parts import OutputParts
from compressor.models.resident_memory import return_freed_memory
from compressor.models.transformers.block_checkpoint import BlockCheckpoint
from compressor.progress import Progress, Steps
from compressor.run.blocks.decoder_runner import DecoderRunner
from compressor.run.data import Data
from compressor.run.evaluate import CachingRunner, Evaluation, evaluate
from compressor.run.metrics.judged import compared_parts
from compressor.run.metrics.metrics import Metric
from compressor.run.options import DEFAULTS, RunOptions
from compressor.run.plan import Plan
from compressor.run.recurrence import RecurrentRunner
from compressor.run.store import Store, compute_versions, result_key, store_of
from compressor.run.verdicts.decisions import Decisions
from compressor.spec.user_code import code_digest
from compressor.types.carrier import Capability, Carrier, Runner
from compressor.types.data import Ranks
from compressor.types.tensors import (
    Batch,
    answers,
    fixed_batch,
    made_batch,
    picked,
    samples_in,
)

_LOOKED_AT_MACS = 2e10
_FEWEST_LOOKED_AT = 4
_PER_SAMPLE, _DECISIONS = "per_sample.npy", "decisions.npz"
_EVALUATION = 11  # version of what is stored
_CHECK_SAMPLES = 2
_CACHE_BYTES = 16 << 20  # bytes of a compressed model's outputs


@dataclass
class Workspace:
    """One run's state.

    Attributes:
        collected: statistics of calibration data; shared by workspaces of variants of one recipe.
    """

    plan: Plan
    store: Store
    progress: Progress
    options: RunOptions = DEFAULTS
    collected: StatisticsCache = field(default_factory=lambda: StatisticsCache(limit=0))
    _loaded: bool = field(default=False, init=False)
    _runners: dict[str, CachingRunner] = field(default_factory=dict, init=False)
    _alike: dict[str, str] = field(default_factory=dict, init=False)

    def begin_step(self) -> None:
        """Begin the next step of the run, to which the following stages belong.

        Freed memory and sessions of the step before are released.
        """
        self.release()
        if isinstance(self.progress, Steps):
            self.progress.begin()

    def release(self) -> None:
        """Close sessions, and return freed memory to the system."""
        if "baseline_runner" in self.__dict__:
            self.baseline_runner.close()
        for runner in self._runners.values():
            runner.close()
        gc.collect()  # a graph refers to itself, and so would keep its weights
        return_freed_memory()

    @cached_property
    def source_key(self) -> str:
        """Key of the float model's content."""
        model = self.plan.model
        quick = self.options.identify_by_headers and model.quick_digest is not None
        return model.quick_digest() if quick and model.quick_digest else model.digest()

    @property
    def no_metric(self) -> str:
        """Why no metric is measured, if none is."""
        blocks = isinstance(self.plan.model.carrier, BlockCheckpoint)
        return "the spec has no data.evaluation" if self.runs or blocks else self.cannot_run

    @property
    def cannot_run(self) -> str:
        """Why the model cannot be run, if it cannot."""
        return cannot_run(self.plan.model.carrier)

    @property
    def ranks(self) -> Ranks:
        """The processes that share the run; the first alone measures and writes."""
        return self.options.ranks

    @property
    def first(self) -> bool:
        """Whether this process is the one that measures and writes."""
        return self.ranks.rank == 0

    @property
    def runs(self) -> bool:
        """Whether the model can be run."""
        return Capability.RUN in self.plan.model.carrier.offers

    def load(self) -> None:
        """Read the float model's weights once, and check that it was lowered faithfully."""
        if self._loaded:
            return
        with self.progress.stage("load the model"):
            self.plan.model.load()
            self._loaded = True
            key = result_key("lowering-check", self.source_key, data=self.looked_at_digest)
            if self.runs and self.first and self.store.read(key) is None:
                self.plan.model.check_lowering(self.sample(_CHECK_SAMPLES))
                self.store.keep(key, {"ok": True})
            if self.first:
                self.plan.model.keep_graph(self.progress.note)

    @property
    def baseline(self) -> Carrier:
        """The float model, with its weights."""
        self.load()
        return self.plan.model.carrier

    def runner(self, key: str, opener: Callable[[], Runner]) -> CachingRunner:
        """Return a runner of the model with this key, which caches its outputs."""
        runner = CachingRunner(opener, _CACHE_BYTES, self._read)
        return self._runners.setdefault(key, runner)

    def take_as_equal(self, key: str, other: str) -> None:
        """Use the evaluation of another model, whose outputs are equal, for a model."""
        self._alike.setdefault(key, other)

    @cached_property
    def baseline_runner(self) -> CachingRunner:
        """A runner of the float model, which caches its outputs."""
        return CachingRunner(
            lambda: self._over_sequences(self.opened(self.baseline)), reads=self._read
        )

    @cached_property
    def _read(self) -> frozenset[str]:
        """Names of the model's inputs, without the target."""
        return frozenset(i.name for i in self.plan.model.carrier.inputs)

    def opened(self, carrier: Carrier) -> Runner:
        """Return a runner of a model; that of a checkpoint runs over the evaluation data only."""
        if not isinstance(carrier, BlockCheckpoint) or self._cached_evaluation is None:
            return carrier.runner()
        folder = store_of(self.plan.spec.output)
        return DecoderRunner(carrier, self._cached_evaluation.batches(), folder)

    def _over_sequences(self, runner: Runner) -> Runner:
        """Return a runner over sequences if the evaluation data have a state."""
        recurrence = None if self.evaluation is None else self.evaluation.recurrence
        return runner if recurrence is None else RecurrentRunner(runner, recurrence)

    @property
    def evaluation(self) -> Data | None:
        """The evaluation data, if there are any."""
        return self.plan.data.get("evaluation")

    @cached_property
    def _cached_evaluation(self) -> Data | None:
        """The evaluation data with a cache, which serves all models of the run."""
        return None if self.evaluation is None else self.evaluation.cached()

    @cached_property
    def output_parts(self) -> OutputParts:
        """The parts of the float model's outputs that a comparison counts; empty if unknown."""
        data = self.evaluation
        known = data is not None and data.recurrence is None
        return compared_parts(self.plan.model.carrier, data) if data and known else ()

    def sample(self, count: int) -> Batch:
        """Return a batch of ``count`` samples of real data, or one feed; see :meth:`probes`."""
        return self.probes(count, distinct=False)[0]

    def probes(self, count: int, *, distinct: bool = True) -> list[Batch]:
        """Return a batch of ``count`` samples of real data, or zeros if the spec names none.

        A model with a fixed batch gets that many samples. Of whole feeds, it is so many batches.

        Args:
            distinct: return fewer samples, instead of some of them twice, if there are fewer and
                the batch is not fixed.
        """
        inputs = self.plan.model.carrier.inputs
        fixed = fixed_batch(inputs)
        count = fixed or count
        names = [i.name for i in inputs]
        data = self._probed
        if data is not None:
            if data.feeds or (distinct and fixed is None):
                return [picked(batch, names) for batch in data.probes(count, self.baseline)]
            batch = data.first(count)
            repeat = -(-count // samples_in(batch))
            return [{n: np.concatenate([batch[n]] * repeat)[:count] for n in names}]
        shapes = {
            i.name: [count if isinstance(d, str) else int(d or 1) for d in i.shape] for i in inputs
        }
        zeros = {i.name: np.zeros(shapes[i.name], dtype=i.dtype) for i in inputs}
        return [made_batch(inputs, zeros)]

    @property
    def looked_at_digest(self) -> str:
        """The digest of the data that :meth:`probes` takes samples of; empty if there are none."""
        data = self._probed
        return "" if data is None else data.digest

    @property
    def _probed(self) -> Data | None:
        data = self.plan.data
        roles = ("evaluation", "calibration", "training")
        return next((data[role] for role in roles if role in data), None)

    def looked_at(self, most: int) -> list[Batch]:
        """Return samples for measuring the noise of layers, as :meth:`probes` does.

        A layer of a large network has thousands of values for each sample, so a few samples are
        enough: as many as run in some seconds.
        """
        work = batch_macs(self.baseline, self.probes(1)[0])
        return self.probes(max(_FEWEST_LOOKED_AT, min(most, int(_LOOKED_AT_MACS / max(work, 1)))))

    def targets(self, count: int) -> Any:
        """Return the targets of the evaluation's first samples, if they have some."""
        data = self.evaluation
        return (
            None if data is None or data.target is None else answers(data.first(count), data.target)
        )

    def evaluated(self, key: str, make_runner: Any, label: str) -> Evaluation | None:
        """Return the evaluation of the model with this key, from the store if possible."""
        data, metric = self._cached_evaluation, self.plan.metric
        if data is None or metric is None:
            return None
        evaluation_key = result_key(
            "evaluate",
            self._alike.get(key, key),
            baseline=self.source_key,
            data=data.digest,
            batch=data.batch,  # a transform may draw, and a model scale, batch by batch
            metric=metric.name,
            higher_is_better=metric.higher_is_better,
            code=metric_code(metric),
            version=_EVALUATION,
        )
        earlier = self.store.read(evaluation_key)
        if earlier is None:
            with self.progress.stage(f"evaluate {label}", data.samples) as advance:
                runner, reference = make_runner(), self.baseline_runner
                if runner is not reference:
                    runner = self._over_sequences(runner)
                done = evaluate(runner, reference, data, metric, advance, self.output_parts)
                del runner, reference
            self.release()
            with self.store.write(evaluation_key) as (folder, result):
                np.save(folder / _PER_SAMPLE, done.per_sample)
                if done.decisions is not None:
                    np.savez(folder / _DECISIONS, **vars(done.decisions))
                result.update(done.as_json())
            return done
        folder = self.store.folder(evaluation_key)
        decisions = None
        if (folder / _DECISIONS).is_file():
            with np.load(folder / _DECISIONS) as stored:
                single, choices = bool(stored["single"]), int(stored["choices"])
                decisions = Decisions(stored["classes"], stored["margins"], single, choices)
        per_sample = np.load(folder / _PER_SAMPLE)
        return Evaluation(per_sample=per_sample, decisions=decisions, **earlier)

    @cached_property
    def baseline_evaluation(self) -> Evaluation | None:
        """The float model's results."""
        return self.evaluated(self.source_key, lambda: self.baseline_runner, "the float model")


def metric_code(metric: Metric) -> str:
    """Hash of what decides a metric beside its name: the user's code, or files of the model."""
    return metric.digest if metric.code is None else code_digest(metric.code)


def environment() -> dict[str, Any]:
    """Return versions and machine for ``report.json``."""
    return {
        "python": platform.python_version(),
        "versions": dict(compute_versions()),
        **machine(),
    }


@dataclass(frozen=True)
class KeptNumbers:
    """Numbers in the store that hold on this machine; see compressor.types.passes.Kept."""

    _store: Store

    def read(self, identity: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the stored numbers, if any."""
        return self._store.read(self._key(identity))

    def write(self, identity: Mapping[str, Any], content: Mapping[str, Any]) -> None:
        """Store numbers in place of those stored before."""
        self._store.keep(self._key(identity), content)

    @staticmethod
    def _key(identity: Mapping[str, Any]) -> str:
        return result_key("kept", "", machine=machine(), **identity)


def machine() -> dict[str, Any]:
    """Return the description of the machine that a latency is valid for."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


@cache
def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
