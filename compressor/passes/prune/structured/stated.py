"""What may go so that ``config.json`` can state what remains.

A directory of ``transformers`` has no sizes but those of its configuration, which has one number
for all layers of a kind, and derives others: in BERT, heads are as wide as the stream divided by
their number. Only a network's class knows which these are. So groups of channels are tried, each
kind alone, and then those together that only go together: what is left has to be a network of its
class that computes what its graph does, and of which a configuration builds an equal one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import gcd
from weakref import WeakKeyDictionary

import numpy as np

from compressor.errors import SpecError
from compressor.graph.channels.analysis import analyse
from compressor.graph.channels.slicing import remove_channels
from compressor.models.torch.carrier import TorchCarrier
from compressor.passes.prune.structured.groups import Criterion, Prunable, stated
from compressor.passes.prune.structured.selection import Selector
from compressor.passes.prune.structured.ties import Tie, tied
from compressor.types.carrier import Carrier
from compressor.types.channels import Flags
from compressor.types.passes import PassContext

_TRIED = 0.5  # the share that goes of what is tried, where the target states none
KEPT = "config.json cannot state fewer of its channels"
# By what may remain of groups, for a model that a plan asks for several times.
_FOUND: WeakKeyDictionary[TorchCarrier, dict[str, tuple[Tie, ...] | None]] = WeakKeyDictionary()


def in_step(
    carrier: Carrier, selector: Selector, context: PassContext, criterion: Criterion | None
) -> Selector:
    """Return what chooses only what a configuration can state.

    Returned as it is are what needs no configuration, what one states in any case, and choices that
    are made in other ways: widths for a target of latency, and principal components.

    Raises:
        SpecError: nothing can be removed so that a configuration states it.
    """
    if selector.target.kind == "latency" or criterion == "principal-components":
        return selector
    if not selector.prunable or not stated(carrier, context):
        return selector
    assert isinstance(carrier, TorchCarrier)
    entries = [(p.group.name, p.remaining.tolist(), p.ratio) for p in selector.prunable]
    found, key = _FOUND.setdefault(carrier, {}), repr((selector.target, entries))
    if key not in found:
        found[key] = _ties(carrier, selector)
    ties = found[key]
    if ties is None:
        return selector
    if not ties:
        raise SpecError(
            "layout: compressed-tensors",
            "cannot describe a smaller network: config.json states no size of the layers that can "
            "lose channels, alone or in step",
            "export layout: graph, which compressor.load opens without a configuration",
        )
    places = sorted(place for tie in ties for place in tie.places)
    numbers = {place: number for number, place in enumerate(places)}
    renamed = [Tie(tuple(numbers[p] for p in tie.places), tie.shares) for tie in ties]
    choice = selector.choice
    left = tuple(selector.prunable[place] for place in places)
    gone = {id(p.group) for p in selector.prunable} - {id(p.group) for p in left}
    reasons = {i: KEPT for i, group in enumerate(choice.channels.groups) if id(group) in gone}
    choice = replace(choice, prunable=left, reasons={**choice.reasons, **reasons})
    return replace(selector, choice=choice, ties=tuple(renamed))


def _ties(carrier: TorchCarrier, selector: Selector) -> tuple[Tie, ...] | None:
    """Return groups that may lose channels, in step; ``None`` if all may as they are chosen."""
    trial = _Trial(carrier, selector)
    if selector.target.kind == "ratio" and trial.runs(selector.by_ratio(selector.plain())):
        return None
    free, bound = list[Tie](), list[list[int]]()
    for places in _kinds(selector.prunable):
        found = trial.tie(places)
        if found is None:
            bound.append(places)
        else:
            free.append(found)
    return tuple(sorted(trial.together(free, bound), key=lambda tie: tie.places))


def _kinds(prunable: Sequence[Prunable]) -> list[list[int]]:
    """Return the places of groups that a configuration has one number for, as names suggest."""
    kinds = defaultdict[tuple[object, ...], list[int]](list)
    for place, entry in enumerate(prunable):
        name = re.sub(r"\d+", "#", entry.group.name)
        kinds[name, tuple(entry.remaining.tolist()), entry.ratio].append(place)
    return list(kinds.values())


class _Trial:
    """Removes units for a try."""

    def __init__(self, carrier: TorchCarrier, selector: Selector):
        self._carrier, self._selector = carrier, selector
        self._graph = carrier.graph()
        self._analysis = analyse(self._graph)

    def runs(self, flags: Flags) -> bool:
        """Whether the network without some units is of its class, and of a configuration."""
        return bool(flags.any()) and self._stated(flags, planned=False)

    def _stated(self, flags: Flags, *, planned: bool) -> bool:
        smaller, kept = remove_channels(self._graph, self._analysis, flags)
        after = self._carrier.with_channels(smaller, kept, planned=planned)
        if not isinstance(after, TorchCarrier) or after.executes_graph:
            return False
        try:
            _ = after.config
        except SpecError:
            return False
        return True

    def tie(self, places: Sequence[int]) -> Tie | None:
        """Tie groups, by shares that a configuration can state; ``None`` if there are none."""
        prunable = [self._selector.prunable[place] for place in places]
        tie = tied(places, [p.remaining for p in prunable])
        if tie is None:
            return None
        count = gcd(*(len(p.group.units) for p in prunable))
        divisors = [n for n in range(1, count) if not count % n]
        if not divisors or not self._keeps(tie, divisors[-1], count):
            return None
        # Classes ask for multiples, such as those of the number of heads.
        for step in divisors:
            if self._keeps(tie, count - step, count):
                shares = tuple(s for s in tie.shares if s * count % step == 0)
                narrowed = Tie(tie.places, shares)
                return narrowed if self.runs(self._gone([narrowed])) else None
        return None

    def _keeps(self, tie: Tie, left: int, count: int) -> bool:
        """Whether a configuration has the shapes of what keeps ``left`` of ``count`` units."""
        share = Fraction(left, count)
        if share not in tie.shares:
            return False
        only = Tie(tie.places, (share, Fraction(1)))
        return self._stated(self._gone([only], 1.0), planned=True)

    def together(self, free: list[Tie], bound: Sequence[list[int]]) -> list[Tie]:
        """Return ties that can be stated together.

        Args:
            free: those that can be stated alone.
            bound: groups of which none can: all of them in step, or all but one kind, may be.
        """
        several = [bound, *([b for b in bound if b is not left] for left in bound)]
        for kinds in several if len(bound) > 1 else []:
            joint = self.tie(sorted(place for places in kinds for place in places))
            if joint is not None and self.runs(self._gone([*free, joint])):
                return [*free, joint]
        if self.runs(self._gone(free)):
            return free
        chosen = list[Tie]()
        for tie in free:
            chosen += [tie] if self.runs(self._gone([*chosen, tie])) else []
        return chosen

    def _gone(self, ties: Sequence[Tie], share: float | None = None) -> Flags:
        selector = self._selector
        usual = selector.target.value if selector.target.kind == "ratio" else _TRIED
        plain = selector.plain()
        flags = np.zeros_like(selector.nothing)
        for tie in ties:
            queue = tie.queue(plain)
            ratio = selector.prunable[tie.places[0]].ratio
            gone = queue.nearest(share or (usual if ratio is None else ratio))
            flags[gone if gone.size else queue.first(queue.most)] = True
        return flags
