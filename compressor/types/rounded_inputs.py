"""How values are rounded while the model runs: inputs of layers, and what attention keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

InputFormat = Literal["int8", "fp8-e4m3", "nvfp4", "mxfp4"]
"""What inputs are rounded to. nvfp4 and mxfp4 have 16 and 32 channels with a scale in common."""

_WIDTHS = {"nvfp4": 4, "mxfp4": 4}
_GROUPS = {"nvfp4": 16, "mxfp4": 32}
_LARGEST = {"int8": 127.0, "fp8-e4m3": 448.0}


@dataclass(frozen=True)
class InputScheme:
    """How a layer's inputs are rounded.

    Attributes:
        format: what they are rounded to.
        static: one scale serves all tokens and is stored; otherwise each token has its own, which
            is found as the model runs.
        largest: the greatest magnitude that calibration saw, for a scheme that is
            :attr:`calibrated`; ``None`` in a plan.
    """

    format: InputFormat
    static: bool = False
    largest: float | None = None

    def __str__(self) -> str:
        span = f"group {self.group}" if self.group else ("tensor" if self.static else "token")
        return f"{self.format}/{span} inputs"

    @property
    def bits(self) -> int:
        """Width of a rounded value."""
        return _WIDTHS.get(self.format, 8)

    @property
    def group(self) -> int | None:
        """Channels that share a scale; ``None`` where all of a token do."""
        return _GROUPS.get(self.format)

    @property
    def calibrated(self) -> bool:
        """Whether something is stored that calibration has to find."""
        return self.static or self.format == "nvfp4"

    @property
    def scale(self) -> float:
        """The one scale of a static scheme: the greatest magnitude becomes the largest code.

        Raises:
            ValueError: it is not static, or calibration has not been run.
        """
        if not self.static or self.largest is None:
            raise ValueError(f"{self} has no scale")
        return self.largest / _LARGEST[self.format] if self.largest > 0 else 1.0


@dataclass(frozen=True)
class CacheScheme:
    """How the keys and values that attention keeps of earlier tokens are rounded.

    Attributes:
        keys: after positions have turned them.
        values: what attention mixes.
    """

    keys: InputScheme
    values: InputScheme
