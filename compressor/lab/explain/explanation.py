"""Explanations: costs of layers, suggested changes, and their gains."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from compressor.spec.source_text import scalar
from compressor.types.layer_rules import match_of, rule_class, rule_of
from compressor.types.passes import LayerRule, Pass

WIDE = 8
FULL = 32
INTEGER = re.compile(r"u?int(\d+)/")


@dataclass(frozen=True)
class Change:
    """A rule for one layer, to be put in front of a pass's rules.

    Attributes:
        index: place of the pass in the spec.
        keys: what the rule says beside its ``match``.
        kept: how much of the layer's noise remains, as a share of its power.
    """

    index: int
    layer: str
    keys: Mapping[str, Any]
    kept: float = 0.0

    @property
    def text(self) -> str:
        """The change in a few words, such as ``bits: 8``."""
        return ", ".join(f"{key}: {scalar(value)}" for key, value in self.keys.items())

    @property
    def line(self) -> str:
        """The rule as an item of a YAML list."""
        return f"- {{match: {scalar(match_of(self.layer))}, {self.text}}}"

    def applied(self, declared: Pass) -> Pass:
        """Return the pass with the rule in front of its own."""
        rules = rule_class(type(declared))
        assert rules is not None
        rule = rules.model_validate({"match": match_of(self.layer), **self.keys})
        others: tuple[LayerRule, ...] = declared.layers  # type: ignore[attr-defined]  # has rules
        return declared.model_copy(update={"layers": (rule, *others)})


def change_for(
    index: int, declared: Pass, layer: str, scheme: str, *, alike: bool = False
) -> Change:
    """Choose a change of a layer: 8 bits if it has fewer and the pass allows 8, else skip it.

    This applies to its weight and its inputs. Each additional bit halves the quantization step, and
    so leaves a quarter of the noise power.

    Args:
        index: place of the pass in the spec.
        scheme: how the pass stores it, such as ``int4/group 32``.
        alike: all layers that are not left out must have one scheme.
    """
    narrow = None if alike else INTEGER.match(scheme)
    rules = None if alike else rule_class(type(declared))
    widths = {}
    if narrow and rules is not None and _takes(rules, "bits", WIDE):
        widths["bits"] = int(narrow[1])
    if rules is not None and _takes(rules, "activation_bits", WIDE):
        given = rule_of(declared.layers, layer)  # type: ignore[attr-defined]  # has rules
        every = getattr(getattr(declared, "activations", None), "bits", WIDE)
        widths["activation-bits"] = (given and given.activation_bits) or every
    widths = {key: bits for key, bits in widths.items() if bits < WIDE}
    if not widths:
        return Change(index, layer, {"skip": True})
    kept = 4.0 ** (min(widths.values()) - WIDE)
    return Change(index, layer, dict.fromkeys(widths, WIDE), kept)


def _takes(rules: type[LayerRule], key: str, bits: int) -> bool:
    field = rules.model_fields.get(key)
    choices = [] if field is None else [c for a in get_args(field.annotation) for c in get_args(a)]
    return bits in choices


Method = Literal["sqnr", "leave-one-out"]


@dataclass(frozen=True)
class Gain:
    """The gain of one change, or of several together.

    Attributes:
        bytes: more bytes of the model.
        sqnr_db: how much the signal to noise of the model's output rises; ``None`` where that is
            not known, or no noise would be left.
        noise_share: percent of the power of the output's noise that would go.
        metric: how much better the metric would be, in its unit; ``None`` where it is not known.
        ci95: its 95 % interval, from samples paired.
        metric_share: percent of the noise's effect on the metric that would go; ``None`` if that
            is not known.
    """

    bytes: int
    sqnr_db: float | None
    noise_share: float | None
    metric: float | None = None
    ci95: tuple[float, float] | None = None
    metric_share: float | None = None

    @property
    def share(self) -> float | None:
        """What changes are ranked by: percent of the effect on the metric, else of the noise."""
        return self.noise_share if self.metric_share is None else self.metric_share

    @property
    def certain(self) -> bool:
        """The metric gains more than chance would explain."""
        return self.ci95 is not None and self.ci95[0] > 0


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer, and a change that reduces it.

    Attributes:
        own_sqnr_db: SQNR of its output on the float model's inputs.
        gain: the gain of the change, predicted or measured.
    """

    pass_name: str
    scheme: str
    own_sqnr_db: float | None
    change: Change
    gain: Gain


