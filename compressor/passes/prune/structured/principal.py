"""Turn a residual stream to its principal components, so that its channels are those.

Ashkboos et al., SliceGPT, 2024 (arXiv:2401.15024): an RMS norm commutes with an orthogonal matrix,
so the basis in which a residual stream is written is free, and in that of its principal components
the last channels carry least. There each block has a basis of its own, and its shortcut a matrix to
change between two. Here all have one, so the network keeps its class, and nothing is added to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from compressor.errors import DataError, ModelError, SpecError
from compressor.graph.channels.analysis import map_channels
from compressor.passes.prepare.maths.rotation import DenseRotation, principal_components
from compressor.passes.prepare.rotated_decoder import (
    FAMILIES,
    LAST_NORM,
    NORMS,
    TABLE,
    Rotations,
    is_tied,
    model_type,
    parts_of,
    rotated,
)
from compressor.passes.prune.criteria import Scores
from compressor.passes.prune.structured.consumers import Consumer, possible_consumers
from compressor.passes.prune.structured.groups import Choice
from compressor.passes.prune.structured.layer_norm_stream import SUBJECT, layer_norm_stream
from compressor.passes.prune.structured.moments import gathered, moment_bytes, portions
from compressor.passes.prune.structured.removal import PROOF_SAMPLES
from compressor.types.carrier import Carrier
from compressor.types.channels import ChannelGroup, ChannelMap, Flags
from compressor.types.data import Samples
from compressor.types.tensors import samples_in, worst_difference


class Stream(Protocol):
    """A residual stream whose basis is free."""

    @property
    def group(self) -> ChannelGroup:
        """Its channels."""

    def turned(self, carrier: Carrier, turn: DenseRotation) -> Carrier:
        """Return a network that computes the same with its stream turned, norms without scales."""

    def components(self, moment: Tensor) -> tuple[DenseRotation, Tensor]:
        """Return the turn to principal components, and each channel's share of the power then."""

    def restored(
        self, whole: Carrier, smaller: Carrier, channels: ChannelMap, removed: Flags
    ) -> dict[str, Tensor]:
        """Return what makes up for norms that see fewer channels, by name.

        Args:
            whole: turned, before channels were removed.
            smaller: after that.
            channels: of ``whole``.
        """


@dataclass(frozen=True, eq=False)
class RmsStream:
    """The stream of a decoder with RMS norms."""

    group: ChannelGroup

    def turned(self, carrier: Carrier, turn: DenseRotation) -> Carrier:
        """Return a decoder that computes the same; the scales of norms go into what reads them."""
        return rotated(carrier, Rotations(turn))

    def components(self, moment: Tensor) -> tuple[DenseRotation, Tensor]:
        """Return the turn to principal components, and each channel's share of the power then."""
        turn, powers = principal_components(moment)
        return turn, powers / powers.sum()

    def restored(
        self, whole: Carrier, smaller: Carrier, channels: ChannelMap, removed: Flags
    ) -> dict[str, Tensor]:
        """Return scales with which norms divide by the root mean square of the whole stream.

        What is gone counts in that mean, though it has hardly any power. Without this, all that
        is read from the stream would be smaller. The scales of norms are 1 before; their epsilon
        stays what it is.
        """
        left = int((~removed[self.group.units]).sum())
        scale = (len(self.group.units) / left) ** 0.5
        return {
            name: torch.full(tensor.shape, scale, dtype=tensor.dtype)
            for name, tensor in smaller.tensors().items()
            if name.endswith((*NORMS, LAST_NORM))
        }


