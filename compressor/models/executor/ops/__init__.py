"""The operators, by domain and name."""

from __future__ import annotations

from collections.abc import Mapping

from compressor.models.executor.node import Builder, Table
from compressor.models.executor.ops.activation import ACTIVATION
from compressor.models.executor.ops.attention import ATTENTION
from compressor.models.executor.ops.cast import CAST
from compressor.models.executor.ops.contrib import CONTRIB
from compressor.models.executor.ops.control import CONTROL
from compressor.models.executor.ops.convolution import CONVOLUTION
from compressor.models.executor.ops.creation import CREATION
from compressor.models.executor.ops.detection import DETECTION
from compressor.models.executor.ops.elementwise import ELEMENTWISE
from compressor.models.executor.ops.indexing import INDEXING
from compressor.models.executor.ops.integer import INTEGER
from compressor.models.executor.ops.linear import LINEAR
from compressor.models.executor.ops.normalization import NORMALIZATION
from compressor.models.executor.ops.pooling import POOLING
from compressor.models.executor.ops.quantize import QUANTIZE
from compressor.models.executor.ops.recurrent import RECURRENT
from compressor.models.executor.ops.reduction import REDUCTION
from compressor.models.executor.ops.resize import RESIZE
from compressor.models.executor.ops.sampling import SAMPLING
from compressor.models.executor.ops.searching import SEARCHING
from compressor.models.executor.ops.shape import SHAPE
from compressor.models.executor.ops.signal import SIGNAL
from compressor.models.executor.ops.slicing import SLICING
from compressor.models.executor.ops.training import TRAINING, TRAINING_DOMAIN

_DOMAINS: dict[str, tuple[Table, ...]] = {
    "": (
        ACTIVATION,
        ATTENTION,
        CAST,
        CONTROL,
        CONVOLUTION,
        CREATION,
        DETECTION,
        ELEMENTWISE,
        INDEXING,
        INTEGER,
        LINEAR,
        NORMALIZATION,
        POOLING,
        QUANTIZE,
        RECURRENT,
        REDUCTION,
        RESIZE,
        SAMPLING,
        SEARCHING,
        SHAPE,
        SIGNAL,
        SLICING,
    ),
    "com.microsoft": (CONTRIB,),
    TRAINING_DOMAIN: (TRAINING,),
}

OPERATORS: Mapping[tuple[str, str], Builder] = {
    (domain, name): builder
    for domain, tables in _DOMAINS.items()
    for table in tables
    for name, builder in table.items()
}
"""What prepares a node, by its domain and operator."""
