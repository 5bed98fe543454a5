"""Whether a cell is ok, refused with a reason, or wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log10
from typing import Any, Literal

from compressor.errors import ExitCode

State = Literal["ok", "refused", "wrong", "none"]

FLOAT_DB = 60.0
"""What a float artifact has to reach. One rounding to float32 is at 150 dB; sums of thousands of
terms through a hundred layers are at 100 and more."""
_ROUNDING_DB = 38.0
"""Signal over error of one layer in int8 with ranges from extrema: normal values of a tensor span
nine standard deviations, so that 255 steps leave 39.8 dB; those of a row of weights span six, which
leaves 43 dB."""
_MARGIN_DB = 6.0
_PEER_DB = 3.0
_LEAST_WEIGHTS_DB = 19.0
"""The same for weights alone, of 64 layers: 43 dB - 18 dB, and the margin."""
PEERS = ("ort_static", "ort_dynamic", "torch_pruning")
_HALF = 0.55
_DEFECTS = ("report it", "does not run")
"""What a message says that is no refusal: of a defect of the program, or of a model that ran."""


@dataclass(frozen=True)
class Verdict:
    """What a cell came to.

    Attributes:
        db: signal over error, where outputs were compared.
        reason: why it is not ok.
        note: on what it took.
    """

    state: State
    db: float | None = None
    reason: str = ""
    note: str = ""


def judge(name: str, cells: Mapping[str, Mapping[str, Any]]) -> Verdict:
    """Judge a cell of a case.

    Args:
        name: the cell's.
        cells: outcomes of all cells of the case, as the run wrote them.
    """
    outcome = cells.get(name)
    if outcome is None or "skipped" in outcome:
        return Verdict("none")
    if "killed" in outcome:
        return Verdict("wrong", reason=f"killed: {outcome['killed']}")
    if "failed" in outcome:
        return Verdict("wrong", reason=outcome["failed"])
    code, message = outcome.get("code", ExitCode.DONE), outcome.get("message", "")
    admitted = any(words in message for words in _DEFECTS)
    refused = code in (ExitCode.BAD_SPEC, ExitCode.BAD_INPUT) and message.startswith("error:")
    if refused and not admitted:
        return Verdict("refused", reason=message.removeprefix("error: "))
    if code != ExitCode.DONE:
        return Verdict("wrong", reason=message or f"exit code {code}")
    if name == "torch_pruning":
        return _pruned_by_peer(outcome)
    needed = _needed(name, cells)
    measured = [v for v in (outcome.get("db"), outcome.get("reload_db")) if v is not None]
    shown = outcome.get("db", outcome.get("reload_db"))
    if needed is not None and outcome.get("db", needed) < needed:
        return Verdict("wrong", shown, f"{outcome['db']} dB; at least {needed:.0f} dB is due")
    if measured and name == "prune" and min(measured) < FLOAT_DB:
        return Verdict("wrong", shown, f"the two artifacts agree to {min(measured)} dB")
    agreed = outcome.get("reload_db")
    if name == "static" and agreed is not None and agreed < (least := _due(outcome)):
        reason = f"the two artifacts agree to {agreed} dB; at least {least:.0f} dB is due"
        return Verdict("wrong", shown, reason)
    return Verdict("ok", shown, note="fixed axes" if outcome.get("fixed") else "")


def _needed(name: str, cells: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return the least signal over error that a cell's outputs must have, in dB.

    Errors of independent roundings add up. Networks that amplify them lose more: there, ONNX
    Runtime's quantizer loses it, too.
    """
    if name in ("export", "reload", "fuse"):
        return FLOAT_DB
    if name == "directory":
        return _LEAST_WEIGHTS_DB
    if name in ("static", "dynamic"):
        due = _due(cells[name])
        peer = cells.get(f"ort_{name}", {}).get("db")
        return due if peer is None else min(due, peer - _PEER_DB)
    return None


def _due(outcome: Mapping[str, Any]) -> float:
    """Return what is left of the signal after so many independent roundings to 8 bits, in dB.

    Two runtimes that compute the same codes differ by fewer: where they differ by more, one of them
    computes something else, however much the network amplifies.
    """
    rounded = max(1, int(outcome.get("rounded", 1)))
    return _ROUNDING_DB - 10 * log10(rounded) - _MARGIN_DB


def _pruned_by_peer(outcome: Mapping[str, Any]) -> Verdict:
    if not outcome["shapes"]:
        return Verdict("wrong", reason="outputs have other shapes")
    if outcome["share"] > _HALF:
        return Verdict("refused", reason=f"{outcome['share']:.0%} of the work remain")
    return Verdict("ok")
