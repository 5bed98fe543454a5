"""What changes the network itself: channels, blocks and ranks, N:M weights, training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compressor.errors import CompressorError
from compressor.lab.tune.answer import Goal
from compressor.lab.tune.candidate import Candidate
from compressor.lab.tune.journal import Journal
from compressor.lab.tune.proofs import Proofs
from compressor.lab.tune.recipe import Recipe
from compressor.lab.tune.solver import is_smaller
from compressor.lab.tune.workbench import Workbench
from compressor.report import formats

# That remain of the weights or the time: each step is bolder, until one loses too much.
_SHARES = (0.8, 0.5, 0.25, 0.1, 0.04)
_TRAINED_SHARES = (0.6, 0.4, 0.2, 0.1, 0.05, 0.02)
_CLOSE = 1.15  # the factor between a share that is kept and one that is not, to try none between
_FAR = 4.0  # times the limit that the first share may lose, to try what lies above it
_REACHED = 0.95  # of a share that is asked for, to be below it
_FEWEST = 0.3  # a smaller share is not reached without training
_SMALLER = 0.99  # share of the bytes from which on a candidate is worth making
_PRUNING = ("prune-structured", "prune-nm", "low-rank")
_SPARSE = ("tensorrt",)  # targets with kernels for 2:4 weights
_OPTIMIZER = {"optimizer": "sgd", "clip": 1.0}
_WEIGHTS = ("bits", "granularity", "symmetric", "overflow", "range")  # keys that qat has, too
_ACTIVATIONS = ("bits", "observer", "symmetric")


_Removal = Callable[[float], tuple[Mapping[str, Any], ...]]


@dataclass(frozen=True)
class _Way:
    """A way to leave a share of a network.

    Attributes:
        what: what there is a share of.
        removal: the passes that leave a share.
        basis: those behind them.
        start: the candidate that has all.
        most: the largest share that may be the answer.
    """

    what: str
    removal: _Removal
    basis: Recipe
    start: Candidate
    most: float = 1.0

    def name(self, share: float) -> str:
        """Return the name of a share's candidate."""
        return f"{share:.0%} of the {self.what}, {self.start.name}"

    def recipe(self, share: float) -> Recipe:
        """Return the recipe of a share's candidate."""
        return self.basis.after(*self.removal(share))


