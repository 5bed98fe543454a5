"""A recipe: the passes of a spec, one of which has its options and its layers' rules tuned."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, get_args

from compressor import catalog
from compressor.errors import SpecError
from compressor.lab.tune.options import AS_IT_IS, FLOAT, HALF, STORED, bits_of, rule_of
from compressor.spec.load import Spec, check_spec
from compressor.types.layer_rules import match_of, rule_class
from compressor.types.passes import Pass, TrainPass

STORING: Mapping[str, Any] = {"pass": "quantize-weights", "bits": 8}
"""The pass that stores weights in 8 bits, behind the one that is tuned."""

HALVING: Mapping[str, Any] = {"pass": "cast", "weights-only": True}
"""The pass that stores in float16 what is still float, behind all of these."""


@dataclass(frozen=True)
class Remedy:
    """A change that costs no bytes and no latency.

    Attributes:
        keys: options of the pass, merged into those that it has.
        before: a pass that is put in front of it.
        slow: it takes minutes for large networks, and so is tried last.
        trains: it trains for each candidate; candidates on the way to the answer go without.
        below: it changes what has fewer bits, and gains little elsewhere; ``None`` for all.
        saves: it is for bytes: more layers have codes, of 8 bits at first. It stays if the outputs
            hardly feel it.
        widens: it has ranges that reach beyond what calibration showed.
    """

    name: str
    keys: Mapping[str, Any]
    before: Mapping[str, Any] | None = None
    slow: bool = False
    trains: bool = False
    below: int | None = None
    saves: bool = False
    widens: bool = False


REMEDIES: dict[str, tuple[Remedy, ...]] = {
    "quantize-static": (
        Remedy("equalize", {}, {"pass": "equalize"}),
        Remedy("observer auto", {"activations": {"observer": "auto"}}),
        Remedy(
            "observer extreme-value", {"activations": {"observer": "extreme-value"}}, widens=True
        ),
        Remedy(
            "rounding reconstruct",
            {"weights": {"rounding": "reconstruct"}},
            slow=True,
            trains=True,
            below=8,
        ),
    ),
    "quantize-weights": (
        Remedy("tables in 8 bits", {"embeddings": True}, saves=True),
        Remedy("range mse", {"range": "mse"}),
        Remedy("method hqq", {"method": "hqq"}),
        Remedy("method gptq", {"method": "gptq"}, slow=True),
        Remedy("method awq", {"method": "awq"}, slow=True),
    ),
}


@dataclass(frozen=True)
class Recipe:
    """Passes as a spec has them.

    Attributes:
        passes: each with its name and options.
        index: the one that is tuned.
        layers: the rules that tuning adds, behind the user's own: the last is for all others.
        left_out: the pass is left out, and so all of its layers stay floats.
        kept: rules of the pass that stores in 8 bits what else stays floats, for what it leaves
            alone; ``None`` without that pass.
        unhalved: the same of the pass that stores in float16 what is float behind these two.
    """

    passes: tuple[Mapping[str, Any], ...]
    index: int
    layers: tuple[Mapping[str, Any], ...] = ()
    left_out: bool = False
    kept: tuple[Mapping[str, Any], ...] | None = None
    unhalved: tuple[Mapping[str, Any], ...] | None = None

    def value(self) -> list[dict[str, Any]]:
        """Return the list ``passes`` of a spec."""
        passes = [deepcopy(dict(entry)) for entry in self.passes]
        for behind, kept in ((HALVING, self.unhalved), (STORING, self.kept)):  # the last is first
            if kept is not None:
                rules = {"layers": [dict(rule) for rule in kept]} if kept else {}
                passes.insert(self.index + 1, {**behind, **rules})
        if self.left_out:
            del passes[self.index]
        elif self.layers:
            tuned = passes[self.index]
            tuned["layers"] = [*(tuned.get("layers") or ()), *map(dict, self.layers)]
        return passes

    def with_remedy(self, remedy: Remedy) -> Recipe:
        """Return the recipe with a remedy."""
        passes = list(self.passes)
        passes[self.index] = _merged(passes[self.index], remedy.keys)
        if remedy.before is None:
            return replace(self, passes=tuple(passes))
        passes.insert(self.index, remedy.before)
        return replace(self, passes=tuple(passes), index=self.index + 1)

    def after(self, *passes: Mapping[str, Any]) -> Recipe:
        """Return the recipe with passes in front of all others."""
        return replace(self, passes=(*passes, *self.passes), index=self.index + len(passes))

    def is_like(self, other: Recipe) -> bool:
        """Whether only the choices for single layers differ."""
        names = ("layers", "left_out", "kept", "unhalved")
        return replace(self, **{name: getattr(other, name) for name in names}) == other

    def has(self, remedy: Remedy) -> bool:
        """Whether a remedy is in it already; of one for bytes, whether the spec decides it."""
        named = [entry["pass"] for entry in self.passes]
        if remedy.before is not None:
            return remedy.before["pass"] in named
        tuned = self.passes[self.index]
        if remedy.saves and set(remedy.keys) & set(tuned):
            return True
        return _merged(tuned, remedy.keys) == tuned

    def feels(self, remedy: Remedy, choice: Mapping[str, str]) -> bool:
        """Whether something in the recipe is narrow enough for a remedy to change it."""
        if remedy.below is None:
            return True
        tuned = self.passes[self.index]
        bits = [b for option in choice.values() if (b := bits_of(option)) is not None]
        bits += [rule["bits"] for rule in tuned.get("layers") or () if "bits" in rule]
        bits.append((tuned.get("activations") or {}).get("bits", remedy.below))
        return min(bits) < remedy.below

    def with_choice(self, choice: Mapping[str, str]) -> Recipe:
        """Return the recipe with an option for each layer; what most layers have is the last rule.

        Args:
            choice: the options by layer.
        """
        behind = replace(self, kept=self._kept(choice), unhalved=self._unhalved(choice))
        floats = {STORED, *AS_IT_IS}
        computed = {n: FLOAT if option in floats else option for n, option in choice.items()}
        counted = Counter(computed.values())
        own = self.passes[self.index].get("layers") or ()
        if set(counted) == {FLOAT} and all(rule.get("skip") for rule in own):
            return replace(behind, left_out=True)
        rest = max(counted, key=lambda option: (counted[option], option != FLOAT, option))
        rules = [
            {"match": match_of(layer), **rule_of(option)}
            for layer, option in computed.items()
            if option != rest
        ]
        layers = (*rules, {"match": "*", **rule_of(rest)})
        return replace(behind, layers=layers, left_out=False)

    @property
    def stored_at(self) -> int:
        """The place of the pass that stores what else stays floats."""
        return self.index if self.left_out else self.index + 1

    def _kept(self, choice: Mapping[str, str]) -> tuple[Mapping[str, Any], ...] | None:
        """Return rules for what is not to be stored: layers that stay floats, and the user's."""
        if STORED not in choice.values():
            return None
        floats = [match_of(layer) for layer, option in choice.items() if option in AS_IT_IS]
        return (*self._ruled, *({"match": match, "skip": True} for match in floats))

    def _unhalved(self, choice: Mapping[str, str]) -> tuple[Mapping[str, Any], ...] | None:
        return self._ruled if HALF in choice.values() else None

    @property
    def _ruled(self) -> tuple[Mapping[str, Any], ...]:
        """Rules that leave alone what the user has rules for."""
        rules = self.passes[self.index].get("layers") or ()
        return tuple({"match": str(rule["match"]), "skip": True} for rule in rules)

    def without_rules(self, width: str) -> Recipe | None:
        """Return the recipe in which the pass decides what computes on codes of one width.

        ``None`` where it decides nothing.
        """
        tuned = self.passes[self.index]
        if tuned["pass"] != "quantize-static":
            return None
        passes = list(self.passes)
        passes[self.index] = _merged(tuned, {"weights": {"bits": int(width)}})
        return replace(self, passes=tuple(passes), layers=(), kept=None, unhalved=None)

    def with_parts(self, layers: Collection[str]) -> Recipe | None:
        """Return the recipe whose rules also hold for what layers become: ``fc.down``, ``fc.up``.

        ``None`` where the name of one layer begins another's, so that no pattern tells them apart.

        Args:
            layers: all that are tuned.
        """
        parts = (self.layers[:-1], self.kept, self.unhalved)
        for rule in (rule for rules in parts for rule in rules or ()):
            if len([x for x in layers if fnmatchcase(x, f"{rule['match']}*")]) > 1:
                return None
        wider = [
            None if rules is None else tuple({**r, "match": f"{r['match']}*"} for r in rules)
            for rules in parts
        ]
        own, kept, unhalved = wider
        return replace(self, layers=(*(own or ()), *self.layers[-1:]), kept=kept, unhalved=unhalved)


