"""Whether the samples that set ranges also judge the model, which flatters it."""

from __future__ import annotations

import math

from compressor.calibration.sources.file_source import PathSource
from compressor.spec.keys import DataKeys
from compressor.spec.load import DataEntry, Spec


def judged_on_calibration(spec: Spec, *, calibrates: bool) -> list[str]:
    """Return a doubt where calibration and evaluation read the same samples.

    Sources are compared by what names them, as a plan does not read their samples.

    Args:
        calibrates: a pass reads the calibration data.
    """
    first, second = (spec.data.get(role) for role in ("calibration", "evaluation"))
    if not calibrates or first is None or second is None or first.kind != second.kind:
        return []
    same = _origin(spec, first) == _origin(spec, second)
    if not same or first.keys.inputs != second.keys.inputs or not _overlap(first.keys, second.keys):
        return []
    return [
        "quality is judged on the samples that calibrate, which flatters it: give data.evaluation "
        "others, or let each read every other sample (fold: 1/2 and fold: 2/2)"
    ]


def _origin(spec: Spec, entry: DataEntry) -> object:
    """Return the path that an entry reads, or the object or function that yields its batches."""
    if isinstance(entry.options, PathSource):
        return entry.options.path.resolve()
    held = spec.objects.get(entry.reference or "")
    return entry.reference if held is None else id(held)


def _overlap(first: DataKeys, second: DataKeys) -> bool:
    """Return whether two folds share samples (by the Chinese remainder theorem)."""
    (number, of), (other, parts) = (
        map(int, (keys.fold or "1/1").split("/")) for keys in (first, second)
    )
    return (number - other) % math.gcd(of, parts) == 0
