"""What changes the network itself: channels, blocks and ranks, N:M weights, training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compressor.errors import CompressorError
from compressor.lab.tune.answer import Goal
from compressor.lab.tune.journal import Journal
from compressor.lab.tune.recipe import Recipe
from compressor.lab.tune.workbench import Candidate, Workbench
from compressor.report import formats

_SHARES = (0.9, 0.75, 0.5, 0.25)  # that remain of the weights or the time: each step is bolder
_TRAINED_SHARES = (0.6, 0.4)
_FEWEST = 0.3  # a smaller share is not reached without training
_SMALLER = 0.99  # share of the bytes from which on a candidate is worth making
_PRUNING = ("prune-structured", "prune-nm", "low-rank")
_SPARSE = ("tensorrt",)  # targets with kernels for 2:4 weights
_OPTIMIZER = {"optimizer": "sgd", "clip": 1.0}
_WEIGHTS = ("bits", "granularity", "symmetric", "overflow", "range")  # keys that qat has, too
_ACTIVATIONS = ("bits", "observer", "symmetric")


@dataclass
class Structure:
    """The part of a search that comes after the widths of layers.

    Attributes:
        added: makes a candidate and puts it into the pool; ``None`` where that fails.
        ahead: lets workers begin candidates.
    """

    bench: Workbench
    goal: Goal
    journal: Journal
    added: Callable[[str, Recipe, Mapping[str, str]], Candidate | None]
    ahead: Callable[[Sequence[Recipe]], None]

    def explore(self, pool: Sequence[Candidate]) -> None:
        """Try structures on top of the best recipe so far, mild ones first."""
        start = self._start(pool)
        named = [str(entry["pass"]) for entry in self.bench.spec.document.value["passes"]]
        if start is None:
            self.journal.skip("fewer channels", "no recipe keeps the limit with all of them")
        elif set(named) & set(_PRUNING):
            self.journal.skip("fewer channels", "the spec removes weights itself")
        else:
            self._pruned(start)
            self._sparse(start)
        self._trained(pool, start)

    def _start(self, pool: Sequence[Candidate]) -> Candidate | None:
        """Return the recipe that is made smaller or faster."""
        limit = self.goal.metric_drop
        if limit is None:
            return pool[0]  # the widest, which may be too large with all of its channels
        bounds = [(self.bench.searched(c).bound, c) for c in pool]
        kept = [c for bound, c in bounds if bound is not None and bound <= limit]
        return min(kept, key=lambda c: c.bytes, default=None)

    def _shares(self, start: Candidate) -> tuple[float, ...]:
        """Return which shares of the weights are tried."""
        if self.goal.metric_drop is not None or self.goal.size_ratio is None:
            return _SHARES[: self.goal.rounds]
        share = round(0.95 * self.goal.size_ratio / start.size_ratio, 2)
        return (share,) if _FEWEST <= share < 1 and self.goal.rounds else ()

    def _pruned(self, start: Candidate) -> None:
        """Remove more and more, in each of two ways, as long as the limit may be kept."""
        shares = self._shares(start)
        if not shares:
            self.journal.skip("fewer channels", "they are not needed, or too few would be left")
        self._rungs(self._what, self._removal, start.recipe, start, shares)
        factored = start.recipe.with_parts(start.choice)
        if factored is None:
            self.journal.skip("low rank", "the names of layers do not tell their parts apart")
        else:
            counted = "operations" if self.goal.minimize == "latency" else "weights"
            self._rungs(f"{counted} by low rank", self._factors, factored, start, shares)

    def _rungs(
        self,
        what: str,
        removal: Callable[[float], dict[str, Any]],
        basis: Recipe,
        start: Candidate,
        shares: Sequence[float],
    ) -> None:
        rungs = [(share, removal(share)) for share in shares]
        self.ahead([basis.after(entry) for _, entry in rungs])
        for share, entry in rungs:
            made = self._smaller(f"{share:.0%} of the {what}", entry, basis, start)
            if made is None or self._breaks(made):
                return

    @property
    def _what(self) -> str:
        return "time" if self.goal.minimize == "latency" else "weights"

    def _removal(self, share: float) -> dict[str, Any]:
        kind = "latency" if self.goal.minimize == "latency" else "parameters"
        return {"pass": "prune-structured", "target": {kind: share}}

    def _factors(self, share: float) -> dict[str, Any]:
        """Return the pass that makes products of two of layers; it counts operations, not time."""
        kind = "macs" if self.goal.minimize == "latency" else "parameters"
        weighted = "calibration" in self.bench.plan.data
        return {"pass": "low-rank", "target": {kind: share}, "weighted": weighted}

    def _smaller(
        self, what: str, entry: Mapping[str, Any], basis: Recipe, start: Candidate
    ) -> Candidate | None:
        """Make a candidate, if it may be smaller and quieter than what there is."""
        name, recipe = f"{what}, {start.name}", basis.after(entry)
        try:
            planned = self.bench.planned(recipe)
            predicted = planned.exports[self.bench.main].bytes
            if self.goal.minimize == "size" and predicted > _SMALLER * start.bytes:
                self.journal.skip(name, f"the file is not smaller ({formats.size(predicted)})")
                return None
            if self.journal.is_late(name):
                return None
            beaten = self._beaten_by(what, entry, predicted)
        except CompressorError as error:
            self.journal.skip(name, f"{error.subject}: {error.problem}")
            return None
        if beaten is not None:
            self.journal.skip(name, f"it alone is noisier than {beaten.name}, which is smaller")
            return None
        return self.added(name, recipe, start.choice)

    def _beaten_by(self, what: str, entry: Mapping[str, Any], size: int) -> Candidate | None:
        """Return a candidate that is smaller, and quieter than what a pass alone leaves.

        Quantization only adds to that noise, and it is most of what a whole candidate takes.
        """
        if self.goal.minimize != "size":
            return None
        smaller = [c for c in self.bench.made.values() if c.bytes <= size]
        noises = [(self.bench.searched(c).sqnr_db, c) for c in smaller]
        known = [(decibels, c) for decibels, c in noises if decibels is not None]
        best, candidate = max(known, key=lambda x: x[0], default=(math.inf, None))
        decibels = None if candidate is None else self.bench.sqnr_behind(what, entry)
        return candidate if decibels is not None and decibels < best else None

    def _breaks(self, made: Candidate) -> bool:
        """Whether a candidate is known to lose more than is allowed."""
        found, limit = self.bench.searched(made), self.goal.metric_drop
        return found.stopped or limit is None or (found.bound is not None and found.bound > limit)

    def _sparse(self, start: Candidate) -> None:
        """Try 2:4 weights where the target has kernels for them."""
        exporter = start.artifact.exporter
        target = str(getattr(exporter, "target", exporter.format))
        if target not in _SPARSE:
            self.journal.skip("2:4 weights", f"{target} has no kernels for them")
            return
        recipe = start.recipe.after({"pass": "prune-nm"})
        self.added(f"2:4 weights, {start.name}", recipe, start.choice)

    def _trained(self, pool: Sequence[Candidate], start: Candidate | None) -> None:
        """Train with rounding at the fewest bits, and what has lost channels."""
        if not self.goal.train:
            self.journal.skip("training (distill, qat)", "it was not asked for (--train)")
            return
        labels = self.bench.plan.data["training"].target is not None
        teacher = {} if labels else {"alpha": 0.0}
        fewest = min((c for c in pool if not c.recipe.left_out), key=lambda c: c.bytes)
        rounding = with_qat(fewest.recipe, {**_OPTIMIZER, "learning-rate": 0.001}, teacher)
        if rounding is None:
            self.journal.skip("qat", "it trains what quantize-static quantizes")
        else:
            self._learned(f"{fewest.name}, qat", rounding, fewest.choice)
        basis = start or max(pool, key=lambda c: self.bench.searched(c).sqnr_db or 0.0)
        keys = {"epochs": 3, "learning-rate": 0.01, **_OPTIMIZER, **teacher}
        for share in _TRAINED_SHARES[: self.goal.rounds]:
            passes = (self._removal(share), {"pass": "distill", **keys})
            name = f"{share:.0%} of the {self._what}, distill, {basis.name}"
            made = self._learned(name, basis.recipe.after(*passes), basis.choice)
            if made is None or self._breaks(made):
                return

    def _learned(self, name: str, recipe: Recipe, choice: Mapping[str, str]) -> Candidate | None:
        return None if self.journal.is_late(name) else self.added(name, recipe, choice)


def with_qat(recipe: Recipe, keys: Mapping[str, Any], teacher: Mapping[str, Any]) -> Recipe | None:
    """Return a recipe that trains what it quantizes; ``None`` where nothing trains that.

    Args:
        keys: how it trains.
        teacher: options of the distillation from the float model.
    """
    tuned = recipe.passes[recipe.index]
    if tuned["pass"] != "quantize-static":
        return None
    weights, activations = tuned.get("weights") or {}, tuned.get("activations") or {}
    ours = {
        "weights": {k: v for k, v in weights.items() if k in _WEIGHTS},
        "activations": {k: v for k, v in activations.items() if k in _ACTIVATIONS and v != "auto"},
    }
    entry = {"pass": "qat", **keys, "distill": dict(teacher)}
    entry |= {key: value for key, value in ours.items() if value}
    if tuned.get("layers"):
        entry["layers"] = list(tuned["layers"])
    # Nothing can be trained after fuse, and qat fuses by itself.
    before = [p for p in recipe.passes[: recipe.index] if p["pass"] != "fuse"]
    after = recipe.passes[recipe.index + 1 :]
    return replace(recipe, passes=(*before, entry, *after), index=len(before))
