"""Which option each layer gets, and in which order candidates are proved: numbers in, numbers out.

Noise that single layers add is a table, measured with each option once; bytes, or times, are
another. The choice is a multiple-choice knapsack over the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from compressor.lab.tune.options import bits_of
from compressor.run.knapsack import Options, cheapest

Choice = Mapping[str, str]
"""The option of each layer, by name."""


@dataclass(frozen=True)
class Entry:
    """What one option does to one layer: the noise it adds, and the bytes or the time it takes."""

    noise: float
    cost: float


Table = Mapping[str, Mapping[str, Entry]]
"""What there is to choose from, by layer and option."""


def expected_noise(known: Mapping[str, Entry], option: str) -> float:
    """Return the noise of an option that was not measured, by that of the nearest width, or zero.

    Each bit more makes the steps half as wide, and the power of uniform rounding errors a quarter.

    >>> expected_noise({"4": Entry(16.0, 1.0), "float": Entry(0.0, 9.0)}, "6")
    1.0
    """
    measured = {o: b for o in known if (b := bits_of(o)) is not None}
    wanted = bits_of(option)
    if not measured or wanted is None:
        return 0.0
    nearest = min(measured, key=lambda o: abs(measured[o] - wanted))
    return float(known[nearest].noise * 4.0 ** (measured[nearest] - wanted))


def noise_of(table: Table, choice: Choice) -> float:
    """Return the noise that a choice adds, if what layers add adds up."""
    return sum(table[layer][option].noise for layer, option in choice.items())


def cost_of(table: Table, choice: Choice) -> float:
    """Return what the layers of a choice cost."""
    return sum(table[layer][option].cost for layer, option in choice.items())


def smallest(table: Table, noise: float) -> dict[str, str] | None:
    """Return the choice of the least cost that adds at most so much noise.

    ``None`` if even the quietest options together add more.
    """
    return _solved(table, noise, lambda entry: (entry.noise, entry.cost))


def quietest(table: Table, most: float) -> dict[str, str] | None:
    """Return the choice of the least noise within a cost; ``None`` if there is none."""
    return _solved(table, most, lambda entry: (entry.cost, entry.noise))


_LESS_NOISE = 10**-0.03  # of the power, for 0.3 dB, which a remedy has to gain as well


def eased(table: Table, choice: Choice, spare: float) -> dict[str, str] | None:
    """Return a choice of less noise for a few bytes more, in layers that have few.

    >>> table = {"first": {"4": Entry(9, 1), "8": Entry(0.1, 2)}, "big": {"4": Entry(9, 99)}}
    >>> eased(table, {"first": "4", "big": "4"}, 1.0)
    {'first': '8', 'big': '4'}
    >>> eased(table, {"first": "8", "big": "4"}, 1.0) is None
    True

    Args:
        spare: the bytes that may be added.

    Returns:
        ``None`` where less than 0.3 dB is to be expected.
    """
    coded = {n: {o: e for o, e in x.items() if bits_of(o) is not None} for n, x in table.items()}
    if any(choice.get(n) not in options for n, options in coded.items()):
        return None
    found = quietest(coded, cost_of(table, choice) + spare)
    quieter = found is not None and noise_of(table, found) < _LESS_NOISE * noise_of(table, choice)
    return found if quieter else None


def _solved(
    table: Table, budget: float, costs: Callable[[Entry], tuple[float, float]]
) -> dict[str, str] | None:
    names = {layer: list(entries) for layer, entries in table.items()}
    classes = []
    for layer, options in names.items():
        pairs = np.array([costs(table[layer][name]) for name in options], dtype=np.float64)
        classes.append(Options(pairs[:, 0], pairs[:, 1]))
    places = cheapest(classes, budget)
    if places is None:
        return None
    return {
        layer: options[place] for (layer, options), place in zip(names.items(), places, strict=True)
    }


@dataclass(frozen=True)
class Reached:
    """A candidate on the search data.

    Attributes:
        noise: what the table predicts for it.
        drop: the largest drop that its evaluation would leave possible, if it does there what it
            did here; ``None`` where the search data do not tell.
    """

    noise: float
    drop: float | None


def next_noise(points: Sequence[Reached], limit: float, repeats: int = 0) -> float | None:
    """Return how much noise the next candidate may add, or ``None`` where there is none to try.

    What a metric loses grows as a power of the noise, so the line through the two points around
    the limit is drawn between logarithms. Where it is no line, candidates come to lie on one side
    of the limit again and again, each a little nearer, and the point on the other side stays where
    it was; so its distance from the limit counts half each time (the Illinois method: Dowell and
    Jarratt 1971, "A modified regula falsi method for computing the root of an equation", BIT 11).

    Args:
        points: at least one whose drop is known.
        limit: the largest drop that is allowed.
        repeats: how many of the last points before the last one lie on its side of the limit.
    """
    known = [p for p in points if p.drop is not None]
    good = [p for p in known if p.drop is not None and p.drop <= limit]
    bad = [p for p in known if p.drop is not None and p.drop > limit]
    if not bad:
        return None
    above = min(bad, key=lambda p: p.noise)
    below = max((p for p in good if p.noise < above.noise), key=lambda p: p.noise, default=None)
    if below is None:
        # As for independent answers: their number grows as the root of the noise's power.
        assert above.drop is not None
        share = (max(limit, 0.0) / above.drop) ** 2
        return above.noise * min(share, 0.5) if share > 0 else None
    assert below.drop is not None
    assert above.drop is not None
    if below.drop <= 0 or below.noise <= 0:
        return math.sqrt(max(below.noise, above.noise / 16) * above.noise)
    end = math.log(limit)  # a quotient of next to nothing would be infinite
    quiet, loud = end - math.log(below.drop), math.log(above.drop) - end
    if points[-1].drop is not None and points[-1].drop > limit:
        quiet *= 0.5**repeats
    else:
        loud *= 0.5**repeats
    aim = below.noise * (above.noise / below.noise) ** (quiet / (quiet + loud))
    # Not onto a point that is known already.
    low, high = below.noise * 1.02, above.noise * 0.98
    return min(max(aim, low), high) if low < high else None


def middle_of_the_gap(found: Sequence[tuple[float, float]], least: float) -> float | None:
    """Return the noise in the middle of the widest gap between sizes, of powers.

    >>> middle_of_the_gap([(300.0, 1.0), (200.0, 4.0), (190.0, 16.0), (310.0, 2.0)], 0.05)
    2.0
    >>> middle_of_the_gap([(300.0, 1.0), (297.0, 4.0)], 0.05) is None
    True

    Args:
        found: candidates' sizes and noises; those that another beats in both do not count.
        least: the share of the larger size from which on a gap is one.
    """
    chain: list[tuple[float, float]] = []
    for size, noise in sorted(found, key=lambda x: x[::-1]):  # the quietest first
        if noise > 0 and (not chain or size < chain[-1][0]):
            chain.append((size, noise))
    gaps = [(1 - b[0] / a[0], math.sqrt(a[1] * b[1])) for a, b in pairwise(chain)]
    width, middle = max(gaps, default=(0.0, 0.0))
    return middle if width > least else None


@dataclass(frozen=True)
class Standing:
    """A candidate before it is proved.

    Attributes:
        size: what is to be minimized: bytes, or the ratio of latencies.
        drop: as in :class:`Reached`.
        least: the smallest drop that the search leaves possible; ``None`` where it leaves no other.
    """

    size: float
    drop: float | None
    least: float | None = None


def as_noise_orders(found: Sequence[Standing]) -> list[Standing]:
    """Return candidates with drops that do not fall as noise grows, where the search allows it.

    A few hundred samples order candidates by chance. What a noisier one keeps, a quieter one keeps
    too, unless the samples say otherwise.

    >>> [s.drop for s in as_noise_orders([Standing(9, 0.4, -0.2), Standing(5, 0.1, -0.5)])]
    [0.1, 0.1]
    >>> [s.drop for s in as_noise_orders([Standing(9, 0.4, 0.2), Standing(5, 0.1, -0.5)])]
    [0.4, 0.1]

    Args:
        found: the quietest first.
    """
    ordered, smallest_drop = list(found), math.inf
    for i in reversed(range(len(found))):
        drop, least = found[i].drop, found[i].least
        if drop is None:
            continue
        if least is not None and least <= smallest_drop < drop:
            ordered[i] = replace(found[i], drop=smallest_drop)
        smallest_drop = min(smallest_drop, drop)
    return ordered


def samples_to_prove(drop: float, bound: float, samples: int, limit: float) -> int | None:
    """Return how many samples could show that a candidate keeps the limit, if it loses so much.

    An interval narrows with the root of the number of samples.

    >>> samples_to_prove(0.1, 0.9, 2000, 0.5)
    8000
    >>> samples_to_prove(0.6, 1.4, 2000, 0.5) is None
    True

    Args:
        drop: what it loses.
        bound: the upper end of the interval of the drop on ``samples`` samples.
        samples: how many there are.
        limit: the largest drop that is allowed; what loses as much is never shown to keep it.
    """
    room = limit - drop
    if room <= 0:
        return None
    # Rounded first: a ratio of just two is not to become one more sample.
    return math.ceil(round(samples * ((bound - drop) / room) ** 2, 6))


def less_lost(gain: float, *, share: bool) -> float:
    """Return how many times less a metric may lose where its noise falls.

    A mean of errors falls with the power of the noise. Of a share, what may be lost is a number of
    standard errors: the root of how many answers change, which falls with the noise's amplitude. So
    it is the fourth root of the power that counts.

    >>> less_lost(16.0, share=True), less_lost(16.0, share=False)
    (2.0, 16.0)

    Args:
        gain: how many times less noise there is, in power.
        share: the metric is a share of right answers.
    """
    return gain**0.25 if share else gain


_APART = 0.03  # share of the size by which two candidates differ that are both worth a look
_FAR = 2.0  # times the limit that a drop may reach, to be worth an evaluation at the end
_MOST_BEYOND = 2


def order_of_proof(found: Sequence[Standing], limit: float, most: int) -> list[int]:
    """Return which candidates are to be proved, in which order: the safest first.

    The order is fixed before the evaluation is looked at, and proving stops at the first that is
    not proved. So each is tested at the full level, and the chance that any false one is called
    proved is no larger than for one (fixed-sequence testing: Maurer, Hothorn and Lehmacher 1995;
    Westfall and Krishen 2001).

    Args:
        found: all candidates, the quietest first: where few samples make several look alike, that
            one is the safest.
        limit: the largest drop that is allowed; candidates that cannot be shown to keep it, since
            the search found them too far from the float model, are left out.
        most: how many evaluations there may be.
    """
    hopeful = [i for i, s in enumerate(found) if s.drop is None or s.drop <= limit]
    if not hopeful:  # the least bad one is still an answer
        hopeful = sorted(range(len(found)), key=lambda i: found[i].drop or 0.0)[:1]
    safest = min(hopeful, key=lambda i: found[i].drop or 0.0)
    smaller = [i for i in hopeful if found[i].size < found[safest].size]
    chain = [safest]
    for i in sorted(smaller, key=lambda i: -found[i].size):
        if any(_is_safer(found, j, i) for j in smaller):
            continue  # in front of what is smaller and safer, it could only end the proofs
        if is_smaller(found[i].size, found[chain[-1]].size):
            chain.append(i)
    if len(chain) > most:  # both ends, and what lies evenly between
        steps = np.linspace(0, len(chain) - 1, most).round().astype(int)
        chain = [chain[i] for i in dict.fromkeys(steps.tolist())]
    return chain


def _is_safer(found: Sequence[Standing], one: int, other: int) -> bool:
    """Whether a candidate is smaller than another, and expected to lose less, or as much quieter.

    Of a metric that the search cannot tell of, all that is known is which is quieter.
    """
    first, second = found[one], found[other]
    if first.size >= second.size:
        return False
    if first.drop == second.drop:
        return one < other
    return first.drop is not None and second.drop is not None and first.drop < second.drop


def beyond_the_expected(found: Sequence[Standing], limit: float, size: float) -> list[int]:
    """Return which candidates follow at the end, though they are not expected to be proved.

    The nearest comes first. In a fixed order they cost no error: they are looked at if all others
    have been proved, and the first that fails ends it.

    Args:
        size: of the smallest candidate before them.
    """
    far = [(s.drop, i) for i, s in enumerate(found) if s.drop is not None]
    chain: list[int] = []
    for drop, i in sorted(far):
        if limit < drop <= _FAR * limit and is_smaller(found[i].size, size):
            chain.append(i)
            size = found[i].size
    return chain[:_MOST_BEYOND]


def is_smaller(size: float, other: float) -> bool:
    """Whether a candidate is so much smaller than another that it is worth an evaluation."""
    return size <= other * (1 - _APART)
