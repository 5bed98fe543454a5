"""Proves candidates on the evaluation data, in an order that is fixed before they are looked at.

Where the evaluation data are too few to prove the first of them, the order goes on by what was
measured: an answer that is not proved is still one, and is called so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compressor.errors import DataError
from compressor.lab.tune.answer import Goal
from compressor.lab.tune.candidate import Candidate
from compressor.lab.tune.journal import Journal
from compressor.lab.tune.solver import (
    Standing,
    as_noise_orders,
    beyond_the_expected,
    is_smaller,
    order_of_proof,
)
from compressor.lab.tune.watch import LateError
from compressor.lab.tune.workbench import Workbench
from compressor.report import formats
from compressor.run.verdicts.statistics import Difference
from compressor.run.verdicts.verdicts import WIDEST_RATIO, verdict_of

_MOST = 5  # that are expected to be proved
_LEAST = 3  # of these, for what comes last
_KEPT = "keeps the limit as measured, but is not proved"


@dataclass
class Proofs:
    """The proofs of one search: one sequence, which ends at the first that is not proved.

    If that is the very first, it goes on with those that keep the limit as measured.

    What is made between two calls may depend on the search data only, so that the whole order is
    one that no look at the evaluation data has changed.

    Attributes:
        publish: called with each candidate that is the best so far.
        improved: returns a candidate with what takes long to make, if it gains by that.
        best: the last one that is proved, or where none is, that keeps the limit as measured; of a
            size alone, what loses least.
        going: none has failed.
    """

    bench: Workbench
    goal: Goal
    journal: Journal
    publish: Callable[[Candidate], None]
    improved: Callable[[Candidate], Candidate]
    best: Candidate | None = None
    going: bool = True
    _done: int = 0

    def expected(self, pool: Sequence[Candidate]) -> None:
        """Prove those that may be shown to keep the limit, each smaller than the one before."""
        limit = self.goal.metric_drop
        assert limit is not None
        left = self._left(pool)
        found = self._standings(left)
        if any(s.drop is None or s.drop <= limit for s in found):
            self._sequence([left[i] for i in order_of_proof(found, limit, self._most)])

    def finish(self, pool: Sequence[Candidate]) -> Candidate | None:
        """Prove what is left, and return the answer; ``None`` where no candidate is one."""
        limit = self.goal.metric_drop
        if limit is None:
            fitting = sorted(filter(self.fits, pool), key=self.loss)
            self.best = next((c for c in fitting if self._proof(c) is not None), None)
            if self.best is not None:
                self.publish(self.best)
            return self.best
        self.expected(pool)
        left = self._left(pool)
        if left and not self._done:  # the least bad one is still an answer
            self._sequence([left[order_of_proof(self._standings(left), limit, 1)[0]]])
        left = self._left(pool)
        if self._is_proved and self.best is not None:
            found = self._standings(left)
            for place in beyond_the_expected(found, limit, self.size(self.best)):
                if self.going:
                    self._sequence([self.improved(left[place])])
        elif left:
            drops = [self.bench.searched(c).drop or 0.0 for c in left]  # none without labels
            found = [Standing(self.size(c), drop) for c, drop in zip(left, drops, strict=True)]
            if min(drops) <= limit:
                self._sequence([left[place] for place in order_of_proof(found, limit, self._most)])
        return self.best

    def another(self, candidate: Candidate) -> None:
        """Look at one more candidate where the first broke the limit: nothing is proved of it.

        What keeps the limit as measured is an answer, and ends this.
        """
        if self.best is not None or not self.fits(candidate) or self._is_late(candidate):
            return
        limit, proof = self.goal.metric_drop, self._proof(candidate)
        if proof is None:
            return
        if candidate.verdict == "passed":
            candidate.verdict = "unknown"
        kept = candidate.verdict == "unknown" and limit is not None and proof.drop <= limit
        words = _KEPT if kept else "not proved"
        self.journal.path.append(f"{words}: {self.journal.drop(candidate)}")
        if kept:
            self.best = candidate
            self.publish(candidate)

    def follow(self, candidate: Candidate) -> None:
        """Look at one more candidate, which the evaluation data have led to: nothing is proved."""
        assert self.best is not None
        smaller = is_smaller(self.size(candidate), self.size(self.best))
        if self.is_open and smaller and self.fits(candidate):
            self._sequence([candidate])

    def fits(self, candidate: Candidate) -> bool:
        """Whether a candidate keeps the limits of size and latency."""
        small = self.goal.size_ratio is None or candidate.size_ratio <= self.goal.size_ratio
        return small and self.is_fast(candidate)

    def is_fast(self, candidate: Candidate) -> bool:
        """Whether a candidate keeps the limit of latency."""
        if self.goal.latency_ratio is None:
            return True
        timed = self.bench.timed(candidate)
        interval = None if timed is None else (timed["ci95"][0], timed["ci95"][1])
        verdict = verdict_of(interval, self.goal.latency_ratio, WIDEST_RATIO)
        if verdict != "passed":
            ratio = "not measured" if timed is None else formats.ratio(timed["value"])
            line = f"{candidate.name}: latency ratio {ratio}: left out"
            self.journal.path += [] if line in self.journal.path else [line]
        return verdict == "passed"

    def loss(self, candidate: Candidate) -> tuple[float, int]:
        """Return what is to be as small as the limits of size and latency allow."""
        decibels = self.bench.searched(candidate).sqnr_db
        return (-math.inf if decibels is None else -decibels), candidate.bytes

    def size(self, candidate: Candidate) -> float:
        """Return what is to be minimized."""
        return candidate.bytes if self.goal.minimize == "size" else self.time(candidate)

    def time(self, candidate: Candidate) -> float:
        """Return a candidate's latency over the float model's."""
        timed = self.bench.timed(candidate)
        return math.inf if timed is None else float(timed["value"])

    @property
    def is_open(self) -> bool:
        """Whether there is an answer that is not proved."""
        return self.best is not None and self.goal.metric_drop is not None and not self._is_proved

    @property
    def _most(self) -> int:
        """How many evaluations may follow, and fit into the time."""
        return self.bench.watch.number_of("prove", max(_MOST - self._done, _LEAST))

    def _is_late(self, candidate: Candidate) -> bool:
        """Whether one more evaluation does not fit into the time; an answer needs one."""
        why = self.bench.watch.late_for({"prove": 1}, {}) if self._done else ""
        if why:
            self.journal.skip(f"proof of {candidate.name}", why)
        return bool(why)

    @property
    def _is_proved(self) -> bool:
        return self.best is not None and self.best.verdict == "passed"

    def _left(self, pool: Sequence[Candidate]) -> list[Candidate]:
        """Return what may come next in the sequence, the quietest first: of a size, that is it."""
        if not self.going:
            return []
        best, left = self.best, [c for c in pool if c.proof is None]
        if best is not None:  # of what breaks the limit, not even the time need be known
            left = [c for c in left if not self.bench.searched(c).stopped]
        fitting = sorted(filter(self.fits, left), key=self.loss)
        if best is None:
            return fitting
        return [c for c in fitting if is_smaller(self.size(c), self.size(best))]

    def _sequence(self, candidates: Sequence[Candidate]) -> None:
        """Prove one after the other, until one is not."""
        limit = self.goal.metric_drop
        assert limit is not None
        for candidate in candidates:
            if self._is_late(candidate):
                return
            proof = self._proof(candidate)
            if proof is None:
                return
            words = self._judge(candidate, proof, limit)
            self._done += 1
            self.journal.path.append(f"{words}: {self.journal.drop(candidate)}")
            if not self.going:
                return
            self.best = candidate
            self.publish(candidate)

    def _proof(self, candidate: Candidate) -> Difference | None:
        """Look at the evaluation data; ``None`` where the time is up or the metric undefined.

        A metric that is not defined for a candidate is no proof of it, so that the sequence ends.
        """
        try:
            return self.bench.proved(candidate)
        except (LateError, DataError) as error:
            self.journal.skip(f"proof of {candidate.name}", error.problem)
            self.going = self.going and isinstance(error, LateError)
            return None

    def _judge(self, candidate: Candidate, proof: Difference, limit: float) -> str:
        """Return in words what the evaluation data say; end where all ends."""
        weak = self.best is not None and not self._is_proved
        if weak and candidate.verdict == "passed":
            candidate.verdict = "unknown"  # behind one that was not proved, no proof counts
        if candidate.verdict == "passed":
            return "proved"
        kept = candidate.verdict == "unknown" and proof.drop <= limit
        self.going = kept and (weak or self.best is None)
        return _KEPT if kept else "not proved"

    def tell_of_more_samples(self, pool: Sequence[Candidate]) -> None:
        """Tell of the smallest candidate that more samples to judge could prove, if one is."""
        judged = self.bench.evaluation_samples
        proved = self.best if self._is_proved else None
        size = math.inf if proved is None else self.size(proved)
        needed = {
            c.name: (c, number)
            for c in pool
            if (number := self.bench.samples_to_prove(c)) is not None and number > judged
            if self.fits(c) and is_smaller(self.size(c), size)
        }
        if needed:
            least = min(self.size(c) for c, _ in needed.values())
            near = [x for x in needed.values() if not is_smaller(least, self.size(x[0]))]
            # Of those as small, what was judged: its own figures say more than the search's.
            candidate, number = min(near, key=lambda x: (x[0].proof is None, x[1]))
            other = "a smaller one" if self.goal.minimize == "size" else "a faster one"
            it = "it" if candidate is self.best else other
            self.journal.more_samples(it, candidate, number, judged)

    def _standings(self, candidates: Sequence[Candidate]) -> list[Standing]:
        """Return where candidates stand, in order of their noise; what breaks the limit is inf."""
        found = [(self.size(c), self.bench.searched(c)) for c in candidates]
        return as_noise_orders(
            [
                Standing(size, math.inf) if s.stopped else Standing(size, s.bound, s.least)
                for size, s in found
            ]
        )
