"""Candidates in which all layers have one option: where the tables of the search come from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from compressor.errors import CompressorError, SpecError
from compressor.lab.tune.answer import Goal
from compressor.lab.tune.journal import STORED_WORDS, Journal
from compressor.lab.tune.recipe import STORED, STORING, Recipe, is_ruled, tuned_class, widths
from compressor.lab.tune.workbench import Candidate, Workbench
from compressor.lab.tune.workers import Crew
from compressor.report import formats

_SMALLER = 0.99  # share of a wider option's bytes from which on a narrower one is worth its noise


@dataclass
class Uniform:
    """Makes the candidates that a search begins with."""

    bench: Workbench
    goal: Goal
    journal: Journal
    crew: Crew

    def widths(self, recipe: Recipe) -> list[Candidate]:
        """Make a candidate of each width that makes the file smaller, the widest first.

        Raises:
            SpecError: none can be made.
        """
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
                self.journal.skip(words, f"{error.subject}: {error.problem}")
                continue
            made.append(candidate)
            self.journal.tell(candidate)
        if not made:
            raise SpecError("passes", "have no width that can be tuned", self.journal.not_tried[-1])
        return made

    def may_store(self, recipe: Recipe) -> bool:
        """Whether weights may only be stored: for the size, if the pass does not do so anyway."""
        tuned = recipe.passes[recipe.index]["pass"]
        return self.goal.minimize == "size" and tuned != STORING["pass"]

    def stored(self, recipe: Recipe) -> list[Candidate]:
        """Make the candidate of weights in 8 bits that are computed with as floats.

        It takes the bytes of 8 bits, and has no noise but that of the weights. As it gains no
        time, it is for the size alone.
        """
        if not self.may_store(recipe) or self.journal.is_late(STORED_WORDS):
            return []
        stored = recipe.with_choice({"*": STORED})
        try:
            plan = self.bench.planned(stored)
            layers = [r.name for r in plan.passes[stored.stored_at].layers if r.touched]
            candidate = self.bench.candidate(STORED_WORDS, stored, dict.fromkeys(layers, STORED))
        except CompressorError as error:
            self.journal.skip(STORED_WORDS, f"{error.subject}: {error.problem}")
            return []
        self.journal.tell(candidate)
        return [candidate]

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
                self.journal.skip(words, error.problem)
                continue
            export = plan.exports[self.bench.main]
            if export.bytes > _SMALLER * smallest_yet:
                why = f"the {export.format} file is not smaller than with {narrowest}"
                self.journal.skip(words, f"{why} ({formats.size(export.bytes)})")
                continue
            smallest_yet, narrowest = export.bytes, words
            layers = [r.name for r in plan.passes[recipe.index].layers if r.touched]
            free = [n for n in layers if not is_ruled(self.bench.spec, recipe.index, n)]
            yield width, uniform, free