@dataclass(frozen=True, eq=False)
class Turned:
    """A network whose residual stream is turned.

    Attributes:
        carrier: it computes the same.
        stream: the stream.
        powers: the share of each channel in the power of what is read from the stream, ``[n]``.
        error: the largest difference of outputs, over their largest value.
    """

    carrier: Carrier
    stream: Stream
    powers: Scores
    error: float

    def scores(self, groups: Sequence[ChannelGroup], plain: Sequence[Scores]) -> list[Scores]:
        """Return the powers for the stream, and for other groups what they score otherwise."""
        pairs = zip(groups, plain, strict=True)
        return [self.powers if g.name == self.stream.group.name else other for g, other in pairs]

    def restored(self, smaller: Carrier, channels: ChannelMap, removed: Flags) -> Carrier:
        """Return a smaller network whose norms divide as they did; see :class:`Stream`."""
        changes = self.stream.restored(self.carrier, smaller, channels, removed)
        return smaller.with_weights(changes)

    def note(self, removed: Flags) -> str:
        """Return what turning changed, and what went with some channels, in a sentence."""
        gone = removed[self.stream.group.units]
        return (
            f"the residual stream was turned to its {len(gone)} principal components, which "
            f"changes outputs by at most {self.error:.1e} of the largest; the {gone.sum()} that "
            f"went had {100 * self.powers[gone].sum():.2g} % of the power of what layers read"
        )


def stream_of(carrier: Carrier, channels: ChannelMap) -> Stream:
    """Return the residual stream of a network.

    Raises:
        SpecError: there is none that can be turned.
    """
    if (found := layer_norm_stream(carrier)) is not None:
        return found
    if (kind := model_type(carrier)) not in FAMILIES:
        raise SpecError(
            SUBJECT,
            f"knows no residual stream in a model of type {kind!r}, only in networks with layer "
            f"norms before their blocks, and in directories of {', '.join(FAMILIES)}",
            "choose another criterion, such as reconstruction",
        )
    try:
        table = parts_of(carrier)[TABLE]
    except SpecError as error:
        remedy = (
            "run the pass rotate on the directory without model.factory, and prune its result, "
            "which has a separate output layer; or choose another criterion"
            if is_tied(carrier)
            else "choose another criterion, such as reconstruction"
        )
        raise SpecError(SUBJECT, error.problem, remedy) from error
    return RmsStream(
        next(
            group
            for group in channels.groups
            if len(group.units) == table.shape[1]
            and any(m.parameter == table.weight and m.role == "output" for m in group.members)
        )
    )


def check(carrier: Carrier, choice: Choice) -> None:
    """Check that there is a residual stream that can be turned, and that some of it may go.

    Raises:
        SpecError: there is none, or all of it stays.
    """
    stream = stream_of(carrier, choice.channels).group
    places = enumerate(choice.channels.groups)
    place = next(i for i, group in places if np.array_equal(group.units, stream.units))
    reason = choice.reasons.get(place, "")
    if reason:
        raise SpecError(
            SUBJECT,
            f"is for the residual stream, and all its {len(stream.units)} channels stay: {reason}",
            "let some of them go, or choose another criterion",
        )


def to_components(carrier: Carrier, samples: Samples) -> Turned:
    """Return a network in the basis of the principal components of what its layers read.

    What each norm of the stream gives counts alike: it is what the layers behind it multiply.

    Raises:
        SpecError: as :func:`stream_of`.
        DataError: there are no samples.
        ModelError: the turned network computes something else.
    """
    stream = stream_of(carrier, map_channels(carrier.graph()))
    width = len(stream.group.units)
    same = DenseRotation(torch.eye(width, dtype=torch.float64))
    folded = stream.turned(carrier, same)  # norms without scales: what layers read is the stream's
    readers: dict[str, Consumer] = {}
    for consumer in possible_consumers(folded, [stream.group])[0]:
        readers.setdefault(consumer.input, consumer)
    every = list(readers.values())
    total = torch.zeros((width, width), dtype=torch.float64)
    count = sum(map(samples_in, samples.batches()))
    for start, end in portions([moment_bytes(c) for c in every]):
        for sums in gathered(folded, every[start:end], samples.batches, count).values():
            if not sums.count:
                raise DataError("calibration data", "has no samples", "give at least one batch")
            total += sums.inputs / sums.count
    turn, shares = stream.components(total)
    after = stream.turned(carrier, turn)
    probe = samples.probe(PROOF_SAMPLES)
    error, limit = worst_difference(*(c.runner().run(probe) for c in (carrier, after)))
    if error > limit:
        raise ModelError(
            SUBJECT,
            f"cannot be used: with the residual stream turned, outputs differ by {error:.1e} of "
            f"the largest, and the limit is {limit:.0e}",
            "report it with the model; until then choose another criterion",
        )
    return Turned(after, stream, shares.numpy(), error)
