"""A table of times of a network's segments, measured where it lacks one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir

from compressor.passes.prune.structured.segments import Segment, Segments, Variant
from compressor.types.carrier import Runner
from compressor.types.passes import Kept
from compressor.types.tensors import Array, Batch

_TOGETHER = 16  # sessions that are open at once
_LEAST_RUNS, _MOST_RUNS = 5, 400
SECONDS = 0.02  # for each timing, of which there are at most so many
MOST_TIMINGS = 600
_TURNS = 5
_SESSIONS = 7  # of a whole network: there are few such timings
_ALONE = 0.8  # least share of the process's time on the processor of a thread that computes alone
_UNINTERRUPTED = 0.95  # least share of the time that passed, on the processor
_WHOLE = "whole"
_EMPTY = "empty"

Opener = Callable[[ir.Model], Runner]


@dataclass(eq=False)
class TimingTable:
    """Seconds of segments, by the hash of what they compute.

    What was measured before is taken from the store of the run, so that a second target, or a run
    that was killed, decides by the same numbers. So what is asked for first is timed, up to a
    number, and all others are estimated, though an earlier run may have timed them.

    Args:
        segments: those of the network.
        open: starts the runtime.
        kept: what earlier runs left; ``None`` keeps nothing.
        identity: what the times depend on besides the segments, as JSON.
    """

    segments: Segments
    open: Opener
    kept: Kept | None
    identity: dict[str, Any]
    _timed_keys: set[str] = field(default_factory=set, init=False)

    @cached_property
    def _seconds(self) -> dict[str, float]:
        earlier = None if self.kept is None else self.kept.read(self.identity)
        return dict(earlier or {})

    def times(self, wanted: Sequence[tuple[Segment, Variant]]) -> list[float]:
        """Return the seconds of segments at given widths, without what any call takes."""
        keys = [self.segments.key(*one) for one in wanted]
        left = MOST_TIMINGS - len(self._timed_keys)
        self._timed_keys.update(
            [k for k in dict.fromkeys(keys) if k not in self._timed_keys][:left]
        )
        pairs = zip(keys, wanted, strict=True)
        lacking = self._timed_keys - self._seconds.keys()
        self._measure({key: one for key, one in pairs if key in lacking})
        return [
            self._seconds[key] if key in self._timed_keys else self._estimate(*one)
            for key, one in zip(keys, wanted, strict=True)
        ]

    def _estimate(self, segment: Segment, variant: Variant) -> float:
        """Return what is taken for a segment that is not timed any more: its units' share."""
        whole = self._seconds.get(self.segments.key(segment, _nothing(variant)), 0.0)
        gone = variant.removed & segment.units
        return float(whole * (1 - gone.sum() / max(segment.units.sum(), 1)))

    def share(self, variant: Variant) -> float:
        """Return the share of the unchanged network's time that a whole network takes.

        It decides, so it is measured side by side in several sessions, each of which may be faster
        or slower than others of the same network.
        """
        key = _WHOLE + "".join(self.segments.key(s, variant) for s in self.segments.all)
        if key not in self._seconds:
            models = (self.segments.smaller(v) for v in (variant, _nothing(variant)))
            self._seconds[key] = self._compared(*models)
            self._keep()
        return self._seconds[key]

    def _compared(self, smaller: ir.Model, whole: ir.Model) -> float:
        models = [(smaller, self.segments.batch), (whole, self.segments.batch)]
        sessions = np.array([self._timed(models) for _ in range(_SESSIONS)])
        return float(np.median(sessions[:, 0] / sessions[:, 1]))

    def _measure(self, missing: dict[str, tuple[Segment, Variant]]) -> None:
        names, models = list(missing), self.segments.models(list(missing.values()))
        for start in range(0, len(names), _TOGETHER):
            part = names[start : start + _TOGETHER]
            made = [next(models) for _ in part]
            present = [model for model in made if model is not None]
            seconds = iter(self._timed([_empty(), *present]))
            call = min(next(seconds), self._seconds.get(_EMPTY, np.inf))
            self._seconds[_EMPTY] = call
            for name, model in zip(part, made, strict=True):
                self._seconds[name] = 0.0 if model is None else max(next(seconds) - call, 0.0)
            self._keep()

    def _timed(self, models: Sequence[tuple[ir.Model, Batch]]) -> list[float]:
        """Run models in turn; return the least seconds of a run of each.

        Few of them are run for as long as many together: what slows a machine down, such as its
        other users, lasts longer than one model is run.
        """
        seconds = SECONDS * max(1.0, _TOGETHER / len(models))
        runners = [(self.open(model), feed) for model, feed in models]
        found = [[_runs(runner, feed, 2)] for runner, feed in runners]
        once = [max(_least(first), 1e-7) for (first,) in found]
        counts = [int(np.clip(seconds / t, _LEAST_RUNS, _MOST_RUNS)) for t in once]
        for turn in range(_TURNS):
            order = range(len(runners)) if turn % 2 else reversed(range(len(runners)))
            for i in order:
                found[i].append(_runs(*runners[i], -(-counts[i] // _TURNS)))
        return [_least(np.concatenate(runs)) for runs in found]

    def _keep(self) -> None:
        if self.kept is not None:
            self.kept.write(self.identity, self._seconds)


def _nothing(variant: Variant) -> Variant:
    return Variant(np.zeros_like(variant.removed))


def _runs(runner: Runner, feed: Batch, count: int) -> Array:
    """Return ``[count, 3]``: seconds of each run on the calling thread, on all, and on the wall."""
    marks = [(time.thread_time(), time.process_time(), time.perf_counter())]
    for _ in range(count):
        runner.run(feed)
        marks.append((time.thread_time(), time.process_time(), time.perf_counter()))
    return np.diff(marks, axis=0)


def _least(runs: Array) -> float:
    """Return the least seconds of a run, among those that nothing interrupted.

    If only the calling thread computes, a run was interrupted if it was on the processor for less
    time than has passed. Its time on the processor may then be far too short: a virtual machine
    takes off what it believes that its host has taken.
    """
    here, everywhere, passed = runs.T
    if here.sum() < _ALONE * everywhere.sum():
        return float(passed.min())
    whole = here >= _UNINTERRUPTED * passed
    # Runs that are longer than a slice of the scheduler are all interrupted on a busy machine.
    return float(passed[whole].min() if whole.any() else np.median(here))


def _empty() -> tuple[ir.Model, Batch]:
    """Return a model that does nothing, which takes what every call of a runtime takes."""
    value = ir.Value(name="x", shape=ir.Shape((1,)), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node("Neg", [value])
    node.outputs[0].name, node.outputs[0].type = "y", value.type
    graph = ir.Graph([value], node.outputs, nodes=[node], opset_imports={"": 17})
    return ir.Model(graph, ir_version=8), {"x": np.zeros(1, np.float32)}
