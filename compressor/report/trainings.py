"""How the passes that trained went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compressor.report import formats
from compressor.report.verdict import Report


@dataclass(frozen=True)
class Training:
    """The losses of one training.

    Attributes:
        by: the pass.
        caption: how many steps; of very many, not all losses are kept.
        losses: pairs of step and loss, at least two.
    """

    by: str
    caption: str
    losses: Sequence[Sequence[float]]


def trainings(report: Report) -> list[Training]:
    """Return the trainings of which there are losses to draw, in the order of the passes."""
    found = []
    for entry in report["passes"]:
        content = entry.get("training")
        if content and len(content["losses"]) > 1:
            caption = formats.plural(content["steps"], "step")
            found.append(Training(entry["pass"], caption, content["losses"]))
    return found