@dataclass(frozen=True)
class Explanation:
    """Which layers cost what.

    Attributes:
        method: ``sqnr`` predicts, ``leave-one-out`` measures.
        data: role of the data that were measured on; empty where nothing was measured.
        metric: the metric after all passes, as in the report; ``None`` without evaluation.
        bytes: of the main artifact; of the model after all passes where there is none.
        sqnr_db: of the model's output after all passes.
        layers: the most suspicious first.
        suggested: what to do, the best first.
        predicted: what the suggestions would bring together, if their gains add up.
        measured: what they bring together, where that was measured.
        doubt: why nobody can tell what the suggestions would gain, where they are predictions.
        by_command: the run has no spec that could take rules: ``compress quantize`` made it.
        left_out: layers and passes that were not looked at, and why.
        notes: how to read it, one sentence each.
    """

    name: str
    method: Method
    data: str
    metric: Mapping[str, Any] | None
    bytes: int
    sqnr_db: float | None
    layers: tuple[LayerCost, ...]
    passes: tuple[str, ...]
    suggested: tuple[Change, ...] = ()
    predicted: Gain | None = None
    measured: Gain | None = None
    doubt: str = ""
    by_command: bool = False
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def options(self) -> list[str]:
        """The suggestions as options of ``compress quantize``, where that made the run."""
        found = self.suggested if self.by_command else ()
        return [f"--skip {shlex.quote(match_of(change.layer))}" for change in found]

    @property
    def spec_lines(self) -> dict[int, list[str]]:
        """The suggestions as lines of the spec, by the place of their pass."""
        if self.by_command:
            return {}
        places = sorted({change.index for change in self.suggested})
        return {
            index: ["layers:", *(f"  {c.line}" for c in self.suggested if c.index == index)]
            for index in places
        }

    def as_json(self) -> dict[str, Any]:
        """Return the document of ``compress explain --json``."""
        return {
            "schema": 1,
            "name": self.name,
            "method": self.method,
            "data": self.data or None,
            "metric": None if self.metric is None else dict(self.metric),
            "bytes": self.bytes,
            "sqnr_db": self.sqnr_db,
            "layers": [
                {
                    "pass": cost.pass_name,
                    "index": cost.change.index,
                    "layer": cost.change.layer,
                    "scheme": cost.scheme,
                    "own_sqnr_db": cost.own_sqnr_db,
                    "change": dict(cost.change.keys),
                    "gain": _gain(cost.gain),
                }
                for cost in self.layers
            ],
            "suggested": [
                {"index": c.index, "layer": c.layer, "change": dict(c.keys)} for c in self.suggested
            ],
            "spec": {str(index): "\n".join(lines) for index, lines in self.spec_lines.items()},
            "options": self.options,
            "predicted": None if self.predicted is None else _gain(self.predicted),
            "measured": None if self.measured is None else _gain(self.measured),
            "doubt": self.doubt or None,
            "left_out": list(self.left_out),
            "notes": list(self.notes),
        }


def _gain(gain: Gain) -> dict[str, Any]:
    return {**asdict(gain), "within_noise": None if gain.ci95 is None else not gain.certain}


def best(layers: Sequence[LayerCost], count: int, room: float = math.inf) -> list[LayerCost]:
    """Return the layers whose change brings most for its bytes, as far as there is room for them.

    First those that improve the metric beyond chance, by their gain for each byte; then those
    that remove more than half of what a layer's change removes on average, by the share of the
    effect on the metric that goes for each byte.

    Args:
        room: bytes that all changes may take together.
    """
    shares = [max(cost.gain.share or 0.0, 0.0) for cost in layers]
    even = sum(shares) / max(len(shares), 1)
    certain = [cost for cost in layers if cost.gain.certain]
    certain.sort(key=lambda cost: -(cost.gain.metric or 0.0) / max(cost.gain.bytes, 1))
    noisy = [
        cost
        for cost in layers
        if not cost.gain.certain
        and cost.gain.share is not None
        and cost.gain.share > 0.5 * even
        and not (cost.gain.ci95 is not None and cost.gain.ci95[1] < 0)
    ]
    noisy.sort(key=lambda cost: -(cost.gain.share or 0.0) / max(cost.gain.bytes, 1))
    found: list[LayerCost] = []
    for cost in (*certain, *noisy):
        if len(found) < count and cost.gain.bytes <= room:
            found.append(cost)
            room -= cost.gain.bytes
    return found


def together(gains: Sequence[Gain]) -> Gain:
    """Return the gain of several changes, if each removes noise of its own.

    The powers of independent noises add, and so do the shares that go. Of the metric, only gains
    beyond chance are added; that is a guess, and no interval is given for it.
    """
    shares = [gain.noise_share for gain in gains if gain.noise_share is not None]
    share = sum(shares) if shares else None
    effects = [gain.metric_share for gain in gains if gain.metric_share is not None]
    metrics = [gain.metric for gain in gains if gain.certain and gain.metric is not None]
    measured = any(gain.sqnr_db is not None for gain in gains)
    return Gain(
        bytes=sum(gain.bytes for gain in gains),
        sqnr_db=gained_db(share) if measured and share is not None else None,
        noise_share=None if share is None else min(share, 100.0),
        metric=sum(metrics) if metrics else None,
        metric_share=min(sum(effects), 100.0) if effects else None,
    )


def gained_db(share: float) -> float | None:
    """Return by how many dB signal to noise rises if so much of the noise goes, in percent.

    ``None`` where all would go.
    """
    return -10.0 * math.log10(1.0 - share / 100.0) if share < 100.0 else None


def share_of(gain_db: float) -> float:
    """Invert :func:`gained_db`; negative where noise was added."""
    return float(100.0 * (1.0 - 10.0 ** (-gain_db / 10.0)))
