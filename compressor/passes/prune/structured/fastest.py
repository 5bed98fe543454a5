"""Find widths, and blocks to drop, that reach a latency at the least loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from compressor.errors import SpecError
from compressor.passes.prune.structured.choices import Network, State
from compressor.passes.prune.structured.segments import Segment, Variant
from compressor.run.knapsack import Options, cheapest, combined
from compressor.types.channels import Units

_COARSE = 8  # widths of a group that are timed first, at least
_TELLS = 0.04  # of the time of a group's segments: what neighbouring widths must differ by
_STEEP = 1.5  # times the mean slope, from which on a step is looked for
_SAME = 0.01  # of it: what timings do not tell apart
_HALVINGS = 3
_APPROACHES = (1 / 3, 2 / 3)  # shares of the way to the target
_ATTEMPTS = 6
_EXCHANGES = 8
_SAMPLED = 4  # widths of a group at which a loss is measured, besides all
_CHECKS = 5  # of whole networks
_CLOSE = 0.01
_MOST_COMBINATIONS = 500  # of a block's widths
_LEAST_SLOPE = 0.1  # of what is saved by one clock over what is saved by the other

Timed = Callable[[Sequence[tuple[Segment, Variant]]], list[float]]


@dataclass(frozen=True, eq=False)
class Found:
    """The choice.

    Attributes:
        predicted: its share of the time, by the table.
        measured: its share of the time of a run of the whole network.
        widths: for each group, those that were told apart.
    """

    state: State
    predicted: float
    measured: float
    widths: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class _Class:
    """Options of which one is taken: what a state becomes, and what that costs."""

    states: tuple[Callable[[State], State], ...]
    options: Options


class Search:
    """Looks for the state of a network that meets a target.

    Args:
        timed: returns seconds of segments.
        share: returns the share of the unchanged network's time that a whole network takes.
        loss: returns what a state costs.
        way_out: returns the remedy for a target below a share, of so many digits.
    """

    def __init__(
        self,
        network: Network,
        timed: Timed,
        share: Callable[[Variant], float],
        loss: Callable[[Variant], float],
        way_out: Callable[[float, int], str],
    ):
        self._network, self._timed, self._share = network, timed, share
        self._measured_loss, self._losses = loss, dict[State, float]()
        self._way_out = way_out
        self._visited = [network.full]

    def find(self, target: float) -> Found:
        """Return the choice with the least loss whose share of the time is at most ``target``.

        Times of a layer depend on the widths before and behind it, so a knapsack is solved with
        the times around the last choice, until that no longer changes. What segments take alone
        beside their part in the network, such as to lay out what they read, is the same however
        narrow they are: the time that runs of whole networks are found to save is in proportion to
        what the table says, and the budget is corrected by that. A first choice that takes too
        long may have saved next to nothing, which tells no proportion: then the network with
        everything gone is a second point, and an answer if there is no other.

        Raises:
            SpecError: even with everything gone that can be, the network takes longer.
        """
        whole = self._network.full
        full = self._total(whole)
        if self._total(self._network.least) / full > target:
            self._least(target, full)  # before losses are measured
        self._visited = [whole]
        for share in _APPROACHES:
            self._near((1 - share * (1 - target)) * full)
        best: Found | None = None
        tables, measured, aim = [1.0], [1.0], target
        while len(tables) <= _CHECKS:
            budget = _on_line(*_rising(measured, tables), aim) * full
            state = self._exchanged(self._near(budget), budget)
            self._visited.append(state)
            table = self._total(state) / full
            predicted = _on_line(tables, measured, table)
            found = Found(state, predicted, self._measured(state), self.widths)
            if best is None or self._rank(found, target) < self._rank(best, target):
                best = found
            if target - 2 * _CLOSE <= found.measured <= target or table in tables:
                break
            tables.append(table)
            measured.append(found.measured)
            if found.measured > target and len(tables) == 2:
                least = self._least(target, full)
                best = min(best, least, key=lambda f: self._rank(f, target))
                tables.append(least.predicted)
                measured.append(least.measured)
            aim = target - _CLOSE / 2
        assert best is not None
        return best

    def _near(self, budget: float) -> State:
        """Return the better of two choices that fit a budget.

        One is near the last that took longer, the other made at once by what each loses alone.
        """
        whole = self._network.full
        longer = [s for s in self._visited if self._total(s) >= budget]
        start = min(longer, key=self._total, default=whole)
        choices = [self._settled(s, budget, self.widths) for s in (start, whole)]
        found = min(choices, key=lambda s: self._order(s, budget))
        self._visited.append(found)
        return found

    def _rank(self, found: Found, target: float) -> tuple[bool, float]:
        """Return what orders choices: the least loss in time, or else the least time."""
        late = found.measured > target
        return late, found.measured if late else self.loss(found.state)

    def _measured(self, state: State) -> float:
        return self._share(self._network.variant(state))

    def _least(self, target: float, full: float) -> Found:
        """Return the network with everything gone that can be.

        Raises:
            SpecError: it takes longer than ``target``, as measured: sums of the table may be off.
        """
        state, network = self._network.least, self._network
        found = Found(state, self._total(state) / full, self._measured(state), self.widths)
        if found.measured <= target:
            return found
        dropped = f" and {len(network.blocks)} blocks dropped" if network.blocks else ""
        raise SpecError(
            "target.latency",
            f"is {target:g}, and {found.measured:.2f} of the time was measured with every "
            f"removable unit but the minimum gone{dropped}",
            self._way_out(found.measured + 0.01, 2),  # another measurement may take longer
        )

    def _total(self, state: State) -> float:
        variant = self._network.variant(state)
        return sum(self._timed([(s, variant) for s in self._network.segments]))

    def _settled(self, state: State, budget: float, lines: Sequence[Sequence[int]]) -> State:
        """Solve knapsacks, each with the times around the last choice, until it stays.

        Losses are those around the state before; ``lines`` are the widths to choose from.
        """
        tried: dict[State, float] = {}
        slack, around = 0.0, state
        for _ in range(_ATTEMPTS):
            state = self._chosen(state, around, budget - slack, lines)
            total = self._total(state)
            if state in tried:
                break
            tried[state] = total
            slack = max(0.0, slack + total - budget)  # what interactions cost
        return min(tried, key=lambda s: self._order(s, budget))

    def _exchanged(self, state: State, budget: float) -> State:
        """Exchange neighbouring widths, and blocks, as long as the loss falls.

        What a layer loses depends on what else is gone. So losses are measured around the choice
        itself, and only steps are taken across which they hold.
        """
        for _ in range(_EXCHANGES):
            lines = [_neighbours(*pair) for pair in zip(self.widths, state.widths, strict=True)]
            better = self._settled(state, budget, lines)
            if self._order(better, budget) >= self._order(state, budget):
                break
            state = better
        return state

    def _order(self, state: State, budget: float) -> tuple[bool, float]:
        """Return what orders choices: the least loss of those that fit, or else the least time."""
        total = self._total(state)
        fits = total <= budget * (1 + _CLOSE)
        return not fits, self.loss(state) if fits else total

    def loss(self, state: State) -> float:
        """Return what a state costs, measured once."""
        if state not in self._losses:
            self._losses[state] = self._measured_loss(self._network.variant(state))
        return self._losses[state]

    def _narrowing(self, state: State, group: int, line: Sequence[int]) -> list[float]:
        """Return what it costs to change a group to each of some widths, interpolated."""
        places = np.unique(np.linspace(0, len(line) - 1, _SAMPLED).round().astype(int))
        measured = [self.loss(state.narrowed(group, line[i])) for i in places]
        before = self.loss(state)
        return [float(x) - before for x in np.interp(line, [line[i] for i in places], measured)]

    def _chosen(
        self, state: State, around: State, budget: float, lines: Sequence[Sequence[int]]
    ) -> State:
        classes = list(self._classes(state, around, lines))
        chosen = cheapest([c.options for c in classes], budget - self._total(state))
        if chosen is None:  # by these times; the least that they allow is a step towards it
            chosen = [int(np.argmin(c.options.times)) for c in classes]
        for made, option in zip(classes, chosen, strict=True):
            state = made.states[option](state)
        return state

    def _classes(
        self, state: State, around: State, lines: Sequence[Sequence[int]]
    ) -> Iterable[_Class]:
        inside = [g for groups in self._network.blocks.values() for g in groups]
        alone = [g for g in range(len(state.widths)) if g not in inside]
        for block, groups in self._network.blocks.items():
            yield self._class_of(state, around, {g: lines[g] for g in groups}, block)
        for group in alone:
            yield self._class_of(state, around, {group: lines[group]}, None)

    def _class_of(
        self, state: State, around: State, lines: Mapping[int, Sequence[int]], block: int | None
    ) -> _Class:
        """Return combinations of some groups' widths, and the end of their block."""
        gone = frozenset() if block is None else frozenset({block})
        whole, kept = (replace(s, dropped=s.dropped - gone) for s in (state, around))
        places = {p for g in lines for p in self._network.places[g]}
        places |= {self._network.place(b) for b in gone}
        before = self._seconds(places, [state, whole])
        single = []
        for group, line in lines.items():
            seconds = self._seconds(places, [whole.narrowed(group, w) for w in line])
            lost = self._narrowing(kept, group, line)
            single.append(Options(np.array(seconds) - before[1], np.array(lost)))
        sums, chosen = combined(single, most=_MOST_COMBINATIONS)
        times = sums.times + before[1] - before[0]
        losses = sums.losses + self.loss(kept) - self.loss(around)
        pairs = ([(g, lines[g][i]) for g, i in zip(lines, row, strict=True)] for row in chosen)
        states = [_Setting(tuple(pair), block) for pair in pairs]
        if gone:
            dropped = replace(state, dropped=state.dropped | gone)
            times = np.append(times, self._seconds(places, [dropped])[0] - before[0])
            end = replace(around, dropped=around.dropped | gone)
            losses = np.append(losses, self.loss(end) - self.loss(around))
            states.append(_Setting((), block, gone=True))
        return _Class(tuple(states), Options(times, losses))

    def _seconds(self, places: Iterable[int], states: Sequence[State]) -> list[float]:
        """Return the seconds of some segments together, in each state."""
        segments = [self._network.segments[i] for i in sorted(places)]
        variants = [self._network.variant(state) for state in states]
        flat = self._timed([(s, v) for v in variants for s in segments])
        size = len(segments)
        return [sum(flat[i * size : (i + 1) * size]) for i in range(len(states))]

    @cached_property
    def widths(self) -> tuple[tuple[int, ...], ...]:
        """The widths of each group that its kernels tell apart, ascending.

        A few are timed, and then those between two of them that differ. A width stays only if all
        that are wider take longer.
        """
        lines = [_coarse(queue.remaining) for queue in self._network.queues]
        self._times(enumerate(lines))
        for _ in range(_HALVINGS):
            lines = [self._refined(i, line) for i, line in enumerate(lines)]
        return tuple(self._apart(i, line) for i, line in enumerate(lines))

    def _times(self, lines: Iterable[tuple[int, Sequence[int]]]) -> list[list[float]]:
        full = self._network.full
        return [
            self._seconds(self._network.places[i], [full.narrowed(i, w) for w in line])
            for i, line in lines
        ]

    def _refined(self, group: int, line: Sequence[int]) -> list[int]:
        """Add a width between neighbours where time rises faster than over the whole line."""
        (seconds,) = self._times([(group, line)])
        remaining = self._network.queues[group].remaining
        slope = (seconds[-1] - seconds[0]) / max(line[-1] - line[0], 1)
        finer = list(line)
        for low, high, before, after in zip(line, line[1:], seconds, seconds[1:], strict=False):
            between = remaining[(remaining > low) & (remaining < high)]
            least = max(_TELLS * seconds[-1], _STEEP * slope * (high - low))
            if between.size and after - before > least:
                finer.append(int(between[between.size // 2]))
        return sorted(finer)

    def _apart(self, group: int, line: Sequence[int]) -> tuple[int, ...]:
        (seconds,) = self._times([(group, line)])
        stay, least = list[int](), np.inf
        for width, time in zip(reversed(line), reversed(seconds), strict=True):
            if time < least - _SAME * seconds[-1] or not stay:
                stay.append(width)
                least = min(least, time)
        return tuple(reversed(stay))


def _on_line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Read off what belongs to a share: between points, or in proportion beyond the least.

    One belongs to one, and is a point. With no other, each share belongs to itself.
    """
    order = np.argsort(xs)
    least, other = xs[order[0]], ys[order[0]]
    if x >= least:
        return float(np.interp(x, np.array(xs)[order], np.array(ys)[order]))
    saved = 1 - other
    return 1 - (1 - x) * (saved / max(1 - least, _LEAST_SLOPE * saved) if saved > 0 else 1.0)


def _rising(
    measured: Sequence[float], tables: Sequence[float]
) -> tuple[Sequence[float], Sequence[float]]:
    """Return the points without those that a faster network by the table took as long as.

    The first is the unchanged network. Another point beyond all of them saved nothing, and stays.
    """
    slowest = -np.inf
    kept = []
    for table, seconds in sorted(zip(tables, measured, strict=True)):
        if seconds > slowest:
            kept.append((seconds, table))
            slowest = seconds
    return [s for s, _ in kept], [t for _, t in kept]


def _neighbours(line: Sequence[int], width: int) -> Sequence[int]:
    place = line.index(width)
    return line[max(0, place - 1) : place + 2]


@dataclass(frozen=True)
class _Setting:
    """Sets some groups' widths, or drops their block."""

    widths: tuple[tuple[int, int], ...]
    block: int | None
    gone: bool = False

    def __call__(self, state: State) -> State:
        if self.block is not None:
            dropped = state.dropped | {self.block} if self.gone else state.dropped - {self.block}
            state = replace(state, dropped=dropped)
        for group, width in self.widths:
            state = state.narrowed(group, width)
        return state


def _coarse(remaining: Units) -> list[int]:
    """Return about eight to sixteen of the numbers that may remain, the least and all included.

    Round numbers, in multiples of a power of two: most kernels compute so many channels at a time.
    """
    total = int(remaining[-1])
    step = 1 << max(0, int(np.log2(max(total / _COARSE, 1))))
    chosen = remaining[remaining % step == 0]
    if chosen.size < _COARSE // 2:
        chosen = remaining[:: max(1, remaining.size // _COARSE)]
    return sorted({int(remaining[0]), *map(int, chosen), total})
