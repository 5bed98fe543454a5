"""What makes a recipe better for nothing: tried one on top of the other, by what outputs gain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compressor.errors import CompressorError
from compressor.lab.tune.answer import Goal
from compressor.lab.tune.candidate import Candidate
from compressor.lab.tune.journal import Journal
from compressor.lab.tune.options import narrow_share
from compressor.lab.tune.recipe import REMEDIES, Recipe, Remedy, base_recipe, identity, is_ruled
from compressor.lab.tune.solver import Table, eased
from compressor.lab.tune.workbench import Workbench
from compressor.lab.tune.workers import Crew
from compressor.report import formats

NARROW = 0.3  # share of the layers that are, at least: of fewer, training gains next to nothing
_WORTHWHILE_DB = 0.3  # that a remedy has to gain; one for bytes may cost as much
_SAME, _SAVED = 0.001, 0.01  # shares of the bytes: as many, and so many less that it is worth it
_NOTHING = 0.01  # share of the bytes that is no reason to stay narrow
_FIRST = "8"  # bits of layers that had no codes before


@dataclass
class Remedies:
    """Tries remedies on a candidate."""

    bench: Workbench
    goal: Goal
    journal: Journal
    crew: Crew

    def remedied(self, candidate: Candidate, *, train: bool = False) -> Candidate:
        """Return a candidate with the remedies that help it, each tried on top of the others.

        Args:
            train: try those that train; else all others.
        """
        if not train:
            self._ahead(candidate)
        for remedy in sorted(self.of(candidate), key=lambda r: r.slow):
            if remedy.trains is not train or candidate.recipe.has(remedy):
                continue
            if not candidate.recipe.feels(remedy, candidate.choice):
                self.journal.skip(remedy.name, f"it is for what has fewer than {remedy.below} bits")
                continue
            if self.journal.is_late(remedy.name):
                continue
            if remedy.slow and self._is_quiet(candidate):
                self.journal.skip(remedy.name, "it takes long, and is not needed")
                continue
            if remedy.saves:
                candidate = self._saved(candidate, remedy)
                continue
            recipe = candidate.recipe.with_remedy(remedy)
            other = self._tried(candidate, remedy, recipe, candidate.choice)
            if other is not candidate and not train:
                self._ahead(other)
            candidate = other
        return candidate

    def wider(self, candidate: Candidate) -> tuple[str, Recipe] | None:
        """Return a candidate's recipe with wider ranges, and its name; ``None`` where it has."""
        for remedy in self.of(candidate):
            if remedy.widens and not candidate.recipe.has(remedy):
                name = f"{candidate.name}, {remedy.name}"
                return name, candidate.recipe.with_remedy(remedy)
        return None

    def trained(self, candidate: Candidate) -> Candidate:
        """Return a candidate with trained rounding, if enough of it is narrow and it gains."""
        if narrow_share(candidate.choice) < NARROW:
            return candidate
        for name in self.training(candidate):
            self.journal.tried(name)
        return self.remedied(candidate, train=True)

    def training(self, candidate: Candidate) -> list[str]:
        """Return the names of a candidate with the remedies that train it."""
        left = [r for r in self.of(candidate) if r.trains and not candidate.recipe.has(r)]
        return [f"{candidate.name}, {remedy.name}" for remedy in left]

    def eased(self, narrowest: Candidate, table: Table) -> dict[str, str] | None:
        """Return a choice with more bits where these are next to nothing; ``None`` if none helps.

        A first layer and a last one often hold little of a network, and much of its error. What is
        quiet enough as it is stays as small as it is.
        """
        limited = self.goal.minimize == "size" and self.goal.metric_drop is not None
        if not limited or self._is_quiet(narrowest):
            return None
        choice = eased(table, narrowest.choice, _NOTHING * narrowest.bytes)
        late = choice is not None and self.journal.is_late("more bits where they are few")
        return None if late else choice

    def _is_quiet(self, candidate: Candidate) -> bool:
        """Whether a candidate needs no more remedies: half of the limit is room enough."""
        bound, limit = self.bench.searched(candidate).bound, self.goal.metric_drop
        return bound is not None and limit is not None and bound <= limit / 2

    @staticmethod
    def of(candidate: Candidate) -> tuple[Remedy, ...]:
        """Return the remedies of the pass that is tuned."""
        return REMEDIES[str(candidate.recipe.passes[candidate.recipe.index]["pass"])]

    def _ahead(self, candidate: Candidate) -> None:
        """Let workers begin all quick remedies at once, on top of those that were taken."""
        left = [r for r in self.of(candidate) if not (r.slow or r.saves)]
        made = [candidate.recipe.with_remedy(r) for r in left if not candidate.recipe.has(r)]
        self.crew.ahead([r for r in made if identity(r) not in self.bench.made])

    def _saved(self, candidate: Candidate, remedy: Remedy) -> Candidate:
        """Return a candidate with a remedy that is for bytes, if it helps."""
        if self.goal.minimize != "size":
            return candidate
        recipe, spec = candidate.recipe.with_remedy(remedy), self.bench.spec
        try:
            rows = self.bench.planned(recipe).passes[recipe.index].layers
        except CompressorError as error:
            self.journal.not_tried.append(f"{remedy.name}: {error.problem}")
            return candidate
        more = [row.name for row in rows if row.touched and row.name not in candidate.choice]
        if not more or any(is_ruled(spec, base_recipe(spec).index, layer) for layer in more):
            return candidate
        choice = {**candidate.choice, **dict.fromkeys(more, _FIRST)}
        return self._tried(candidate, remedy, recipe.with_choice(choice), choice)

    def _tried(
        self, candidate: Candidate, remedy: Remedy, recipe: Recipe, choice: Mapping[str, str]
    ) -> Candidate:
        name = f"{candidate.name}, {remedy.name}"
        try:
            other = self.bench.candidate(name, recipe, choice)
            ours, theirs = self.bench.searched(other), self.bench.searched(candidate)
        except CompressorError as error:
            self.journal.not_tried.append(f"{remedy.name}: {error.problem}")
            return candidate
        if ours.sqnr_db is None or theirs.sqnr_db is None:
            return candidate
        gain = round(ours.sqnr_db - theirs.sqnr_db, 1) + 0.0  # no minus before a zero
        change = other.bytes / candidate.bytes - 1
        helps = gain >= _WORTHWHILE_DB and change <= _SAME
        if remedy.saves:
            helps = gain > -_WORTHWHILE_DB and change <= -_SAVED
        if helps and ours.bound is not None and theirs.bound is not None:
            helps = ours.bound <= theirs.bound * 1.1
        cost = "for nothing"
        if remedy.saves or change > _SAME:
            size = formats.size(abs(other.bytes - candidate.bytes))
            cost = f"{size} {'more' if change > 0 else 'less'}"
        decision = "taken" if helps else "left out"
        change_in_db = f"{'' if gain < 0 else '+'}{formats.decibel(gain)}"
        self.journal.path.append(f"{remedy.name}: {change_in_db} {cost}; {decision}")
        return other if helps else candidate
