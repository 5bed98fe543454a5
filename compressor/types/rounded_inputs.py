"""How values are rounded while the model runs: inputs of layers, and what attention keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

InputFormat = Literal["int8", "fp8-e4m3", "nvfp4", "mxfp4"]
"""What inputs are rounded to. nvfp4 and mxfp4 have 16 and 32 channels with a scale in common."""

_WIDTHS = {"nvfp4": 4, "mxfp4": 4}
_GROUPS = {"nvfp4": 16, "mxfp4": 32}
_LARGEST = {"int4": 7.0, "int8": 127.0, "fp8-e4m3": 448.0}

CacheFormat = Literal["fp8-e4m3", "int8", "int4"]
"""What keys and values become: fp8-e4m3 with one scale, int8 and int4 with one for each channel."""

Part = Literal["keys", "values"]


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
        return _scale(self.largest, self.format)


@dataclass(frozen=True)
class CacheScheme:
    """How the keys and values that attention keeps of earlier tokens are rounded.

    Attributes:
        format: what they are rounded to.
        keys: the greatest magnitudes that codes reach once positions had turned them: one, or one
            for each channel of each head; ``None`` in a plan.
        values: likewise of what attention mixes.
    """

    format: CacheFormat
    keys: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None

    @property
    def bits(self) -> int:
        """Width of a rounded value."""
        return 4 if self.format == "int4" else 8

    def scales(self, part: Part) -> tuple[float, ...]:
        """Return the scales of keys or values: that magnitude becomes the largest code.

        Raises:
            ValueError: calibration has not been run.
        """
        largest = self.keys if part == "keys" else self.values
        if largest is None:
            raise ValueError(f"a cache of {self.format} has no scales before calibration")
        return tuple(_scale(each, self.format) for each in largest)


def _scale(largest: float, name: str) -> float:
    return largest / _LARGEST[name] if largest > 0 else 1.0
