"""From scores and a target to the units that go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from compressor.errors import SpecError, listed
from compressor.graph.stored_weights import computed_weight
from compressor.passes.prune import criteria
from compressor.passes.prune.structured.groups import Choice, Minimum, Prunable, Scope, Target
from compressor.passes.prune.structured.scores import SHARES, Sensitivity, solved_counts
from compressor.passes.prune.structured.ties import Tie
from compressor.types.channels import ChannelGroup, Flags, Units

_NAMES = {"macs": "multiply-accumulates", "parameters": "weights", "latency": "latency"}
_FAR = 0.1  # as a share, by which blocks of channels may miss what is asked for
_UNSTATED = "export layout: graph alone, for which more can go than config.json can state"


@contextmanager
def advising_fuse(graph: ir.Model) -> Iterator[None]:
    """Add to errors on what a target can reach what makes more layers visible, if any."""
    try:
        yield
    except SpecError as error:
        weight = computed_weight(graph)
        if weight is None:
            raise
        remedy = f"put the pass fuse first, without which layers such as that of {weight!r}"
        remedy += f" are not seen (their weights are computed), or {error.remedy}"
        raise SpecError(error.subject, error.problem, remedy) from None


@dataclass(frozen=True, eq=False)
class Selector:
    """Chooses units of one model for one target.

    Attributes:
        ties: groups that keep the same share of their units; ``None`` if each is on its own. A
            latency is not chosen by them.
    """

    choice: Choice
    target: Target
    tensors: criteria.Tensors
    minimum: Minimum
    ties: tuple[Tie, ...] | None = None

    @property
    def prunable(self) -> tuple[Prunable, ...]:
        """The groups that may lose units."""
        return self.choice.prunable

    @property
    def removable(self) -> list[ChannelGroup]:
        """Their channels."""
        return [p.group for p in self.prunable]

    @property
    def nothing(self) -> Flags:
        """Flags of all units, none set."""
        return np.zeros(self.choice.channels.count, dtype=bool)

    def cost(self, removed: Flags) -> float:
        """Return what the target counts, without some units; for latency, the MACs."""
        if self.target.kind == "parameters":
            return self.tensors.count(removed)
        return self.choice.channels.macs(removed)

    def check(self) -> None:
        """Check what no choice of units can reach, before any is scored.

        Raises:
            SpecError: the target is out of reach, would remove nothing, or counts what the model
                has not.
        """
        target = self.target
        if target.kind == "ratio":
            self._check_ratio()
            return
        if target.value >= 1:
            raise SpecError(
                target.key, f"is {target.value:g}: nothing would be removed", "set less than 1"
            )
        if target.kind == "latency":
            return
        whole = self.cost(self.nothing)
        if whole <= 0:
            raise SpecError(
                target.key,
                "cannot be met: the model has nothing that it counts",
                "choose another target",
            )
        ranking = self.ranking(self.plain())
        least = self.cost(ranking.removed(len(ranking))) / whole
        if least > target.value:
            raise SpecError(
                target.key,
                f"is {target.value:g}, and {least:.3f} of the {_NAMES[target.kind]} remain with "
                f"every removable channel but the minimum ({self.minimum}) gone",
                self.way_out(least),
            )

    def way_out(self, least: float, digits: int = 3) -> str:
        """Return the remedy for a target below the least share that can be reached."""
        value = np.ceil(least * 10**digits) / 10**digits
        ways = [f"set it to {value:g} or more"] if value < 1 else []
        ways += self.choice.more()
        ways += [] if self.ties is None else [_UNSTATED]
        return ", or ".join(ways) or "leave the pass out: next to nothing of this model can go"

    def _check_ratio(self) -> None:
        most = 1 - self.minimum if isinstance(self.minimum, float) else 1.0
        rules = [p.ratio for p in self.prunable if p.ratio is not None]
        for ratio in [self.target.value, *rules]:
            if ratio > most + 1e-9:
                raise SpecError(
                    self.target.key if ratio == self.target.value else "layers.ratio",
                    f"is {ratio:g}, and minimum {self.minimum:g} allows {most:g} at most",
                    "lower it, or lower minimum",
                )
        if not self.by_ratio(self.plain()).any():
            raise SpecError(
                self.target.key,
                f"is {self.target.value:g}: no group loses a channel",
                ", or ".join(["raise it", *self.choice.more()]),
            )

    def plain(self) -> list[criteria.Queue]:
        """Return queues in the order of the units' numbers, for what weights do not matter to."""
        return self.queues([np.zeros(len(p.group.units)) for p in self.prunable])

    def queues(self, scores: Sequence[criteria.Scores]) -> list[criteria.Queue]:
        """Return one queue for each prunable group, by its units' scores."""
        return [
            criteria.by_score(p.group.units, s, p.remaining)
            for p, s in zip(self.prunable, scores, strict=True)
        ]

    def by_ratio(self, queues: Sequence[criteria.Queue]) -> Flags:
        """Remove the target's share, or that of its own rule, from each group."""
        flags = self.nothing
        for ratio, queue, free in self._joined(queues):
            share = self.target.value if ratio is None else ratio
            flags[_nearest(queue, free, share)] = True
        return flags

    def _joined(
        self, queues: Sequence[criteria.Queue]
    ) -> list[tuple[float | None, criteria.Queue, criteria.Queue]]:
        """Return the queues of groups that lose units together, and the share that a rule takes.

        Each comes with the queue that holds where convolutions need not compute in blocks.
        """
        if self.ties is None:
            return [
                (p.ratio, queue, replace(queue, remaining=p.free))
                for p, queue in zip(self.prunable, queues, strict=True)
            ]
        tied = [(self.prunable[t.places[0]].ratio, t.queue(queues)) for t in self.ties]
        return [(ratio, queue, queue) for ratio, queue in tied]

    def ranking(
        self,
        queues: Sequence[criteria.Queue],
        scope: Scope = "local",
        sensitivities: Sequence[Sensitivity] = (),
    ) -> criteria.Ranking:
        """Merge the groups' queues into one order.

        Scope ``global`` compares the queues' values, ``local`` shares, ``sensitivity`` losses, and
        losses of solved layers for what is saved.
        """
        valued = [
            queue
            if p.ratio is not None
            else self._valued(queue, scope, sensitivities[i] if sensitivities else None)
            for i, (p, queue) in enumerate(zip(self.prunable, queues, strict=True))
        ]
        joined = self._joined(valued)
        gone = [_nearest(queue, free, ratio) for ratio, queue, free in joined if ratio is not None]
        ranked = [queue for ratio, queue, _ in joined if ratio is None]
        fixed = np.concatenate(gone) if gone else np.zeros(0, np.int64)
        return criteria.Ranking(tuple(ranked), self.choice.channels.count, fixed)

    def _valued(
        self, queue: criteria.Queue, scope: Scope, sensitivity: Sensitivity | None
    ) -> criteria.Queue:
        if scope == "local":
            return criteria.by_share(queue)
        if scope == "global" or sensitivity is None:
            return queue
        if sensitivity.most is None:
            return criteria.by_loss(queue, SHARES, sensitivity.losses)
        gone = solved_counts(queue)
        whole, saved = self.cost(self.nothing), list[float]()
        for count in gone:
            flags = self.nothing
            flags[queue.units[:count]] = True
            saved.append(whole - self.cost(flags))
        losses = (*sensitivity.losses, sensitivity.most)
        return criteria.by_slope(queue, gone, losses, saved)

    def cut(self, ranking: criteria.Ranking) -> Flags:
        """Remove as little of a ranking as the target allows.

        Where blocks of channels are so coarse that the target is missed by more than a tenth, some
        groups keep numbers of channels between them.
        """
        most = self.target.value * self.cost(self.nothing)
        removed = ranking.needed(self.cost, most)
        if self.ties is not None:
            return removed
        counts = [p.free for p in self.prunable if p.ratio is None]
        free = [replace(q, remaining=n) for q, n in zip(ranking.queues, counts, strict=True)]

        def last(queue: criteria.Queue) -> float:
            return float(queue.values[removed[queue.units]].max(initial=-np.inf))

        for queue in sorted(free, key=last, reverse=True):
            if self.cost(removed) < (1 - _FAR) * most:
                removed = ranking.given_back(removed, [queue], self.cost, most)
        return removed

    def notes(self, removed: Flags) -> tuple[str, ...]:
        """Return which groups do not keep blocks of channels, in a sentence."""
        left = [(p, len(p.group.units) - int(removed[p.group.units].sum())) for p in self.prunable]
        names = [
            f"{p.group.name} ({n} of {len(p.group.units)})" for p, n in left if n not in p.remaining
        ]
        if not names or self.target.kind == "latency":
            return ()
        return (
            f"{listed(names, 3)}: not in blocks of 8 channels, which are faster in ONNX Runtime, "
            "because blocks miss the target by more than a tenth; set round-to: 8 to keep blocks",
        )

    def planned(self) -> Flags:
        """Return units whose removal gives about the sizes of the result, without any weights.

        All groups are taken to lose the same share, and a latency to be proportional to
        multiply-accumulates.
        """
        queues = self.plain()
        if self.target.kind == "ratio":
            return self.by_ratio(queues)
        return self.cut(self.ranking(queues))


def _nearest(queue: criteria.Queue, free: criteria.Queue, share: float) -> Units:
    """Return the units to remove so that about a share goes; in blocks, if they come near it."""
    gone = queue.nearest(share)
    near = abs(len(gone) / len(queue.units) - share) <= _FAR
    return gone if near else free.nearest(share)
