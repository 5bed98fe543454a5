"""Rank the units of a model's weights, in memory or streamed, and find which of them go.

One pass over the weights counts scores coarsely. That settles single weights of 16 bits. Scores
that have more bits (of float32 weights, and of blocks) take a second pass, which counts finely
where the threshold lies. What remains is to find the last of several units that share it: one
block of rows of a weight is read again, or one weight where all are ranked together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from compressor.errors import ModelError
from compressor.models.checkpoint.rows import ResultT, RowBlock, row_blocks, scan
from compressor.passes.prune.magnitude import ranking
from compressor.progress import Progress, Silent
from compressor.types.carrier import Carrier
from compressor.types.layers import Layer

_SILENT = Silent()
_Count = Callable[[torch.Tensor, int, RowBlock], ranking.Counts]


@dataclass(frozen=True)
class Ranked:
    """A layer whose units are ranked."""

    layer: Layer
    criterion: ranking.Criterion

    @property
    def units(self) -> int:
        """How many it has."""
        height, width = self.criterion.block
        return self.layer.parameters // (height * width)

    @property
    def blocks(self) -> list[RowBlock]:
        """Its rows in pieces that are read one at a time."""
        return row_blocks(self.layer, self.criterion.block[0])

    @property
    def settled(self) -> bool:
        """Whether scores are known from their coarse bits."""
        return self.criterion.coarse_only(self.layer.dtype)

    def scores(self, rows: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
        """Return the scores of some rows.

        Raises:
            ModelError: a value is NaN or infinite.
        """
        try:
            return ranking.scores(rows, self.criterion, start)
        except ValueError as error:
            raise ModelError(
                f"layer {self.layer.name!r}",
                "its weight holds values that are NaN or infinite",
                "the training diverged or the file is damaged; use an earlier checkpoint",
            ) from error


@dataclass(frozen=True)
class Chosen:
    """The units of one weight that go."""

    cut: ranking.Cut  # which units
    gone: int  # how many
    zero: int  # how many units are zero afterwards: the same, unless more were zero before


def cut_each(
    carrier: Carrier, ranked: Sequence[Ranked], numbers: Sequence[int], progress: Progress = _SILENT
) -> list[Chosen]:
    """Choose so many units of each weight by itself, at least one.

    Raises:
        ModelError: a weight holds NaN or infinity.
    """
    reading = _Reading(carrier, progress)
    wanted = {item.layer.name: number for item, number in zip(ranked, numbers, strict=True)}
    tied: dict[str, _Tied] = {}
    bins: dict[str, int] = {}
    ranks = dict(wanted)
    for item, parts in reading.counted(ranked, _coarse):
        name = item.layer.name
        bins[name], ranks[name] = bin, rank = ranking.select(ranking.merged(parts), wanted[name])
        if item.settled:
            held = [part.of(bin) for part in parts]
            tied[name] = _Tied(item, bin << ranking.FINE_BITS, held, rank, wanted[name] - rank)
    open_ = [item for item in ranked if not item.settled]
    for item, parts in reading.counted(open_, _fine(bins), "more finely"):
        name = item.layer.name
        score, rank = ranking.select(ranking.merged(parts), ranks[name])
        held = [part.of(score) for part in parts]
        tied[name] = _Tied(item, score, held, rank, wanted[name] - rank)
    return _placed(reading, [tied[item.layer.name] for item in ranked])


def cut_together(
    carrier: Carrier, ranked: Sequence[Ranked], number: int, progress: Progress = _SILENT
) -> list[Chosen]:
    """Choose so many units of all weights together, at least one.

    Of units with equal scores, those of layers whose name comes first in the alphabet go first.

    Raises:
        ModelError: a weight holds NaN or infinity.
    """
    reading = _Reading(carrier, progress)
    coarse = {
        item.layer.name: ranking.merged(parts) for item, parts in reading.counted(ranked, _coarse)
    }
    bin, rank = ranking.select(ranking.merged(coarse.values()), number)
    low = bin << ranking.FINE_BITS
    at = {name: counts.of(bin) for name, counts in coarse.items()}
    fine = {
        name: ranking.Counts(torch.tensor([low]), torch.tensor([held])) for name, held in at.items()
    }
    open_ = [item for item in ranked if not item.settled and at[item.layer.name]]
    bins = dict.fromkeys(at, bin)
    for item, parts in reading.counted(open_, _fine(bins), "more finely"):
        fine[item.layer.name] = ranking.merged(parts)
    score, rank = ranking.select(ranking.merged(fine.values()), rank)
    equal = [fine[item.layer.name].of(score) for item in ranked]
    # By name, since a file's layers come in another order than a graph's.
    order = sorted(range(len(ranked)), key=lambda i: ranked[i].layer.name)
    shares = dict(zip(order, ranking.shares(rank, [equal[i] for i in order]), strict=True))
    by_block = [[count] for count in equal]
    split = next((i for i, share in shares.items() if 0 < share < equal[i]), None)
    if split is not None:
        count = _fine({ranked[split].layer.name: bin})
        ((_, parts),) = reading.counted([ranked[split]], count, "where it ends")
        by_block[split] = [part.of(score) for part in parts]
    tied = []
    for place, item in enumerate(ranked):
        name = item.layer.name
        below = coarse[name].below(bin) + fine[name].below(score)
        tied.append(_Tied(item, score, by_block[place], shares[place], below))
    return _placed(reading, tied)


@dataclass(frozen=True)
class _Tied:
    """A weight whose threshold is known."""

    item: Ranked
    score: int
    held: Sequence[int]  # units with that score, in each block of rows or all together
    rank: int  # how many of them go
    below: int  # units with lower scores

    def last(self) -> tuple[RowBlock, int]:
        """Return the block of rows with the last one to go, and its rank there."""
        rank = self.rank
        for block, count in zip(self.item.blocks, self.held, strict=True):
            if rank <= count:
                return block, rank
            rank -= count
        raise AssertionError("the counts of a weight's blocks do not add up")


def _placed(reading: _Reading, tied: Sequence[_Tied]) -> list[Chosen]:
    """Find the last unit to go where only some of those that share the threshold do."""
    split = [tie for tie in tied if 0 < tie.rank < sum(tie.held)]
    ends = {tie.item.layer.name: (tie, *tie.last()) for tie in split}

    def place(rows: torch.Tensor, block: RowBlock) -> int:
        tie, _, rank = ends[block.layer.name]
        values, shift = tie.item.scores(rows, block.start)
        height = tie.item.criterion.block[0]
        return block.start // height * values.shape[1] + ranking.place_of(
            values, shift, tie.score, rank
        )

    blocks = [block for _, block, _ in ends.values()]
    places = {x.layer.name: last for x, last in reading.scanned(blocks, place, "where they end")}
    result = []
    for tie in tied:
        last = places.get(tie.item.layer.name, tie.item.units - 1 if tie.rank else -1)
        gone = tie.below + tie.rank
        zero = gone if tie.score else tie.below + sum(tie.held)
        result.append(Chosen(ranking.Cut(tie.score, last), gone, zero))
    return result


def _coarse(values: torch.Tensor, shift: int, block: RowBlock) -> ranking.Counts:  # noqa: ARG001
    return ranking.count_coarse(values, shift)


def _fine(bins: Mapping[str, int]) -> _Count:
    def count(values: torch.Tensor, shift: int, block: RowBlock) -> ranking.Counts:
        return ranking.count_fine(values, shift, bins[block.layer.name])

    return count


@dataclass(frozen=True)
class _Reading:
    carrier: Carrier
    progress: Progress

    def counted(
        self, ranked: Sequence[Ranked], count: _Count, what: str = ""
    ) -> Iterator[tuple[Ranked, list[ranking.Counts]]]:
        items = {item.layer.name: item for item in ranked}

        def work(rows: torch.Tensor, block: RowBlock) -> ranking.Counts:
            return count(*items[block.layer.name].scores(rows, block.start), block)

        blocks = [block for item in ranked for block in item.blocks]
        done = self.scanned(blocks, work, what)
        for name, pairs in groupby(done, key=lambda pair: pair[0].layer.name):
            yield items[name], [counts for _, counts in pairs]

    def scanned(
        self,
        blocks: Sequence[RowBlock],
        work: Callable[[torch.Tensor, RowBlock], ResultT],
        what: str = "",
    ) -> Iterator[tuple[RowBlock, ResultT]]:
        """Work on blocks of rows; nothing is shown where there are none."""
        if not blocks:
            return
        label = " ".join(part for part in ("prune-magnitude: rank weights", what) if part)
        with self.progress.stage(label, sum(map(_weights, blocks))) as advance:
            done = 0
            for block, result in scan(self.carrier, blocks, work):
                done += _weights(block)
                advance(done)
                yield block, result


def _weights(block: RowBlock) -> int:
    return (block.stop - block.start) * block.layer.columns
