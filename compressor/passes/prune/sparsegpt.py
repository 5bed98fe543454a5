"""``prune-sparsegpt``: weights go where that costs least, and the others make up for them."""

from __future__ import annotations

from typing import ClassVar

from compressor.passes.prune.sparse_pass import CalibratedPruning
from compressor.passes.prune.sparse_weights import Criterion


class PruneSparsegpt(CalibratedPruning):
    """Prune the weights that change a layer's output least, and let the others make up for them.

    What a weight costs, and how the others change, follows from the second moment of the layer's
    inputs. Without n and m the cheapest of 128 columns at a time go, so that rows may keep unlike
    numbers of weights. It takes calibration data and a model that runs, which it works through
    block by block, so that each layer sees what it will see once those before it are pruned.
    Tables and a language model's output layer are kept; a layer whose input calibration does not
    see is pruned by magnitude, and the plan says so.
    """

    name: ClassVar[str] = "prune-sparsegpt"
    source: ClassVar[str] = "Frantar & Alistarh 2023 (arXiv:2301.00774)"
    criterion: ClassVar[Criterion] = "sparsegpt"
