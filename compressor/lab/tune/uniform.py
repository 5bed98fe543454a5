"""Candidates in which all layers have one option: where the tables of the search come from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from compressor.errors import CompressorError, SpecError
from compressor.lab.tune.answer import Goal
from compressor.lab.tune.candidate import Candidate
from compressor.lab.tune.journal import Journal
from compressor.lab.tune.options import (
    CHANNEL,
    FLOAT,
    HALF,
    STORED,
    STORED_WORDS,
    option_words,
    with_group,
)
from compressor.lab.tune.recipe import HALVING, STORING, Recipe, is_ruled, tuned_class, widths
from compressor.lab.tune.workbench import Workbench
from compressor.lab.tune.workers import Crew
from compressor.report import formats
from compressor.types.layer_rules import rule_class

_SMALLER = 0.99  # share of a wider option's bytes from which on a narrower one is worth its noise
_HALVED = ("onnx", "safetensors")  # formats that store float16 beside what computes on float32
GROUPS: tuple[int | str, ...] = (
    32,
    128,
    CHANNEL,
)  # columns that share a scale, as presets have them, and whole rows


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
                f"fewer bits than {offered[0]}: no kernel is faster with them"
            )
            offered = offered[:1]
        planned = list(self._planned(recipe, offered))
        self.crew.ahead([uniform for _, uniform, _ in planned])
        for width, uniform, layers in planned:
            words = f"{width} bits"
            if made and self.journal.is_late(words):  # an answer needs one
                break
            made += self._made(words, uniform, dict.fromkeys(layers, width))
        if not made:
            raise SpecError("passes", "have no width that can be tuned", self.journal.not_tried[-1])
        self.bench.see_packing(made)
        return made

    def grouped(self, start: Candidate, made: Sequence[Candidate]) -> list[Candidate]:
        """Make candidates in which other numbers of columns share a scale, the largest first.

        Scales take bytes, too: of 4 bits in groups of 32 they are a fifth if they have 32 bits.
        Between the narrowest width that may keep the limit (or without one is too large) and the
        next narrower one lie the first with fewer scales, and the second with more.

        Args:
            start: its remedies are taken, and what it chooses for layers beyond the widths.
            made: the candidates of one width, the widest first.
        """
        rules = rule_class(tuned_class(start.recipe))
        if rules is None or "group" not in rules.model_fields:
            return []
        wider = max((i for i, c in enumerate(made) if self._is_wider(c)), default=0)
        around = made[wider : wider + 2]
        sizes = [self._bytes_of(start, c.choice) or 0 for c in around]
        found: list[tuple[int, str, dict[str, str]]] = []
        for width, group in product(around, GROUPS):
            (bits,) = set(width.choice.values())
            option, choice = with_group(bits, group), self._in_groups(start, width, group)
            size = self._bytes_of(start, choice)
            if size is None or not min(sizes) * (len(sizes) > 1) < size < max(sizes):
                continue
            taken = [*sizes, *(other for other, _, _ in found)]
            if all(abs(size / other - 1) > 1 - _SMALLER for other in taken):
                found.append((size, option_words(option), choice))
        candidates: list[Candidate] = []
        for _, words, choice in sorted(found, key=lambda x: -x[0]):
            if self.journal.is_late(words):
                break
            candidates += self._made(words, start.recipe.with_choice(choice), choice)
        return candidates

    def _is_wider(self, candidate: Candidate) -> bool:
        """Whether what is sought has fewer bits: it keeps the metric's limit, or is too large."""
        bound, limit = self.bench.searched(candidate).bound, self.goal.metric_drop
        if limit is None:
            return candidate.size_ratio > (self.goal.size_ratio or 0.0)
        return bound is not None and bound <= limit

    def _in_groups(self, start: Candidate, width: Candidate, group: int | str) -> dict[str, str]:
        """Return the choice of one width where the layers that divide have groups."""
        columns = {layer.name: layer.columns for layer in self.bench.before(start).layers()}
        choice = dict(start.choice)
        for layer, bits in width.choice.items():
            divides = group == CHANNEL or columns[layer] % int(group) == 0
            choice[layer] = with_group(bits, group) if divides else bits
        return choice

    def _bytes_of(self, start: Candidate, choice: Mapping[str, str]) -> int | None:
        """Return the predicted bytes of a choice; ``None`` where it does not fit the model."""
        recipe = start.recipe.with_choice({**start.choice, **choice})
        try:
            return self.bench.planned(recipe).exports[self.bench.main].bytes
        except CompressorError:
            return None

    def _made(self, name: str, recipe: Recipe, choice: Mapping[str, str]) -> list[Candidate]:
        try:
            candidate = self.bench.candidate(name, recipe, choice)
            self.journal.tell(candidate)
        except CompressorError as error:
            self.journal.skip(name, f"{error.subject}: {error.problem}")
            return []
        return [candidate]

    def as_it_is(self, start: Candidate) -> str:
        """Return the option of layers that are left alone: floats, in 16 bits if that helps.

        Only files store so; what is in 16 bits is computed with in 32, as a processor would anyway.
        """
        spec = self.bench.spec
        casts = any(entry["pass"] == HALVING["pass"] for entry in start.recipe.passes)
        stores = spec.exports[self.bench.main].format in _HALVED
        if self.goal.minimize != "size" or casts or not stores:
            return FLOAT
        floats, halves = (
            self._bytes_of(start, dict.fromkeys(start.choice, x)) for x in (FLOAT, HALF)
        )
        smaller = floats is not None and halves is not None and halves < floats
        return HALF if smaller else FLOAT

    def by_the_pass(self, start: Candidate) -> tuple[str, Recipe] | None:
        """Return the recipe in which the pass chooses what to compute in floats, and its name.

        A rule for all layers, as candidates of one width have, takes that choice away. ``None``
        where it would choose what such a candidate has.
        """
        width = min(start.choice.values())
        recipe = start.recipe.without_rules(width)
        if recipe is None:
            return None
        rows = self.bench.planned(recipe).passes[recipe.index].layers
        faster = any(row.name in start.choice and row.reason for row in rows)  # in floats
        return (f"{width} bits, floats where faster", recipe) if faster else None

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
        except CompressorError as error:
            self.journal.skip(STORED_WORDS, f"{error.subject}: {error.problem}")
            return []
        return self._made(STORED_WORDS, stored, dict.fromkeys(layers, STORED))

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
            layers = [r.name for r in plan.passes[recipe.index].layers if r.touched]
            free = [n for n in layers if not is_ruled(self.bench.spec, recipe.index, n)]
            if not free:
                why = "rules of the spec decide about all layers; take out those that may change"
                self.journal.skip(words, why)
                continue
            export = plan.exports[self.bench.main]
            if export.bytes > _SMALLER * smallest_yet:
                why = f"the {export.format} file is not smaller than with {narrowest}"
                self.journal.skip(words, f"{why} ({formats.size(export.bytes)})")
                continue
            smallest_yet, narrowest = export.bytes, words
            yield width, uniform, free


def before_words(recipe: Recipe) -> str:
    """Return in a few words what comes before the pass that is tuned."""
    names = [str(entry["pass"]) for entry in recipe.passes[: recipe.index]]
    return " and ".join("fused" if name == "fuse" else name for name in names) or "as it is"
