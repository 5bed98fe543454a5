"""A teacher's batch-norm statistics, re-estimated on the data that it teaches on.

A teacher that was trained on other data, or prepared them in another way, normalizes the training
data of its student by statistics that are not theirs, and so teaches worse than it could. Y. Li et
al., Revisiting batch normalization for practical domain adaptation, 2016 (arXiv:1603.04779): the
weights stay, the statistics are taken of the new data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from compressor.errors import SpecError
from compressor.models.element_types import to_numpy
from compressor.passes.prune.batch_statistics import batch_norms, re_estimated
from compressor.passes.train.distill.teachers import Teacher, matched_inputs
from compressor.passes.train.job import Micro, Objective, as_tensors
from compressor.passes.train.recipe import Course
from compressor.types.carrier import Carrier
from compressor.types.tensors import Array, Batch, TensorSpec

_ESTIMATED, _JUDGED = 16, 8  # steps whose samples statistics and losses are of
_SURE = 2.0  # standard errors by which the loss has to fall


def adapted(
    wanted: bool | None,
    teacher: Carrier,
    inputs: Sequence[TensorSpec],
    sources: Mapping[str, str],
    hard: Objective | None,
    course: Course,
) -> tuple[Carrier, str]:
    """Return a teacher with the statistics that it teaches better with, and a note.

    They are estimated on the samples of the first 16 steps as the student will see them. Without a
    wish, they are taken if the loss against the target of 8 other steps' samples falls by more than
    two standard errors of the difference: a teacher that knows the data stays as it is. An epoch
    that is shorter is divided two to one.

    Args:
        wanted: whether to take them; ``None`` decides by the loss.
        teacher: the model.
        inputs: the student's.
        sources: the teacher's outputs by the student's.
        hard: the loss of these outputs against the target; ``None`` if it cannot be taken, and then
            nothing is decided.
        course: the training.

    Returns:
        The teacher, and what was done to it; empty if nothing was.

    Raises:
        SpecError: it is wanted, and the teacher has no batch normalization.
        DataError: the training data cannot be read, or give statistics that are not finite.
    """
    if wanted is False or (wanted is None and hard is None) or not adaptable(wanted, teacher):
        return teacher, ""
    judged = min(_JUDGED, course.order.steps_in_epoch // 3)
    if not wanted and not judged:
        return teacher, ""
    estimated = min(_ESTIMATED, course.order.steps_in_epoch - judged)
    names = matched_inputs(teacher.inputs, inputs)

    def batches() -> Iterator[Batch]:
        for micro in _samples(course, range(estimated)):
            tensors = {n: to_numpy(micro.tensors[source]) for n, source in names.items()}
            yield {s.name: tensors[s.name].astype(s.dtype) for s in teacher.inputs}

    changed = re_estimated(teacher, batches(), data="training data")
    note = "the teacher's batch-norm statistics were re-estimated on the training data"
    if wanted or hard is None:
        return changed, note
    rest = list(_samples(course, range(estimated, estimated + judged)))
    before, after = (_losses(t, inputs, sources, hard, rest) for t in (teacher, changed))
    gain = before - after
    if gain.mean() <= _SURE * gain.std() / np.sqrt(len(gain)):
        return teacher, ""
    return changed, (
        f"{note}: its loss on {len(gain):,} other samples of them is {after.mean():.4g}, and was "
        f"{before.mean():.4g}"
    )


def adaptable(wanted: bool | None, teacher: Carrier) -> bool:
    """Return whether a teacher has statistics that can be estimated anew.

    Raises:
        SpecError: they are to be, and it has none.
    """
    first = teacher.inputs[0].shape if teacher.inputs else ()
    fixed = bool(first) and isinstance(first[0], int)
    if not fixed and next(batch_norms(teacher.graph()), None) is not None:
        return True
    if wanted:
        raise SpecError(
            "adapt-teacher",
            "is true, but the teacher "
            + ("takes a fixed batch" if fixed else "has no batch normalization to adapt"),
            "leave it out",
        )
    return False


def _samples(course: Course, steps: range) -> Iterator[Micro]:
    """Yield the samples of some steps as one process would see them."""
    order, data = course.order, course.training.data
    for step in steps:
        rows = order.rows(step)
        tensors = as_tensors(data.batch(rows, (order.seed, step, 0)), len(rows))
        yield from Micro(rows, tensors).divided(course.micro)


@torch.no_grad()
def _losses(
    carrier: Carrier,
    inputs: Sequence[TensorSpec],
    sources: Mapping[str, str],
    hard: Objective,
    samples: Sequence[Micro],
) -> Array:
    """Return a teacher's loss against the target, one value a sample."""
    teacher = Teacher(carrier, inputs, list(sources.values()))
    found: list[Tensor] = []
    for micro in samples:
        theirs = teacher({spec.name: micro.tensors[spec.name] for spec in inputs})
        outputs = {name: theirs[source] for name, source in sources.items()}
        terms = hard.losses(outputs, micro, 0)
        found.append(torch.stack(list(terms.values())).sum(dim=0))
    return torch.cat(found).double().numpy()
