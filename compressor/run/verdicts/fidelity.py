"""Whether an artifact computes what the model does that it was exported from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compressor.errors import ArtifactError
from compressor.graph.output_parts import WHOLE, OutputParts, cut_parts
from compressor.run.evaluate import CachingRunner, largest_gap, outputs_of
from compressor.run.metrics.judged import check_finite
from compressor.run.noise.signals import OutputSums
from compressor.run.verdicts.verdicts import agreement, same_function
from compressor.types.tensors import Array, Batch, TensorSpec, filled, samples_in


@dataclass(frozen=True)
class Trio:
    """An artifact, the model it was exported from (its source), and the float model.

    Attributes:
        name: the artifact's file name.
        declared: what the source says of its outputs.
        parts: what each output is joined of, as :class:`OutputSums` takes it, if that is known.
    """

    name: str
    artifact: CachingRunner
    source: CachingRunner
    float_model: CachingRunner
    declared: Sequence[TensorSpec]
    parts: OutputParts = ()

    def compare(self, batches: Sequence[Batch], size: int) -> dict[str, Any]:
        """Compare their outputs, and close them.

        Where data decide how many rows an output has (boxes, say), rows that only one of two
        models has are compared with zeros.

        Args:
            size: how many samples run at a time.

        Returns:
            The largest difference from the float model (``max_abs_diff``), whether all outputs
            are ``equal`` to the source's but for the rounding of float32, their signal over their
            difference from the source's (``sqnr_db``), and the entry that :func:`agreement` returns
            (``check``).

        Raises:
            ArtifactError: the artifact's outputs have other shapes than the source declares.
            DataError: they are NaN or infinite.
        """
        written, compressed = OutputSums(self.parts), OutputSums(self.parts)
        cuts = [each or WHOLE for each in self.parts]
        worst, equal, numbers, seen = 0.0, True, False, 0
        errors: list[Array] = []
        for batch in batches:
            named = outputs_of(self.artifact, batch, size)
            check_finite(named, seen, samples_in(batch))
            seen += samples_in(batch)
            sources = list(outputs_of(self.source, batch, size).values())
            self._check_shapes(list(named.values()), sources)
            floats = outputs_of(self.float_model, batch, size).values()
            equal = equal and all(map(np.array_equal, named.values(), sources))
            numbers = numbers or any(a.dtype.kind == "f" for a in sources)
            alike = map(filled, named.values(), sources, floats)
            whole = tuple(zip(*alike, strict=True))
            written.add(whole[1], whole[0])
            compressed.add(whole[2], whole[1])
            outputs, source, base = (cut_parts(each, cuts) for each in whole)
            rows = [_errors(part, base, samples_in(batch)) for part in (outputs, source)]
            errors.append(np.stack(rows, axis=1))
            worst = max(worst, *map(largest_gap, outputs, base))
        for runner in (self.artifact, self.source, self.float_model):
            runner.close()  # timing opens others
        near = written.sqnr_db
        return {
            "max_abs_diff": worst,
            # Labels alone hide by how much they were missed.
            "sqnr_db": near,
            "equal": numbers and (equal or (near is not None and same_function(near))),
            "check": agreement(
                written.sqnr_db, compressed.sqnr_db, np.concatenate(errors) @ compressed.weights
            ),
        }

    def _check_shapes(self, outputs: Sequence[Array], source: Sequence[Array]) -> None:
        have, want = [list(o.shape) for o in outputs], [list(s.shape) for s in source]
        if len(have) == len(want) and all(
            a.ndim == b.ndim and (spec.mismatch(a.shape, spec.dtype) is None or a.shape == b.shape)
            for a, b, spec in zip(outputs, source, self.declared, strict=True)
        ):
            return
        raise ArtifactError(
            f"artifact {self.name!r}",
            f"returns outputs of shape {have}, but the model it was exported from {want}",
            "report it, with the spec; leave out this export until then",
        )


def _errors(outputs: Sequence[Array], reference: Sequence[Array], samples: int) -> Array:
    """Return the sums of squared differences, ``[N, parts]``.

    ``N`` is 1 where an output has no axis of samples.
    """
    rows = samples if all(a.ndim and len(a) == samples for a in outputs) else 1
    pairs = zip(outputs, reference, strict=True)
    squares = [
        np.square(have.astype(np.float64) - wanted).reshape(rows, -1) for have, wanted in pairs
    ]
    return np.stack([square.sum(axis=1) for square in squares], axis=1)
