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
from compressor.types.tensors import Batch

_TOGETHER = 16  # sessions that are open at once
_LEAST_RUNS, _MOST_RUNS = 5, 400
SECONDS = 0.02  # for each timing, of which there are at most so many
MOST_TIMINGS = 600
_WHOLE_SECONDS = 0.2  # for a whole network: there are few such timings, and they decide
_ROUNDS = 5
_ALONE = 0.8  # least share of the process's time on the processor of a thread that computes alone
_WHOLE = "whole"
_EMPTY = "empty"

Opener = Callable[[ir.Model], Runner]


@dataclass(eq=False)
class TimingTable:
    """Seconds of segments, by the hash of what they compute.

    What was measured before is taken from the store of the run, so that a second target, or a run
    that was killed, decides by the same numbers.

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
    timings: int = field(default=0, init=False)

    @cached_property
    def _seconds(self) -> dict[str, float]:
        earlier = None if self.kept is None else self.kept.read(self.identity)
        return dict(earlier or {})

    def times(self, wanted: Sequence[tuple[Segment, Variant]]) -> list[float]:
        """Return the seconds of segments at given widths, without what any call takes."""
        keys = [self.segments.key(*one) for one in wanted]
        missing = {k: one for k, one in zip(keys, wanted, strict=True) if k not in self._seconds}
        left = max(0, MOST_TIMINGS - self.timings)
        self._measure(dict(list(missing.items())[:left]))
        return [
            self._seconds[key] if key in self._seconds else self._estimate(*one)
            for key, one in zip(keys, wanted, strict=True)
        ]

    def _estimate(self, segment: Segment, variant: Variant) -> float:
        """Return what is taken for a segment that is not timed any more: its units' share."""
        whole = self._seconds.get(self.segments.key(segment, _nothing(variant)), 0.0)
        gone = variant.removed & segment.units
        return float(whole * (1 - gone.sum() / max(segment.units.sum(), 1)))

    def whole(self, variant: Variant) -> float:
        """Return the seconds of a whole network, measured beside the unchanged one."""
        key = self._key(variant)
        if key not in self._seconds:
            nothing = _nothing(variant)
            names = [key] if key == self._key(nothing) else [key, self._key(nothing)]
            models = [(self.segments.smaller(v), self.segments.batch) for v in (variant, nothing)]
            seconds = self._timed(models[: len(names)], _WHOLE_SECONDS)
            self._seconds.update(zip(names[:1], seconds, strict=False))
            if len(names) > 1:  # both as fast as the unchanged one was found to be at first
                base = self._seconds.setdefault(names[1], seconds[1])
                self._seconds[key] = seconds[0] * base / seconds[1]
            self._keep()
        return self._seconds[key]

    def _key(self, variant: Variant) -> str:
        return _WHOLE + "".join(self.segments.key(s, variant) for s in self.segments.all)

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

    def _timed(
        self, models: Sequence[tuple[ir.Model, Batch]], seconds: float = SECONDS
    ) -> list[float]:
        """Run models in turn, each for about so many seconds; return the least time of each."""
        self.timings += len(models)
        runners = [(self.open(model), feed) for model, feed in models]
        best = []
        for runner, feed in runners:
            once = min(_block(runner, feed, 2))
            best.append(once)
        counts = [int(np.clip(seconds / max(t, 1e-7), _LEAST_RUNS, _MOST_RUNS)) for t in best]
        rounds = int(np.clip(max(counts), _ROUNDS, _ROUNDS * seconds / SECONDS))
        for turn in range(rounds):
            order = range(len(runners)) if turn % 2 else reversed(range(len(runners)))
            for i in order:
                best[i] = min(best[i], *_block(*runners[i], -(-counts[i] // rounds)))
        return best

    def _keep(self) -> None:
        if self.kept is not None:
            self.kept.write(self.identity, self._seconds)


def _nothing(variant: Variant) -> Variant:
    return Variant(np.zeros_like(variant.removed))


def _block(runner: Runner, feed: Batch, runs: int) -> list[float]:
    """Return the seconds of each run: on the processor, if only the calling thread computes."""
    here, everywhere = time.thread_time(), time.process_time()
    marks = [(here, time.perf_counter())]
    for _ in range(runs):
        runner.run(feed)
        marks.append((time.thread_time(), time.perf_counter()))
    alone = marks[-1][0] - here >= _ALONE * (time.process_time() - everywhere)
    seconds = np.diff(marks, axis=0)[:, 0 if alone else 1]
    return [float(x) for x in seconds]


def _empty() -> tuple[ir.Model, Batch]:
    """Return a model that does nothing, which takes what every call of a runtime takes."""
    value = ir.Value(name="x", shape=ir.Shape((1,)), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node("Neg", [value])
    node.outputs[0].name, node.outputs[0].type = "y", value.type
    graph = ir.Graph([value], node.outputs, nodes=[node], opset_imports={"": 17})
    return ir.Model(graph, ir_version=8), {"x": np.zeros(1, np.float32)}
