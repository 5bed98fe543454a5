"""Compression techniques, one a file.

Their classes are here, too, for specs in Python; each is imported on first use.

    >>> from compressor.passes import Fuse, QuantizeStatic
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.catalog import lazy_classes

if TYPE_CHECKING:
    from compressor.passes.factor.low_rank import LowRank as LowRank
    from compressor.passes.fuse.fuse import Fuse as Fuse
    from compressor.passes.prepare.equalize import Equalize as Equalize
    from compressor.passes.prepare.equalize import Smooth as Smooth
    from compressor.passes.prepare.rotate import Rotate as Rotate
    from compressor.passes.prune.magnitude.magnitude import PruneMagnitude as PruneMagnitude
    from compressor.passes.prune.sparse.passes import PruneNm as PruneNm
    from compressor.passes.prune.sparse.passes import PruneSparsegpt as PruneSparsegpt
    from compressor.passes.prune.sparse.passes import PruneWanda as PruneWanda
    from compressor.passes.prune.structured.structured import PruneStructured as PruneStructured
    from compressor.passes.quantize.attention_cache import QuantizeCache as QuantizeCache
    from compressor.passes.quantize.cast.cast import Cast as Cast
    from compressor.passes.quantize.cluster import Cluster as Cluster
    from compressor.passes.quantize.dynamic import QuantizeDynamic as QuantizeDynamic
    from compressor.passes.quantize.static.static import QuantizeStatic as QuantizeStatic
    from compressor.passes.quantize.weights.weights import QuantizeWeights as QuantizeWeights
    from compressor.passes.train.archive.archive import Archive as Archive
    from compressor.passes.train.distill.distill import Distill as Distill
    from compressor.passes.train.early_exit.early_exit import EarlyExit as EarlyExit
    from compressor.passes.train.finetune import Finetune as Finetune
    from compressor.passes.train.qat.qat import Qat as Qat

__getattr__, __dir__ = lazy_classes("pass", __name__)
