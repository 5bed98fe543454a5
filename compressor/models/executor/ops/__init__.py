"""The operators, by domain and name."""

from __future__ import annotations

from compressor.models.executor.node import Operators
from compressor.models.executor.ops import elementwise, quantization
from compressor.models.executor.ops.control import CONTROL
from compressor.models.executor.ops.elementwise import ELEMENTWISE
from compressor.models.executor.ops.layers import LAYERS
from compressor.models.executor.ops.quantization import QUANTIZATION
from compressor.models.executor.ops.reference import REFERENCE
from compressor.models.executor.ops.shapes import SHAPES
from compressor.models.executor.ops.signal import SIGNAL
from compressor.models.executor.ops.vision import VISION
from compressor.models.executor.ops.windows import WINDOWS

_STANDARD = CONTROL | ELEMENTWISE | LAYERS | QUANTIZATION | SHAPES | SIGNAL | VISION | WINDOWS
_CONTRIB = elementwise.CONTRIB | quantization.CONTRIB

OPERATORS: Operators = {
    **{("", name): operator for name, operator in (_STANDARD | REFERENCE).items()},
    **{("com.microsoft", name): operator for name, operator in _CONTRIB.items()},
}
"""What runs a node, by its domain and operator."""
