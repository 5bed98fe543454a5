"""Numbers as people read them; the same in every form of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

NOTHING = "–"
NOT_MEASURED = "not measured"
_MOST_DIGITS = 10


def number(value: float, digits: int = 4) -> str:
    """Format with so many significant digits, as an exponent where it is very small or large.

    >>> number(0.01234567)
    '0.01235'
    """
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return _minus(f"{value:.{digits - 1}e}")
    return _minus(f"{value:,.{_decimals(value, digits)}f}")


def count(value: int) -> str:
    """Format a count in full, ``269,722``."""
    return f"{value:,}"


def short_count(value: float) -> str:
    """Format a count with three digits, ``270 k``, ``41.2 M``."""
    return _scaled(value, ("", "k", "M", "G", "T"))


def size(value: float) -> str:
    """Format bytes in decimal units, ``1.03 MB``, ``372 kB``."""
    return _scaled(value, ("B", "kB", "MB", "GB", "TB"))


def percent(value: float, decimals: int = 2) -> str:
    """Format a number that is in percent already."""
    return _minus(f"{value:z.{decimals}f} %")


def ratio(value: float) -> str:
    """Format a ratio, ``0.34 ×``."""
    return f"{_ratio_digits(value)} ×"


def ratio_interval(bounds: Sequence[float]) -> str:
    """Format the interval of a ratio, ``0.33 to 0.36``."""
    return f"{_ratio_digits(bounds[0])} to {_ratio_digits(bounds[1])}"


def decibel(value: float) -> str:
    """Format decibels, ``38.2 dB``."""
    return _minus(f"{value:z.1f} dB")


def milliseconds(value: float) -> str:
    """Format milliseconds, ``0.412 ms``."""
    return f"{number(float(f'{value:.3g}'), 3)} ms"


def seconds(value: float) -> str:
    """Format a duration, ``0.4 s``, ``2 min 05 s``, ``1 h 04 min``."""
    if value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def shape(dimensions: Sequence[int | str]) -> str:
    """Format a shape, ``64×3×3×3``."""
    return "×".join(str(d) for d in dimensions) or "scalar"


def metric(entry: Mapping[str, Any]) -> str:
    """Format a metric's value, ``92.31 %`` or ``5.683``, and the worst sample's if it is there."""
    form = percent if is_share(entry) else number
    worst = f" (worst {form(float(entry['worst']))})" if "worst" in entry else ""
    return form(float(entry["value"])) + worst


def metric_interval(entry: Mapping[str, Any]) -> str:
    """Format a metric's interval with as many decimals as its value has."""
    low, high = (float(b) for b in entry["ci95"])
    value = float(entry["value"])
    if is_share(entry):
        return _minus(f"{low:z.2f} to {high:z.2f}")
    if value == 0 or not 1e-4 <= abs(value) < 1e9:
        return f"{number(low)} to {number(high)}"
    decimals = _decimals(value, 4)
    return _minus(f"{low:z,.{decimals}f} to {high:z,.{decimals}f}")


def metric_change(value: float, *, share: bool) -> str:
    """Format a difference of a metric, in points where the metric is a share."""
    return _minus(f"{value:z,.2f} points") if share else number(value, 3)


def metric_change_interval(bounds: Sequence[float], *, share: bool) -> str:
    """Format the interval of a difference of a metric; its unit stands beside it."""
    ends = [metric_change(bound, share=share).removesuffix(" points") for bound in bounds]
    return " to ".join(ends)


def excess(value: float, measured: str) -> str:
    """Format by how much something is over, with the decimals of the measured number."""
    if "e" in measured:
        return number(value, 3)
    return f"{value:,.{len(measured.partition('.')[2])}f}"


def compared(value: float, other: float, *, significant: bool = False) -> tuple[str, str]:
    """Format two numbers with as many digits as it takes to tell them apart.

    Args:
        significant: count significant digits, from three; else decimals, from two.
    """
    texts = ("", "")
    for digits in range(2, _MOST_DIGITS):
        if significant:
            texts = (number(value, digits + 1), number(other, digits + 1))
        else:
            texts = (_minus(f"{value:z,.{digits}f}"), _minus(f"{other:z,.{digits}f}"))
        if texts[0] != texts[1] or value == other:
            break
    return texts


def plural(amount: int, noun: str) -> str:
    """Format an amount with its noun, ``1 limit``, ``3 limits``."""
    return f"{count(amount)} {noun}{'' if amount == 1 else 's'}"


def is_share(entry: Mapping[str, Any] | None) -> bool:
    """Return whether a metric is a share in percent, so that its differences are points."""
    return entry is not None and entry.get("unit") == "%"


def _ratio_digits(value: float) -> str:
    if abs(value) < 0.1:
        return number(value, 2)
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.2f}"


def _scaled(value: float, units: Sequence[str]) -> str:
    for unit in units:
        rounded = float(f"{value:.3g}")
        if abs(rounded) < 1000 or unit == units[-1]:
            break
        value /= 1000
    whole = unit == units[0] or abs(rounded) >= 100
    text = f"{rounded:,.0f}" if whole else f"{rounded:.{_decimals(rounded, 3)}f}"
    return f"{text} {unit}".rstrip()


def _decimals(value: float, digits: int) -> int:
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))


def _minus(text: str) -> str:
    """Write a true minus sign, but leave that of an exponent."""
    mantissa, mark, exponent = text.partition("e-")
    return mantissa.replace("-", "−") + mark + exponent
