"""What a face detector's outputs find, and how far it agrees with another's.

It knows numpy alone, so that the Python of other tools can import it, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Outputs = Mapping[str, Array]

SCORE, OVERLAP, MATCH = 0.7, 0.3, 0.5  # the detector's own thresholds, and that of a match


def detections(outputs: Outputs) -> Array:
    """Return the boxes that remain, ``[N, 4]`` as left, top, right, bottom, best first.

    Greedy non-maximum suppression with the thresholds that the detector is published with.
    """
    score, boxes = outputs["scores"][0, :, 1], outputs["boxes"][0]
    order = np.argsort(-score, kind="stable")
    order = order[score[order] > SCORE]
    kept = []
    while len(order):
        kept.append(order[0])
        apart = overlaps(boxes[order[:1]], boxes[order])[0] <= OVERLAP
        apart[0] = False
        order = order[apart]
    return boxes[kept]


def overlaps(first: Array, second: Array) -> Array:
    """Return intersection over union of each pair of boxes, ``[len(first), len(second)]``."""
    top_left = np.maximum(first[:, None, :2], second[None, :, :2])
    bottom_right = np.minimum(first[:, None, 2:], second[None, :, 2:])
    common = np.clip(bottom_right - top_left, 0, None).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (first, second)]
    union = areas[0][:, None] + areas[1][None] - common
    return np.asarray(common / np.maximum(union, np.finfo(np.float32).tiny))


def agreement(wanted: Sequence[Outputs], found: Sequence[Outputs]) -> tuple[float, float, float]:
    """Return precision, recall and F1 of detections, the float model's being the truth.

    Each detection, the best first, takes the free one of the float model that it overlaps most.
    """
    hits = ours = theirs = 0
    for reference, outputs in zip(wanted, found, strict=True):
        truth, boxes = detections(reference), detections(outputs)
        ours, theirs = ours + len(boxes), theirs + len(truth)
        shares = overlaps(boxes, truth)
        for row in shares:
            if row.size and row.max() > MATCH:
                hits += 1
                shares[:, row.argmax()] = 0
    precision, recall = hits / max(ours, 1), hits / max(theirs, 1)
    return precision, recall, 2 * hits / max(ours + theirs, 1)


def f1(outputs: Outputs, target: Outputs) -> Array:
    """Return F1 of each image's detections, ``[N]``; one where neither finds any.

    A metric without labels: the target is what the float model gives.
    """
    values = []
    for i in range(len(outputs["scores"])):
        ours, theirs = ({k: v[i : i + 1] for k, v in o.items()} for o in (outputs, target))
        nothing = not len(detections(ours)) and not len(detections(theirs))
        values.append(1.0 if nothing else agreement([theirs], [ours])[2])
    return np.array(values)