def _merged(entry: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(entry)
    for key, value in keys.items():
        old = merged.get(key)
        both = isinstance(value, Mapping)
        merged[key] = {**(old or {}), **value} if both else value
    return merged


def widths(declared: type[Pass]) -> tuple[str, ...]:
    """Return the options of a layer's width that a pass has rules for, the widest first."""
    rules = rule_class(declared)
    field = None if rules is None else rules.model_fields.get("bits")
    choices = [] if field is None else [c for a in get_args(field.annotation) for c in get_args(a)]
    return tuple(str(bits) for bits in sorted(choices, reverse=True))


def base_recipe(spec: Spec) -> Recipe:
    """Return the recipe that a spec has: its last pass with rules for layers is tuned.

    Raises:
        SpecError: no pass has such rules, or one after it trains.
    """
    passes = tuple(dict(entry) for entry in spec.document.value.get("passes") or ())
    names = [declared.name for declared in spec.passes]
    fit = [i for i, name in enumerate(names) if name in REMEDIES]
    if not fit:
        raise SpecError(
            "passes",
            f"have none to tune ({', '.join(names) or 'there are none'})",
            f"add {' or '.join(REMEDIES)}; compress init writes a spec that has one",
            where=spec.where("passes"),
        )
    for declared in spec.passes[fit[-1] :]:
        if isinstance(declared, TrainPass):
            raise SpecError(
                f"pass {declared.name!r}",
                "trains after the tuned pass, and would train once for each candidate",
                "tune without it, and train the tuned recipe",
                where=spec.where("passes"),
            )
    return Recipe(passes, fit[-1])


def is_ruled(spec: Spec, index: int, layer: str) -> bool:
    """Whether a rule of the user's own decides about a layer."""
    rules: Sequence[Any] = getattr(spec.passes[index], "layers", ())
    return any(fnmatchcase(layer, rule.match) for rule in rules)


def spec_with(spec: Spec, value: Mapping[str, Any]) -> Spec:
    """Return a spec with some of its keys replaced.

    Raises:
        SpecError: they do not fit.
    """
    return check_spec(replace(spec.document, value={**spec.document.value, **value}, settings={}))


def with_recipe(spec: Spec, recipe: Recipe) -> Spec:
    """Return the spec of a recipe.

    Raises:
        SpecError: a pass does not take its options.
    """
    return spec_with(spec, {"passes": recipe.value()})


def identity(recipe: Recipe) -> str:
    """Return the same text for equal recipes."""
    return json.dumps(recipe.value(), sort_keys=True)


def tuned_class(recipe: Recipe) -> type[Pass]:
    """Return the pass that is tuned."""
    declared: type[Pass] = catalog.load("pass", str(recipe.passes[recipe.index]["pass"]))
    return declared
