"""``prune-wanda``: weights go by their size and the norm of their input."""

from __future__ import annotations

from typing import ClassVar

from compressor.passes.prune.sparse_pass import CalibratedPruning
from compressor.passes.prune.sparse_weights import Criterion


class PruneWanda(CalibratedPruning):
    """Prune the weights that are least in size times the norm of their input.

    They are compared within each output row, or with n and m within each group. Weights that stay
    are not changed. It takes calibration data and a model that runs, which it works through block
    by block, so that each layer sees what it will see once those before it are pruned. Of each
    layer's input it holds one number a column, so it serves where `prune-sparsegpt` wants too much
    memory or time. Tables and a language model's output layer are kept; a layer whose input
    calibration does not see is pruned by magnitude, and the plan says so.
    """

    name: ClassVar[str] = "prune-wanda"
    source: ClassVar[str] = "Sun et al. 2023 (arXiv:2306.11695)"
    criterion: ClassVar[Criterion] = "wanda"
