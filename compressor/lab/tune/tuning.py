"""Search for a recipe: free remedies first, then each layer's width, then proof."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from compressor.errors import CompressorError
from compressor.lab.tune.answer import Answer, Goal
from compressor.lab.tune.candidate import Candidate
from compressor.lab.tune.journal import Journal
from compressor.lab.tune.options import (
    FLOAT,
    HALF,
    STORED,
    STORED_WORDS,
    choice_words,
    narrow_share,
    option_words,
)
from compressor.lab.tune.proofs import Proofs
from compressor.lab.tune.recipe import Recipe, base_recipe
from compressor.lab.tune.remedies import NARROW, Remedies
from compressor.lab.tune.solver import (
    Entry,
    Reached,
    cost_of,
    expected_noise,
    less_lost,
    middle_of_the_gap,
    next_noise,
    noise_of,
    quietest,
    smallest,
)
from compressor.lab.tune.structure import Structure
from compressor.lab.tune.uniform import Uniform, before_words
from compressor.lab.tune.watch import CANDIDATE
from compressor.lab.tune.workbench import Workbench
from compressor.lab.tune.workers import Crew, Nobody

_TRAINED = 4.0  # times less noise, in power, that training the rounding of all layers gains
_TRAINED_SOME = 1.4  # and that of a mixture, of which some are narrow
_SAFE = 0.6  # share of the limit that may be lost by what is proved nine times of ten
_SAFER = 0.25  # share of the quietest candidate's noise that one more is to have
_GAP = 0.05  # share of the size by which the next smaller candidate to be proved may be smaller
_BETWEEN = 2  # candidates inside such gaps


@dataclass
class Tuning:
    """One search.

    Attributes:
        publish: called with each candidate that is the best so far.
        table: what was measured, by layer and option.
        stores: weights of single layers may be stored, and computed with as floats.
        floats: the option of layers that are left alone.
    """

    bench: Workbench
    goal: Goal
    publish: Callable[[Candidate], None]
    journal: Journal
    crew: Crew = field(default_factory=Nobody)
    proofs: Proofs = field(init=False)
    remedies: Remedies = field(init=False)
    table: dict[str, dict[str, Entry]] = field(default_factory=dict)
    stores: bool = True
    floats: str = FLOAT

    def __post_init__(self) -> None:
        """Begin the sequence of proofs."""
        shared = (self.bench, self.goal, self.journal)
        self.remedies = Remedies(*shared, self.crew)
        self.proofs = Proofs(*shared, self.publish, self.remedies.trained)

    def answer(self) -> Answer:
        """Search and prove.

        Raises:
            CompressorError: the spec has nothing to tune, or its own recipe fails.
        """
        recipe = base_recipe(self.bench.spec)
        uniform = Uniform(self.bench, self.goal, self.journal, self.crew)
        widths = uniform.widths(recipe)
        narrowest = self.remedies.remedied(widths[-1])
        pool = [*widths[:-1], narrowest, *self._stored(uniform, recipe, widths[0])]
        if self.goal.minimize == "size":
            pool += uniform.grouped(narrowest, widths)
        works = {**CANDIDATE, "noise": len(pool)}
        if not self.journal.is_late("other bits for single layers", works):
            self._by_layer(uniform, recipe, narrowest, pool)
        if self.goal.metric_drop is not None:
            self.proofs.expected(pool)  # so that there is an answer before structures are tried
        if self.proofs.going and not self.proofs.is_open:
            added = partial(self._built, pool=pool)
            ahead, proofs = self.crew.ahead, self.proofs
            structure = Structure(self.bench, self.goal, self.journal, added, ahead, proofs)
            structure.explore(tuple(pool))
        else:
            self.journal.skip("fewer channels and training", "a proof before them has failed")
        self.proofs.finish(pool)
        if self.proofs.is_open:
            self._nearer(pool)
        elif self.proofs.best is None and self.goal.metric_drop is not None:
            self._with_other_ranges(uniform, recipe, widths[0], pool)
        self.proofs.tell_of_more_samples(pool)
        best, late = self.proofs.best, self.bench.watch.late_for({"time": 1}, {})
        if best is not None and not late:
            self.bench.timed(best)
        elif best is not None and best.latency is None:
            self.journal.skip("the latency of the answer", late)
        return self.journal.answer(best, pool)

    def _by_layer(
        self, uniform: Uniform, recipe: Recipe, narrowest: Candidate, pool: list[Candidate]
    ) -> None:
        """Measure what layers add and cost, and choose for each."""
        for candidate in sorted(pool, key=lambda c: c.bytes):  # what is not seen at many bits
            self._learn(candidate)  # is known from fewer
        floats = self.bench.float_entries(narrowest)
        self.floats = uniform.as_it_is(narrowest)
        share = 0.5 if self.floats == HALF else 1.0
        for layer, known in self.table.items():  # a recurrent one has no time of its own
            least = min(entry.cost for entry in known.values())
            cost = share * floats[layer].cost if layer in floats else least
            known[self.floats] = Entry(0.0, cost)
        if self.goal.minimize == "latency" or self._are_slow(pool):
            self._all_floats(recipe, narrowest, pool)
            self._by_the_pass(uniform, narrowest, pool)
        choice = self.remedies.eased(narrowest, self.table)
        if choice is not None and self._added(choice_words(choice), narrowest, choice, pool):
            narrowest = pool[-1]
        self._narrower_than_uniform(narrowest, pool)

    # One choice for all layers

    def _stored(self, uniform: Uniform, recipe: Recipe, widest: Candidate) -> list[Candidate]:
        """Make the candidate of weights that are only stored, if integers lose or take too much.

        Where they keep the limit, single layers are not stored: all would be computed with as
        floats for next to no bytes. But one quieter recipe comes before integers that keep it
        barely, and none of so few bytes is quieter.
        """
        if self._keeps(widest) and self.proofs.is_fast(widest) and uniform.may_store(recipe):
            words = f"{widest.name} keep the limit, and compute with integers"
            safe, self.stores = self._is_safe(widest), False
            self.journal.skip(f"{'' if safe else 'single '}layers {STORED_WORDS}", words)
            if safe:
                return []
        return uniform.stored(recipe)

    def _with_other_ranges(
        self, uniform: Uniform, recipe: Recipe, widest: Candidate, pool: list[Candidate]
    ) -> None:
        """Look at wider ranges, and at none, where the first candidate broke the limit.

        The search data did not tell of the evaluation data then, as where a detector of anomalies
        is calibrated on what is normal: values lie outside the ranges of activations. An observer
        that expects more than it has seen keeps integers; stored weights have no ranges.
        """
        wider = self.remedies.wider(widest)
        stored = [c for c in pool if set(c.choice.values()) == {STORED}]
        if wider is not None and not self.journal.is_late(wider[0]):
            self._another(self._built(*wider, widest.choice, pool=pool))
        if not stored and not self.stores and self.proofs.best is None:
            stored = uniform.stored(recipe)
            pool += stored
            self.journal.tried(f"layers {STORED_WORDS}")
        for candidate in stored:
            self._another(candidate)

    def _another(self, candidate: Candidate | None) -> None:
        """Look at a candidate that the first one's break has led to, unless another one holds."""
        if candidate is not None and candidate.proof is None and self._keeps(candidate):
            self.proofs.another(candidate)

    @property
    def _offered(self) -> Mapping[str, Mapping[str, Entry]]:
        """What layers may have."""
        if self.stores:
            return self.table
        return {n: {o: e for o, e in x.items() if o != STORED} for n, x in self.table.items()}

    def _are_slow(self, pool: Sequence[Candidate]) -> bool:
        """Whether nothing that may keep the metric's limit keeps that of latency."""
        if self.goal.latency_ratio is None:
            return False
        limit, bounds = self.goal.metric_drop, [(self._bound(c), c) for c in pool]
        kept = [c for bound, c in bounds if limit is None or bound is None or bound <= limit]
        return not any(map(self.proofs.is_fast, kept))

    def _all_floats(self, recipe: Recipe, start: Candidate, pool: list[Candidate]) -> None:
        """Add the candidate that computes all layers in floats."""
        name = f"{option_words(self.floats)}, {before_words(recipe)}"
        self._added(name, start, dict.fromkeys(self.table, self.floats), pool)

    def _by_the_pass(self, uniform: Uniform, start: Candidate, pool: list[Candidate]) -> None:
        """Add what the pass chooses by itself, which computes in floats where that is faster."""
        found = uniform.by_the_pass(start)
        if found is not None and not self.journal.is_late(found[0]):
            self._built(*found, start.choice, pool=pool)

    # Widths of single layers

    def _learn(self, candidate: Candidate) -> None:
        """Put what was measured of a candidate's layers into the table."""
        found = self.bench.table(candidate)
        for layer, (option, entry) in found.items():
            if option:
                self.table.setdefault(layer, {})[option] = entry
        costs = self.bench.costs(candidate)
        for layer, option in candidate.choice.items():
            known = self.table.get(layer, {})
            if layer not in found and option not in known:
                entry = Entry(expected_noise(known, option), costs.get(layer, 0.0))
                self.table.setdefault(layer, {})[option] = entry

    def _narrower_than_uniform(self, narrowest: Candidate, pool: list[Candidate]) -> None:
        """Choose each layer's width, and train the rounding where that may bring the most.

        Training takes minutes for each candidate, and gains the less, the fewer layers are narrow.
        So it is tried on the narrowest, if that may be the answer then; if not, the rounds go
        without, and one that is barely past the limit is tried with it. If the size alone is
        limited, that is the one that loses least. What keeps the limit barely has something larger
        made behind it, for the case that it is not proved.
        """
        limited, trained = self.goal.metric_drop is not None, narrowest
        if limited and self._may_train(narrowest, _TRAINED):
            trained = self.remedies.remedied(narrowest, train=True)
        elif limited:
            for name in self.remedies.training(narrowest):
                self.journal.skip(name, "it may lose more than training wins back")
        if trained is narrowest or not self._keeps(trained):
            self._rounds(narrowest, pool)
            self._between(narrowest, pool)
            last = self._last_to_train(pool)
            if last is not None and not (limited and last is narrowest):
                better = self.remedies.remedied(last, train=True)
                pool += [better] if better is not last else []
            pool += [trained] if trained is not narrowest else []
            return
        pool.append(trained)
        if not self._is_safe(trained):
            self._between(narrowest, pool)

    def _may_train(self, candidate: Candidate, gain: float) -> bool:
        """Whether training the rounding may bring a candidate to the metric's limit.

        Args:
            gain: how many times less noise may be expected, in power.
        """
        bound, limit, metric = self._bound(candidate), self.goal.metric_drop, self.bench.plan.metric
        if bound is None or limit is None or metric is None:
            return True
        return bound <= limit * less_lost(gain, share=metric.unit == "%")

    def _last_to_train(self, pool: Sequence[Candidate]) -> Candidate | None:
        if self.goal.metric_drop is None:
            return min(filter(self.proofs.fits, pool), key=self.proofs.loss, default=None)
        past = [c for c in pool if self._bound(c) is not None and not self._keeps(c)]
        narrow = [c for c in past if narrow_share(c.choice) >= NARROW]
        near = [c for c in narrow if self._may_train(c, _TRAINED_SOME)]
        return min(near, key=lambda c: noise_of(self.table, c.choice), default=None)

    def _keeps(self, candidate: Candidate) -> bool:
        """Whether the search says that a candidate may be shown to keep the metric's limit."""
        bound, limit = self._bound(candidate), self.goal.metric_drop
        return bound is not None and limit is not None and bound <= limit

    def _is_safe(self, candidate: Candidate) -> bool:
        """Whether a candidate is very likely to be proved."""
        bound, limit = self._bound(candidate), self.goal.metric_drop
        return bound is not None and limit is not None and bound <= _SAFE * limit

    def _rounds(self, start: Candidate, pool: list[Candidate]) -> None:
        """Solve, write, measure, correct and solve again; new candidates go into the pool."""
        for candidate in pool:
            self.bench.searched(candidate)
        if self.goal.metric_drop is not None:
            self._safer(start, pool)
        before = len(pool)
        for number in range(1, self.goal.rounds + 1):
            choice = self._solved(pool, before)
            if choice is None or any(dict(c.choice) == choice for c in pool):
                return
            name = f"round {number}: {choice_words(choice)}"
            if self.journal.is_late(name) or not self._added(name, start, choice, pool):
                return

    def _between(self, start: Candidate, pool: list[Candidate]) -> None:
        """Fill the widest gaps between the candidates that may keep the limit.

        What is just at the limit is proved every other time, and proving ends at the first that is
        not: what could be gained is lost then, if nothing lies between it and the next larger one.
        Above one that is very likely to be proved, nothing is lost.
        """
        if self.goal.minimize != "size" or self.goal.metric_drop is None:
            return
        for number in range(1, min(_BETWEEN, self.goal.rounds) + 1):
            kept = [c for c in pool if self._keeps(c)]
            most = min((c.bytes for c in kept if self._is_safe(c)), default=math.inf)
            near = [c for c in kept if c.bytes <= most]
            noise = middle_of_the_gap(
                [(c.bytes, noise_of(self.table, c.choice)) for c in near], _GAP
            )
            choice = None if noise is None else smallest(self._offered, noise)
            if choice is None or any(dict(c.choice) == choice for c in pool):
                return
            name = f"between {number}: {choice_words(choice)}"
            if self.journal.is_late(name) or not self._added(name, start, choice, pool):
                return

    def _added(
        self, name: str, start: Candidate, choice: Mapping[str, str], pool: list[Candidate]
    ) -> bool:
        made = self._built(name, start.recipe.with_choice(choice), choice, pool=pool)
        mixed = self.floats not in choice.values() or len(set(choice.values())) > 1
        if made is not None and mixed and not self.bench.watch.late_for({"noise": 1}):
            self._learn(made)
        return made is not None

    def _built(
        self, name: str, recipe: Recipe, choice: Mapping[str, str], *, pool: list[Candidate]
    ) -> Candidate | None:
        """Make a candidate, look at the search data, and put it into the pool."""
        try:
            made = self.bench.candidate(name, recipe, choice)
            self.bench.searched(made)
        except CompressorError as error:
            self.journal.not_tried.append(f"{name}: {error.subject}: {error.problem}")
            return None
        pool.append(made)
        self.journal.tell(made)
        return made

    def _solved(self, pool: list[Candidate], before: int) -> dict[str, str] | None:
        """Return what each layer is to have next.

        Args:
            before: how many candidates were there before the rounds.
        """
        if self.goal.metric_drop is None:
            last = pool[-1]
            assert self.goal.size_ratio is not None
            rest = last.bytes - cost_of(self.table, last.choice)
            return quietest(self._offered, self.goal.size_ratio * last.float_bytes - rest)
        points = [Reached(noise_of(self.table, c.choice), self._bound(c)) for c in pool]
        if all(point.drop is None for point in points):
            return None
        sides = [self._keeps(c) for c in reversed(pool[before:])]
        repeats = max(0, len(list(takewhile(lambda side: side is sides[0], sides))) - 1)
        noise = next_noise(points, self.goal.metric_drop, repeats)
        return None if noise is None else smallest(self._offered, noise)

    def _safer(self, start: Candidate, pool: list[Candidate]) -> None:
        """Add a candidate that is quieter than all, where these may not suffice."""
        quiet = min(pool, key=lambda c: noise_of(self.table, c.choice))
        if self._is_safe(quiet):
            return
        if self.floats == HALF and not self._keeps(quiet) and not self.journal.is_late("float16"):
            self._all_floats(base_recipe(self.bench.spec), start, pool)
        choice = smallest(self._offered, _SAFER * noise_of(self.table, quiet.choice))
        if choice is None or any(dict(c.choice) == choice for c in pool):
            return
        if not self.journal.is_late("a safer recipe"):
            self._added(f"safer: {choice_words(choice)}", start, choice, pool)

    def _nearer(self, pool: list[Candidate]) -> None:
        """Halve the noise between an answer that is not proved and what broke the limit.

        The search data may be too few to tell the two apart. As nothing is proved, no promise is
        broken by what the evaluation data lead to.
        """
        if not self.table:  # the time has not sufficed for it
            return
        for number in range(1, self.goal.rounds + 1):
            best, limit = self.proofs.best, self.goal.metric_drop
            assert best is not None
            assert limit is not None
            like = [c for c in pool if c.recipe.is_like(best.recipe)]
            broken = [c for c in like if c.proof is not None and c.proof.drop > limit]
            if not broken:
                return
            quiet, loud = (min(noise_of(self.table, c.choice) for c in x) for x in ([best], broken))
            choice = smallest(self._offered, math.sqrt(quiet * loud))
            if choice is None or any(dict(c.choice) == choice for c in like):
                return
            name = f"nearer {number}: {choice_words(choice)}"
            if self.journal.is_late(name) or not self._added(name, best, choice, pool):
                return
            self.proofs.follow(pool[-1])

    def _bound(self, candidate: Candidate) -> float | None:
        return self.bench.searched(candidate).bound
