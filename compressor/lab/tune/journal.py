"""What a search notes as it goes, and what it tells in the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from compressor.errors import DataError
from compressor.lab.tune.answer import Answer, Goal, Point, with_beaten
from compressor.lab.tune.candidate import Candidate
from compressor.lab.tune.watch import CANDIDATE, Work
from compressor.lab.tune.workbench import Workbench
from compressor.report import formats


@dataclass
class Journal:
    """The path of a search.

    Attributes:
        path: what was decided, one sentence each.
        not_tried: what was not, and why.
    """

    bench: Workbench
    goal: Goal
    path: list[str] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)

    def skip(self, what: str, why: str) -> None:
        """Note what was not tried."""
        self.not_tried.append(f"{what}: {why}")

    def tried(self, what: str) -> None:
        """Take back that something was not tried."""
        self.not_tried = [line for line in self.not_tried if not line.startswith(f"{what}: ")]

    def tell(self, candidate: Candidate) -> None:
        """Note a candidate that was made."""
        found = self.bench.searched(candidate)
        quality = "equal outputs" if found.sqnr_db is None else formats.decibel(found.sqnr_db)
        bound = ""
        if found.stopped:
            bound = f", loses more than is allowed after {found.samples} samples"
        elif found.bound is not None:
            bound = f", may lose {self.amount(found.bound)}"
        self.path.append(
            f"{candidate.name}: {formats.size(candidate.bytes)} "
            f"({formats.ratio(candidate.size_ratio)}), {quality}{bound}"
        )

    def drop(self, candidate: Candidate) -> str:
        """Return what a candidate that was judged loses."""
        proof = candidate.proof
        assert proof is not None
        interval = formats.metric_change_interval(proof.ci95, share=self.share)
        return (
            f"{candidate.name}: {formats.size(candidate.bytes)}, loses "
            f"{self.amount(proof.drop)} (95 % CI {interval})"
        )

    def more_samples(self, it: str, candidate: Candidate, needed: int, judged: int) -> None:
        """Note a candidate that more samples to judge could prove.

        Args:
            it: what it is beside the answer.
            needed: how many, in all.
            judged: how many there are.
        """
        found, proof = self.bench.searched(candidate), candidate.proof
        lost = found.drop if proof is None else proof.drop
        where = "on the search data" if proof is None else "on the evaluation data"
        words = "" if lost is None else f" loses {self.amount(lost)} {where};"
        # Two digits, rounded up: the drop that it is worked out from is an estimate itself.
        unit = 10 ** max(0, len(str(needed)) - 2)
        about = math.ceil(needed / unit) * unit
        self.path.append(
            f"more samples could prove {it}: {candidate.name}, "
            f"{formats.size(candidate.bytes)},{words} about {about} evaluation "
            f"samples would show whether it keeps the limit, and there are {judged}"
        )

    @property
    def share(self) -> bool:
        """Whether the metric is a share in percent."""
        metric = self.bench.plan.metric
        return metric is not None and metric.unit == "%"

    def amount(self, drop: float) -> str:
        """Return a drop of the metric with its unit."""
        return formats.metric_change(drop, share=self.share)

    def is_late(self, what: str, works: Mapping[Work, int] = CANDIDATE) -> bool:
        """Whether something does not fit into the time that is left, so that it is not tried.

        Args:
            works: how often each kind of work is to be done.
        """
        why = self.bench.watch.late_for(works)
        if why:
            self.skip(what, why)
        return bool(why)

    def answer(self, best: Candidate | None, pool: list[Candidate]) -> Answer:
        """Return what was found.

        Args:
            best: what keeps the limits; ``None`` where nothing does.
            pool: the candidates that could have been.
        """
        metric = self.bench.plan.metric
        assert metric is not None
        made = list(self.bench.made.values())
        reason = "" if best is not None else self._infeasible(pool)  # which may judge some
        return Answer(
            name=self.bench.spec.name,
            goal=self.goal,
            metric=metric.name,
            share=self.share,
            points=tuple(with_beaten([self._point(c) for c in made])),
            chosen=None if best is None else best.name,
            reason=reason,
            path=tuple(self.path),
            not_tried=tuple(self.not_tried),
            search=self.bench.search.words,
            evaluations=self.bench.evaluations,
        )

    def _point(self, candidate: Candidate) -> Point:
        proof, found, timed = candidate.proof, self.bench.searched(candidate), candidate.latency
        return Point(
            name=candidate.name,
            bytes=candidate.bytes,
            size_ratio=candidate.size_ratio,
            bound=found.bound,
            sqnr_db=found.sqnr_db,
            search_drop=found.drop,
            drop=None if proof is None else proof.drop,
            ci95=None if proof is None else proof.ci95,
            verdict=candidate.verdict,
            latency_ratio=None if timed is None else timed["value"],
            latency_ci95=None if timed is None else (timed["ci95"][0], timed["ci95"][1]),
        )

    def _infeasible(self, pool: list[Candidate]) -> str:
        """Return why there is no answer, and what comes nearest."""
        asked = []
        if self.goal.metric_drop is not None:
            asked.append(f"loses at most {self.amount(self.goal.metric_drop)}")
        if self.goal.size_ratio is not None:
            asked.append(f"takes at most {self.goal.size_ratio:g} of the bytes")
        if self.goal.latency_ratio is not None:
            asked.append(f"takes at most {self.goal.latency_ratio:g} of the time")
        near = [c for c in pool if c.proof is not None]
        if not near or self.goal.size_ratio is not None or self.goal.latency_ratio is not None:
            near += self._nearest(pool)
        unique = {c.name: c for c in near}.values()
        nearest = "; ".join(f"{self.drop(c)} at {self._ratios(c)}" for c in unique)
        return f"no artifact was found that {' and '.join(asked)}; the nearest: {nearest}"

    def _nearest(self, pool: list[Candidate]) -> list[Candidate]:
        """Return what is nearest to the limits of size and latency, and of the metric as well."""
        limit = self.goal.metric_drop
        bounds = [(self.bench.searched(c).bound, c) for c in pool]
        kept = [c for b, c in bounds if b is not None and limit is not None and b <= limit]
        near = [min(some, key=self.excess) for some in (kept, pool) if some]
        for candidate in near:
            if not (self.bench.evaluations and self.bench.watch.late_for({"prove": 1}, {})):
                with suppress(DataError):  # the metric is not defined for it
                    self.bench.proved(candidate)
        return [c for c in near if c.proof is not None]

    def excess(self, candidate: Candidate) -> float:
        """Return by which factor a candidate is past the limits of size and latency."""
        size, time = self.goal.size_ratio, self.goal.latency_ratio
        ratios = [] if size is None else [candidate.size_ratio / size]
        if time is not None:
            timed = self.bench.timed(candidate)
            ratios.append(math.inf if timed is None else float(timed["value"]) / time)
        return max(ratios, default=float(candidate.bytes))

    def _ratios(self, candidate: Candidate) -> str:
        """Return what a candidate takes."""
        words = f"{candidate.size_ratio:.3g} of the bytes"
        timed = candidate.latency if self.goal.latency_ratio is not None else None
        return words if timed is None else f"{words} and {timed['value']:.3g} of the time"
