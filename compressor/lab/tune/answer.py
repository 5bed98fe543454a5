"""What tuning found: measured points, the path to them, and what was not tried and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from compressor.run.verdicts.verdicts import Verdict

Objective = Literal["size", "latency"]


@dataclass(frozen=True)
class Goal:
    """What is asked for.

    Attributes:
        metric_drop: how much the metric may lose, in its unit; ``None`` to lose as little as fits.
        size_ratio: bytes over those of the float model, at most.
        latency_ratio: latency over the float model's, at most.
        rounds: how often the choice is solved, written and measured.
        seconds: what the search and its proofs may take; ``None`` for no end.
        train: candidates may be trained on the training data.
    """

    metric_drop: float | None = None
    size_ratio: float | None = None
    latency_ratio: float | None = None
    minimize: Objective = "size"
    rounds: int = 4
    seconds: float | None = None
    train: bool = False


@dataclass(frozen=True)
class Point:
    """A measured artifact.

    Attributes:
        bound: the largest drop that the search thought possible; ``None`` where it could not tell.
        search_drop: on the search data; ``None`` where these have no labels.
        drop: on the evaluation data, with its 95 % interval; ``None`` where it was not judged.
        verdict: what its proof says of the limit; ``None`` where it was not judged by that.
        beaten: another point is as small or smaller, and loses as little or less.
    """

    name: str
    bytes: int
    size_ratio: float
    bound: float | None
    sqnr_db: float | None
    drop: float | None = None
    ci95: tuple[float, float] | None = None
    verdict: Verdict | None = None
    latency_ratio: float | None = None
    latency_ci95: tuple[float, float] | None = None
    beaten: bool = False
    search_drop: float | None = None


def with_beaten(points: Sequence[Point]) -> list[Point]:
    """Mark the points that another one beats in size and noise."""
    return [replace(p, beaten=any(_beats(q, p) for q in points)) for p in points]


def _beats(one: Point, other: Point) -> bool:
    if one.sqnr_db is None or other.sqnr_db is None:
        return False
    better = one.bytes < other.bytes or one.sqnr_db > other.sqnr_db
    return one.bytes <= other.bytes and one.sqnr_db >= other.sqnr_db and better


@dataclass(frozen=True)
class Answer:
    """The result of tuning.

    Attributes:
        metric: name of the metric.
        share: it is a share in percent, so that drops are points.
        points: every candidate, in the order in which they were made.
        chosen: name of the point that is the answer; ``None`` where every one breaks the limits.
        reason: why there is no answer, and what comes nearest; empty where there is one.
        path: what was decided, one sentence each.
        not_tried: what was not, and why.
        search: where the samples are from that candidates were compared on.
        evaluations: how many artifacts were run on all evaluation data.
    """

    name: str
    goal: Goal
    metric: str
    share: bool
    points: tuple[Point, ...]
    chosen: str | None
    reason: str
    path: tuple[str, ...]
    not_tried: tuple[str, ...]
    search: str
    evaluations: int

    def as_json(self) -> dict[str, Any]:
        """Return the content of ``tuned.json``."""
        return {"schema": 1, "verdict": self.verdict, **asdict(self)}

    @property
    def verdict(self) -> Verdict:
        """Whether there is an answer, and whether it is proved to lose no more than is allowed."""
        point = self.point
        if point is None:
            return "failed"
        return "passed" if self.goal.metric_drop is None else point.verdict or "unknown"

    @property
    def point(self) -> Point | None:
        """The point that is the answer."""
        return next((p for p in self.points if p.name == self.chosen), None)
