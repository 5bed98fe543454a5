"""What a teacher gives for the samples of a training: computed, or from the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from compressor.passes.train.order import Order
from compressor.passes.train.steps import Micro, as_tensors
from compressor.passes.train.teacher_cache import Field, Page, page_bytes
from compressor.types.tensors import Array
from compressor.types.training import Rows, Training

Teach: TypeAlias = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""From inputs to what the student is compared with, each ``[N, ...]``."""

_KEPT_UNASKED = 1 << 30  # bytes
_HELD_OUT, _SHARED = "held-out", "all epochs"


@dataclass(frozen=True)
class Course:
    """The training that a teacher's outputs are for.

    Attributes:
        training: data, processes and the folder of the cache.
        order: which samples each step has.
        micro: how many go through the networks at once.
        steps: how many there are.
        cache: whether outputs are kept; ``None`` if they are not too many.
    """

    training: Training
    order: Order
    micro: int
    steps: int
    cache: bool | None = None


class TeacherOutputs:
    """A teacher's outputs by sample and step.

    Where the transform draws no random numbers, a sample is the same in all epochs: all samples
    are done before the first step, in batches that depend on nothing else. Where it does, or there
    is one epoch only, each step's are computed in the step and kept for other trainings with the
    same order, such as with another alpha or a resumed one. So they are the same bytes wherever
    they come from.

    Args:
        teach: computes them.
        identity: what they depend on beside the data.
        fields: what there is for each sample.
        course: the training.
    """

    def __init__(
        self, teach: Teach, identity: Mapping[str, Any], fields: Sequence[Field], course: Course
    ):
        self._teach = teach
        self._identity = dict(identity)
        self._fields = {field.name: field for field in fields}
        self._course = course
        order, data = course.order, course.training.data
        self._shared = not data.random and course.steps > order.steps_in_epoch
        pages = 1 if self._shared else ceil(course.steps / order.steps_in_epoch)
        self._bytes = pages * page_bytes(fields, data.samples)
        allowed = self._bytes <= _KEPT_UNASKED if course.cache is None else course.cache
        self._kept = allowed and all(field.row_bytes for field in fields)
        self._computed = self._found = 0
        self._page = lru_cache(maxsize=2)(self._open)

    def prepare(self, inputs: Sequence[str]) -> None:
        """Compute what is the same in all epochs and not there yet.

        Args:
            inputs: names of what the teacher is given.

        Raises:
            CompressorError: data cannot be read, the teacher does not run, or the disk is full.
        """
        course, ranks = self._course, self._course.training.ranks
        if not (self._kept and self._shared):
            return
        page, rows = self._page(_SHARED), course.order.trained
        blocks = [rows[i : i + course.micro] for i in range(0, len(rows), course.micro)]
        own = blocks[ranks.rank :: ranks.size]
        with course.training.stage("teacher outputs", len(own)) as advance:
            for done, block in enumerate(own, 1):
                if page.read(block) is None:
                    batch = course.training.data.batch(block, (course.order.seed,))
                    tensors = as_tensors(batch, len(block))
                    self._compute(block, {name: tensors[name] for name in inputs}, page)
                advance(done)
        ranks.wait()

    def of(self, micro: Micro, inputs: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        """Return what the teacher gives for some samples, on the inputs' device.

        Args:
            micro: the samples.
            inputs: of the teacher.
            step: the step; those from the last on are validations.
        """
        page = self._page(self._page_name(step)) if self._kept else None
        known = page.read(micro.rows) if page is not None else None
        if known is None:
            return self._compute(micro.rows, inputs, page)
        self._found += len(micro.rows)
        device = next(iter(inputs.values())).device
        return {name: torch.from_numpy(array).to(device) for name, array in known.items()}

    def notes(self) -> tuple[str, ...]:
        """Say where the outputs came from, over all processes."""
        gathered = self._course.training.ranks.gathered((self._computed, self._found))
        computed, found = (sum(part) for part in zip(*gathered, strict=True))
        text = f"teacher outputs: {computed:,} samples computed, {found:,} read from the cache"
        if not self._kept:
            return (f"{text}: it is off, {_size(self._bytes)} would be kept",)
        return (f"{text} of {_size(self._bytes)}",)

    def _compute(
        self, rows: Rows, inputs: Mapping[str, Tensor], page: Page | None
    ) -> dict[str, Tensor]:
        found = self._teach(inputs)
        self._computed += len(rows)
        fits = all(tuple(t.shape[1:]) == self._fields[n].shape for n, t in found.items())
        if page is not None and fits:
            arrays: dict[str, Array] = {n: t.cpu().numpy() for n, t in found.items()}
            page.write(rows, arrays)
        return found

    def _page_name(self, step: int) -> str:
        if step >= self._course.steps:
            return _HELD_OUT
        return _SHARED if self._shared else f"epoch {step // self._course.order.steps_in_epoch}"

    def _open(self, name: str) -> Page:
        course, order = self._course, self._course.order
        key: dict[str, Any] = {
            "teacher": self._identity,
            "data": course.training.data.digest,
            "page": name,
            "micro": course.micro,
            "held-out": order.held_out,
            "seed": order.seed,
        }
        if name != _SHARED:  # which rows are computed together, and the transform's numbers
            key |= {"batch": order.batch, "processes": order.parts, "whole": order.whole}
        fields = tuple(self._fields.values())
        return Page(course.training.cache, key, fields, course.training.data.samples)


def fields_of(found: Mapping[str, Tensor]) -> tuple[Field, ...]:
    """Describe what a teacher gave for some samples."""
    return tuple(
        Field(name, tuple(t.shape[1:]), np.dtype(str(t.dtype).removeprefix("torch.")).name)
        for name, t in found.items()
    )


def _size(number: int) -> str:
    """Write a number of bytes for people."""
    size, units = float(number), ["B", "kB", "MB", "GB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"