@dataclass
class Structure:
    """The part of a search that comes after the widths of layers.

    Attributes:
        added: makes a candidate and puts it into the pool; ``None`` where that fails.
        ahead: lets workers begin candidates.
        proofs: says how small and how noisy a candidate is.
    """

    bench: Workbench
    goal: Goal
    journal: Journal
    added: Callable[[str, Recipe, Mapping[str, str]], Candidate | None]
    ahead: Callable[[Sequence[Recipe]], None]
    proofs: Proofs

    def explore(self, pool: Sequence[Candidate]) -> None:
        """Try structures on top of the best recipe so far, mild ones first."""
        start, kept = self._start(pool), 1.0
        named = [str(entry["pass"]) for entry in self.bench.spec.document.value["passes"]]
        if start is None:
            bounds = [self.bench.searched(c).bound for c in pool]
            unknown = "what recipes lose is not known before they are judged"
            none = "no recipe is expected to keep the limit with all of them"
            self.journal.skip("fewer channels", unknown if bounds == [None] * len(pool) else none)
        elif set(named) & set(_PRUNING):
            self.journal.skip("fewer channels", "the spec removes weights itself")
        else:
            kept = self._pruned(start)
            self._sparse(start)
        self._trained(pool, start, kept)

    def _start(self, pool: Sequence[Candidate]) -> Candidate | None:
        """Return the recipe that is made smaller or faster: of those as good, the quietest.

        Where all of them take too long, that is the fastest. Of a size alone, it is the widest, and
        where all of them are too large, the smallest: it needs to lose the fewest weights.
        """
        limit, size_ratio = self.goal.metric_drop, self.goal.size_ratio
        if limit is None:
            assert size_ratio is not None
            if any(c.size_ratio <= size_ratio for c in pool):
                return pool[0]
            return min(pool, key=lambda c: c.bytes)
        bounds = [(self.bench.searched(c).bound, c) for c in pool]
        kept = [c for bound, c in bounds if bound is not None and bound <= limit]
        fast = [c for c in kept if self.proofs.is_fast(c)]
        size = self.proofs.size if fast else self.proofs.time
        least = min(map(size, fast or kept), default=0.0)
        near = [c for c in fast or kept if not is_smaller(least, size(c))]
        return min(near, key=self.proofs.loss, default=None)

    def _most(self, start: Candidate) -> float:
        """Return the largest share that may be the answer, where time or bytes are limited."""
        if self._is_slow(start) and self.goal.latency_ratio is not None:
            return min(1.0, _REACHED * self.goal.latency_ratio / self.proofs.time(start))
        if self.goal.metric_drop is None and self.goal.size_ratio is not None:
            return min(1.0, _REACHED * self.goal.size_ratio / start.size_ratio)
        return 1.0

    def _is_slow(self, start: Candidate) -> bool:
        """Whether time is what is to be saved."""
        return self.goal.minimize == "latency" or not self.proofs.is_fast(start)

    def _shares(self, most: float, offered: Sequence[float]) -> tuple[float, ...]:
        """Return which shares are tried, as long as they keep the limit."""
        if not self.goal.rounds:
            return ()
        if most >= 1 and self.goal.metric_drop is not None:
            return tuple(offered)
        first = round(most, 2)
        if self.goal.metric_drop is None:
            return (first,) if _FEWEST <= first < 1 else ()
        return (first, *(s for s in offered if _CLOSE * s < first))

    def _pruned(self, start: Candidate) -> float:
        """Remove more and more, in each of two ways, as long as the limit may be kept.

        Returns:
            the least share that may keep it with fewer channels.
        """
        most = self._most(start)
        shares = self._shares(most, _SHARES)
        if not shares:
            words = "they are not needed, or too few would be left"
            self.journal.skip("fewer channels", words if self.goal.rounds else "--rounds is 0")
        what, removal = self._removal(start)
        kept = self._rungs(_Way(what, removal, start.recipe, start, most), shares)
        factored = start.recipe.with_parts(start.choice)
        if factored is None:
            self.journal.skip("low rank", "the names of layers do not tell their parts apart")
        else:
            counted, factors = self._factors(start)
            self._rungs(_Way(f"{counted} by low rank", factors, factored, start, most), shares)
        return kept

    def _rungs(self, way: _Way, shares: Sequence[float]) -> float:
        """Go down the shares until one loses too much, and then between that and the one before.

        What makes no smaller file is not made, and so is none of the ``--rounds`` steps. If the
        size alone is limited, the first share that fits ends them: one that takes more than was
        aimed at says how much less is left next.

        Returns:
            the least share that may keep the limit.
        """
        alone = self.goal.metric_drop is None
        steps = self.goal.rounds if alone else min(self.goal.rounds, len(shares))
        self.ahead([way.recipe(share) for share in shares[:steps]])
        kept, broken, left = way.most, 0.0, list(shares)
        while steps and (broken or left):
            share = round(math.sqrt(kept * broken), 2) if broken else left.pop(0)
            if self.journal.is_late(way.name(share)):
                return kept
            try:
                size = self._predicted(way, share)
                made = None if size is None else self._smaller(way, share, size)
            except CompressorError as error:
                self.journal.skip(way.name(share), f"{error.subject}: {error.problem}")
                return kept
            if size is None:
                if broken:
                    return kept
                continue  # what takes bytes itself is smaller from some share on
            steps -= 1
            if alone:
                if made is None or self.proofs.fits(made):
                    return kept
                next_share = round(share * _REACHED / max(1.0, self.journal.excess(made)), 2)
                left = [next_share] if next_share >= _FEWEST else []
            elif made is None or self._breaks(made):
                broken = share
            else:
                kept = share
            if broken and (kept < _CLOSE * broken or (kept == way.most and self._is_far(made))):
                return kept
        if left and not broken:
            self.journal.skip(way.name(left[0]), "--rounds are used up")
        return kept

    def _removal(self, start: Candidate) -> tuple[str, _Removal]:
        """Return what channels are removed by, and how."""
        what, kind = ("time", "latency") if self._is_slow(start) else ("weights", "parameters")
        return what, lambda share: ({"pass": "prune-structured", "target": {kind: share}},)

    def _factors(self, start: Candidate) -> tuple[str, _Removal]:
        """Return how products of two are made of layers; the pass counts operations, not time."""
        what, kind = ("operations", "macs") if self._is_slow(start) else ("weights", "parameters")
        keys = {"pass": "low-rank", "weighted": "calibration" in self.bench.plan.data}
        return what, lambda share: ({**keys, "target": {kind: share}},)

    def _predicted(self, way: _Way, share: float) -> int | None:
        """Return the bytes of a share's artifact; ``None`` where what keeps the limit has no more.

        The other way may have taken more before.
        """
        size = self.bench.planned(way.recipe(share)).exports[self.bench.main].bytes
        made, most = self.bench.made.values(), float(way.start.bytes)
        if self.goal.metric_drop is not None:
            kept = (c.bytes for c in made if not self._breaks(c) and self.proofs.is_fast(c))
            most = min(kept, default=math.inf)
        trains = len(way.removal(share)) > 1  # as small is enough then: it loses less
        if self.goal.minimize == "size" and size > most * (1.0 if trains else _SMALLER):
            why = f"the file is not smaller ({formats.size(size)})"
            self.journal.skip(way.name(share), why)
            return None
        return size

    def _smaller(self, way: _Way, share: float, size: int) -> Candidate | None:
        """Make a candidate, if it may be quieter than what is as small."""
        name = way.name(share)
        first, *others = way.removal(share)
        beaten = self._beaten_by(f"{share:.0%} of the {way.what}", first, size)
        if beaten is not None and not others:  # training wins back what the first loses
            self.journal.skip(name, f"it alone is noisier than {beaten.name}, which is smaller")
            return None
        return self.added(name, way.recipe(share), way.start.choice)

    def _beaten_by(self, what: str, entry: Mapping[str, Any], size: int) -> Candidate | None:
        """Return a candidate that is smaller, and quieter than what a pass alone leaves.

        Quantization only adds to that noise, and it is most of what a whole candidate takes.
        """
        if self.goal.minimize != "size" or self.goal.latency_ratio is not None:
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

    def _is_far(self, made: Candidate | None) -> bool:
        """Whether a candidate loses so much that one of a little more would lose too much, too."""
        if made is None or self.goal.metric_drop is None:
            return True
        bound = self.bench.searched(made).bound
        return bound is not None and bound > _FAR * self.goal.metric_drop

    def _sparse(self, start: Candidate) -> None:
        """Try 2:4 weights where the target has kernels for them."""
        exporter = start.artifact.exporter
        target = str(getattr(exporter, "target", exporter.format))
        if target not in _SPARSE:
            self.journal.skip("2:4 weights", f"{target} has no kernels for them")
            return
        recipe = start.recipe.after({"pass": "prune-nm"})
        self.added(f"2:4 weights, {start.name}", recipe, start.choice)

    def _trained(self, pool: Sequence[Candidate], start: Candidate | None, kept: float) -> None:
        """Train with rounding at the fewest bits, and what has lost channels.

        Args:
            kept: the share that may keep the limit without training. Of time, no larger ones are
                trained; of bytes, those that make no larger file.
        """
        if not self.goal.train:
            self.journal.skip("training (distill, qat)", "it was not asked for (--train)")
            return
        labels = self.bench.plan.data["training"].target is not None
        teacher = {} if labels else {"alpha": 0.0}
        keys = {"epochs": 3, "learning-rate": 0.01, **_OPTIMIZER, **teacher}
        basis = self._rounded(pool, start, teacher) or start
        basis = basis or max(pool, key=lambda c: self.bench.searched(c).sqnr_db or 0.0)
        what, removal = self._removal(basis)
        most = self._most(basis)
        way = _Way(
            f"{what}, distill",
            lambda share: (*removal(share), {"pass": "distill", **keys}),
            basis.recipe,
            basis,
            most,
        )
        shares = self._shares(most, _TRAINED_SHARES)
        if self._is_slow(basis) and kept < most:
            shares = tuple(share for share in shares if share <= kept)
        self._rungs(way, shares)

    def _rounded(
        self, pool: Sequence[Candidate], start: Candidate | None, teacher: Mapping[str, Any]
    ) -> Candidate | None:
        """Return what is trained with its rounding at the fewest bits, if it keeps the limit."""
        fewest = min((c for c in pool if not c.recipe.left_out), key=lambda c: c.bytes)
        recipe = with_qat(fewest.recipe, {**_OPTIMIZER, "learning-rate": 0.001}, teacher)
        name = f"{fewest.name}, qat"
        if recipe is None:
            self.journal.skip("qat", "it trains what quantize-static quantizes")
        elif fewest is start:
            self.journal.skip(name, "it is not needed")
        elif not self.journal.is_late(name):
            made = self.added(name, recipe, fewest.choice)
            return None if made is None or self._breaks(made) else made
        return None


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
