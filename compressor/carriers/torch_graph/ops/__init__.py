"""The operators, by domain and name."""

from __future__ import annotations

from collections.abc import Mapping

from compressor.carriers.torch_graph.node import Builder, Table
from compressor.carriers.torch_graph.ops.activation import ACTIVATION
from compressor.carriers.torch_graph.ops.attention import ATTENTION
from compressor.carriers.torch_graph.ops.cast import CAST
from compressor.carriers.torch_graph.ops.contrib import CONTRIB
from compressor.carriers.torch_graph.ops.control import CONTROL
from compressor.carriers.torch_graph.ops.convolution import CONVOLUTION
from compressor.carriers.torch_graph.ops.creation import CREATION
from compressor.carriers.torch_graph.ops.detection import DETECTION
from compressor.carriers.torch_graph.ops.elementwise import ELEMENTWISE
from compressor.carriers.torch_graph.ops.indexing import INDEXING
from compressor.carriers.torch_graph.ops.integer import INTEGER
from compressor.carriers.torch_graph.ops.linear import LINEAR
from compressor.carriers.torch_graph.ops.normalization import NORMALIZATION
from compressor.carriers.torch_graph.ops.pooling import POOLING
from compressor.carriers.torch_graph.ops.quantize import QUANTIZE
from compressor.carriers.torch_graph.ops.recurrent import RECURRENT
from compressor.carriers.torch_graph.ops.reduction import REDUCTION
from compressor.carriers.torch_graph.ops.resize import RESIZE
from compressor.carriers.torch_graph.ops.sampling import SAMPLING
from compressor.carriers.torch_graph.ops.searching import SEARCHING
from compressor.carriers.torch_graph.ops.shape import SHAPE
from compressor.carriers.torch_graph.ops.signal import SIGNAL
from compressor.carriers.torch_graph.ops.slicing import SLICING
from compressor.carriers.torch_graph.ops.training import TRAINING, TRAINING_DOMAIN

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
