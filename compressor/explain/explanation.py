"""What an explanation says, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from compressor.explain.changes import Change, yaml_lines

Method = Literal["sqnr", "leave-one-out"]


@dataclass(frozen=True)
class Gain:
    """What a change, or several together, would bring.

    Attributes:
        bytes: more bytes of the model.
        sqnr_db: how much the signal to noise of the model's output rises; ``None`` where that is
            not known, or no noise would be left.
        noise_share: percent of the power of the output's noise that would go.
        metric: how much better the metric would be, in its unit; ``None`` where it is not known.
        ci95: its 95 % interval, from samples paired.
    """

    bytes: int
    sqnr_db: float | None
    noise_share: float | None
    metric: float | None = None
    ci95: tuple[float, float] | None = None

    @property
    def certain(self) -> bool:
        """The metric gains more than chance would explain."""
        return self.ci95 is not None and self.ci95[0] > 0


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs, and what to do about it.

    Attributes:
        pass_name: the pass that changed it.
        scheme: how it is stored now.
        own_sqnr_db: signal to noise of its output when it reads what it reads in the float model.
        change: what could be done.
        gain: what that would bring, predicted or measured.
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
        name: the spec's.
        method: ``sqnr`` predicts, ``leave-one-out`` measures.
        data: role of the data that were measured on; empty where nothing was measured.
        metric: the metric after all passes, as in the report; ``None`` without evaluation.
        bytes: of the model after all passes.
        sqnr_db: of the model's output after all passes.
        layers: the most suspicious first.
        passes: names of the spec's passes.
        suggested: what to do, the best first.
        predicted: what the suggestions would bring together, if their gains add up.
        measured: what they bring together, where that was measured.
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
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def spec_lines(self) -> dict[int, list[str]]:
        """The suggestions as lines of the spec, by the place of their pass."""
        places = sorted({change.index for change in self.suggested})
        return {
            index: yaml_lines([c for c in self.suggested if c.index == index]) for index in places
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
            "predicted": None if self.predicted is None else _gain(self.predicted),
            "measured": None if self.measured is None else _gain(self.measured),
            "left_out": list(self.left_out),
            "notes": list(self.notes),
        }


def _gain(gain: Gain) -> dict[str, Any]:
    return {**asdict(gain), "within_noise": None if gain.ci95 is None else not gain.certain}
