"""Search for a recipe: free remedies first, then each layer's width, then proof."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from compressor.errors import CompressorError, SpecError
from compressor.lab.tune.answer import Answer, Goal
from compressor.lab.tune.journal import Journal, words_of
from compressor.lab.tune.proofs import Proofs
from compressor.lab.tune.recipe import (
    FLOAT,
    REMEDIES,
    Recipe,
    Remedy,
    base_recipe,
    identity,
    is_ruled,
    tuned_class,
    widths,
)
from compressor.lab.tune.solver import (
    Entry,
    Reached,
    cost_of,
    expected_noise,
    next_noise,
    noise_of,
    quietest,
    smallest,
)
from compressor.lab.tune.structure import Structure
from compressor.lab.tune.workbench import Candidate, Workbench
from compressor.lab.tune.workers import Crew, Nobody
from compressor.report import formats

_SMALLER = 0.99  # share of a wider option's bytes from which on a narrower one is worth its noise
_WORTHWHILE_DB = 0.3  # that a remedy has to gain
_SAFER = 0.25  # share of the quietest candidate's noise that one more is to have


@dataclass
class Tuning:
    """One search.

    Attributes:
        publish: called with each candidate that is the best so far.
    """

    bench: Workbench
    goal: Goal
    publish: Callable[[Candidate], None]
    journal: Journal
    crew: Crew = field(default_factory=Nobody)
    proofs: Proofs = field(init=False)
    table: dict[str, dict[str, Entry]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin the sequence of proofs."""
        self.proofs = Proofs(self.bench, self.goal, self.journal, self.publish)

    def answer(self) -> Answer:
        """Search and prove.

        Raises:
            CompressorError: the spec has nothing to tune, or its own recipe fails.
        """
        recipe = base_recipe(self.bench.spec)
        uniforms = self._uniforms(recipe)
        narrowest = self._remedied(uniforms[-1])
        pool = [*uniforms[:-1], narrowest]
        for candidate in sorted(pool, key=lambda c: c.bytes):  # what is not seen at many bits
            self._learn(candidate)  # is known from fewer
        for layer, entry in self.bench.float_entries(narrowest).items():
            if layer in self.table:
                self.table[layer][FLOAT] = entry
        if self.goal.minimize == "latency":
            floats = dict.fromkeys(self.table, FLOAT)
            self._added(f"float, {self._before(recipe)}", narrowest, floats, pool)
            self._by_the_pass(narrowest, pool)
        self._narrower_than_uniform(narrowest, pool)
        if self.goal.metric_drop is not None:
            self.proofs.expected(pool)  # so that there is an answer before structures are tried
        if self.proofs.going:
            added = partial(self._built, pool=pool)
            Structure(self.bench, self.goal, self.journal, added, self.crew.ahead).explore(
                tuple(pool)
            )
        else:
            self._skip("fewer channels and training", "what they would start from was not proved")
        self.proofs.finish(pool)
        if self.proofs.is_open:
            self._nearer(pool)
        self.proofs.tell_of_more_samples(pool)
        best = self.proofs.best
        if best is not None:
            self.bench.timed(best)
        return self.journal.answer(best, pool)

    # Uniform widths

    def _uniforms(self, recipe: Recipe) -> list[Candidate]:
        """Make a candidate of each width that makes the file smaller, the widest first."""
        made: list[Candidate] = []
        offered = widths(tuned_class(recipe))
        if self.goal.minimize == "latency":
            self.journal.not_tried.append(
                f"fewer bits than {offered[0]}: no kernel computes with them"
            )
            offered = offered[:1]
        planned = list(self._planned(recipe, offered))
        self.crew.ahead([uniform for _, uniform, _ in planned])
        for width, uniform, layers in planned:
            words = f"{width} bits"
            if self.journal.is_late(words):
                break
            try:
                candidate = self.bench.candidate(words, uniform, dict.fromkeys(layers, width))
            except CompressorError as error:
                self._skip(words, f"{error.subject}: {error.problem}")
                continue
            made.append(candidate)
            self.journal.tell(candidate)
        if not made:
            raise SpecError("passes", "have no width that can be tuned", self.journal.not_tried[-1])
        return made

    def _by_the_pass(self, start: Candidate, pool: list[Candidate]) -> None:
        """Add what the pass chooses by itself, which computes in floats where that is faster.

        A rule for all layers, as candidates of one width have, takes that choice away.
        """
        (width,) = set(start.choice.values())
        recipe, name = start.recipe.without_rules(width), f"{width} bits, floats where faster"
        if recipe is None or self.journal.is_late(name):
            return
        made = self._built(name, recipe, start.choice, pool=pool)
        if made is not None and made.artifact.digest == start.artifact.digest:
            pool.remove(made)  # nothing is faster in floats

    def _planned(
        self, recipe: Recipe, offered: Sequence[str]
    ) -> Iterator[tuple[str, Recipe, list[str]]]:
        """Yield the widths that make the file smaller, each with its recipe and its layers."""
        smallest_yet, narrowest = math.inf, ""
        for width in offered:
            words = f"{width} bits"
            uniform = recipe.with_choice({"*": width})
            try:
                plan = self.bench.planned(uniform)
            except CompressorError as error:
                self._skip(words, error.problem)
                continue
            export = plan.exports[self.bench.main]
            if export.bytes > _SMALLER * smallest_yet:
                why = f"the {export.format} file is not smaller than with {narrowest}"
                self._skip(words, f"{why} ({formats.size(export.bytes)})")
                continue
            smallest_yet, narrowest = export.bytes, words
            layers = [r.name for r in plan.passes[recipe.index].layers if r.touched]
            free = [n for n in layers if not is_ruled(self.bench.spec, recipe.index, n)]
            yield width, uniform, free

    def _skip(self, what: str, why: str) -> None:
        self.journal.not_tried.append(f"{what}: {why}")

    @staticmethod
    def _before(recipe: Recipe) -> str:
        names = [str(entry["pass"]) for entry in recipe.passes[: recipe.index]]
        return " and ".join("fused" if name == "fuse" else name for name in names) or "as it is"

    # Free remedies

    def _remedied(self, candidate: Candidate, *, train: bool = False) -> Candidate:
        """Return a candidate with the remedies that help it, each tried on top of the others.

        Args:
            train: try those that train; else all others.
        """
        remedies = REMEDIES[str(candidate.recipe.passes[candidate.recipe.index]["pass"])]
        if not train:
            self._ahead(candidate)
        for remedy in sorted(remedies, key=lambda r: r.slow):
            if remedy.trains is not train or candidate.recipe.has(remedy):
                continue
            if not candidate.recipe.feels(remedy, candidate.choice):
                self._skip(remedy.name, f"it is for what has fewer than {remedy.below} bits")
                continue
            if self.journal.is_late(remedy.name):
                continue
            bound, limit = self._bound(candidate), self.goal.metric_drop
            if remedy.slow and bound is not None and limit is not None and bound <= limit / 2:
                self._skip(remedy.name, "it takes long, and is not needed")
                continue
            other = self._tried(candidate, remedy)
            if other is not candidate and not train:
                self._ahead(other)
            candidate = other
        return candidate

    def _ahead(self, candidate: Candidate) -> None:
        """Let workers begin all quick remedies at once, on top of those that were taken."""
        remedies = REMEDIES[str(candidate.recipe.passes[candidate.recipe.index]["pass"])]
        left = [r for r in remedies if not r.slow and not candidate.recipe.has(r)]
        made = [candidate.recipe.with_remedy(remedy) for remedy in left]
        self.crew.ahead([r for r in made if identity(r) not in self.bench.made])

    def _tried(self, candidate: Candidate, remedy: Remedy) -> Candidate:
        name = f"{candidate.name}, {remedy.name}"
        try:
            other = self.bench.candidate(
                name, candidate.recipe.with_remedy(remedy), candidate.choice
            )
            ours, theirs = self.bench.searched(other), self.bench.searched(candidate)
        except CompressorError as error:
            self.journal.not_tried.append(f"{remedy.name}: {error.problem}")
            return candidate
        if ours.sqnr_db is None or theirs.sqnr_db is None:
            return candidate
        gain = round(ours.sqnr_db - theirs.sqnr_db, 1) + 0.0  # no minus before a zero
        larger = other.bytes > candidate.bytes * 1.001
        helps = gain >= _WORTHWHILE_DB and not larger
        if helps and ours.bound is not None and theirs.bound is not None:
            helps = ours.bound <= theirs.bound * 1.1
        cost = f"{formats.size(other.bytes - candidate.bytes)} more" if larger else "for nothing"
        decision = "taken" if helps else "left out"
        self.journal.path.append(f"{remedy.name}: {gain:+.1f} dB {cost}; {decision}")
        return other if helps else candidate

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
        So it is tried on the narrowest, which may be the answer then; if not, the rounds go
        without, and the one just past the limit is tried with it. If the size alone is limited,
        that is the one that loses least.
        """
        limited = self.goal.metric_drop is not None
        trained = self._remedied(narrowest, train=True) if limited else narrowest
        if trained is narrowest or not self._keeps(trained):
            self._rounds(narrowest, pool)
            last = self._last_to_train(pool)
            if last is not None and not (limited and last is narrowest):
                better = self._remedied(last, train=True)
                pool += [better] if better is not last else []
        pool += [trained] if trained is not narrowest else []

    def _last_to_train(self, pool: Sequence[Candidate]) -> Candidate | None:
        if self.goal.metric_drop is None:
            return min(filter(self.proofs.fits, pool), key=self.proofs.loss, default=None)
        past = [c for c in pool if self._bound(c) is not None and not self._keeps(c)]
        return min(past, key=lambda c: noise_of(self.table, c.choice), default=None)

    def _keeps(self, candidate: Candidate) -> bool:
        """Whether the search says that a candidate may be shown to keep the metric's limit."""
        bound, limit = self._bound(candidate), self.goal.metric_drop
        return bound is not None and limit is not None and bound <= limit

    def _rounds(self, start: Candidate, pool: list[Candidate]) -> None:
        """Solve, write, measure, correct and solve again; new candidates go into the pool."""
        for candidate in pool:
            self.bench.searched(candidate)
        if self.goal.metric_drop is not None:
            self._safer(start, pool)
        for number in range(1, self.goal.rounds + 1):
            choice = self._solved(pool)
            if choice is None or any(dict(c.choice) == choice for c in pool):
                return
            name = f"round {number}: {words_of(choice)}"
            if self.journal.is_late(name) or not self._added(name, start, choice, pool):
                return

    def _added(
        self, name: str, start: Candidate, choice: Mapping[str, str], pool: list[Candidate]
    ) -> bool:
        made = self._built(name, start.recipe.with_choice(choice), choice, pool=pool)
        if made is not None and (FLOAT not in choice.values() or len(set(choice.values())) > 1):
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

    def _solved(self, pool: list[Candidate]) -> dict[str, str] | None:
        """Return what each layer is to have next."""
        if self.goal.metric_drop is None:
            last = pool[-1]
            assert self.goal.size_ratio is not None
            rest = last.bytes - cost_of(self.table, last.choice)
            return quietest(self.table, self.goal.size_ratio * last.float_bytes - rest)
        points = [Reached(noise_of(self.table, c.choice), self._bound(c)) for c in pool]
        if all(point.drop is None for point in points):
            return None
        noise = next_noise(points, self.goal.metric_drop)
        return None if noise is None else smallest(self.table, noise)

    def _safer(self, start: Candidate, pool: list[Candidate]) -> None:
        """Add a candidate that is quieter than all, where these may not suffice."""
        quiet = min(pool, key=lambda c: noise_of(self.table, c.choice))
        bound = self._bound(quiet)
        assert self.goal.metric_drop is not None
        if bound is not None and bound <= self.goal.metric_drop / 2:
            return
        choice = smallest(self.table, _SAFER * noise_of(self.table, quiet.choice))
        if choice is not None and not self.journal.is_late("a safer recipe"):
            self._added(f"safer: {words_of(choice)}", start, choice, pool)

    def _nearer(self, pool: list[Candidate]) -> None:
        """Halve the noise between an answer that is not proved and what broke the limit.

        The search data may be too few to tell the two apart. As nothing is proved, no promise is
        broken by what the evaluation data lead to.
        """
        for number in range(1, self.goal.rounds + 1):
            best, limit = self.proofs.best, self.goal.metric_drop
            assert best is not None
            assert limit is not None
            like = [c for c in pool if c.recipe.is_like(best.recipe)]
            broken = [c for c in like if c.proof is not None and c.proof.drop > limit]
            if not broken:
                return
            quiet, loud = (min(noise_of(self.table, c.choice) for c in x) for x in ([best], broken))
            choice = smallest(self.table, math.sqrt(quiet * loud))
            if choice is None or any(dict(c.choice) == choice for c in like):
                return
            name = f"nearer {number}: {words_of(choice)}"
            if self.journal.is_late(name) or not self._added(name, best, choice, pool):
                return
            self.proofs.follow(pool[-1])

    def _bound(self, candidate: Candidate) -> float | None:
        return self.bench.searched(candidate).bound
