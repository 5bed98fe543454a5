"""Turn a decoder's residual stream to its principal components, so that its channels are those.

Ashkboos et al., SliceGPT, 2024 (arXiv:2401.15024): an RMS norm commutes with an orthogonal matrix,
so the basis in which a decoder's residual stream is written is free, and in that of its principal
components the last channels carry least. There each block has a basis of its own, and its shortcut
a matrix to change between two. Here all have one, so the network keeps its class, and nothing is
added to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compressor.errors import DataError, ModelError, SpecError
from compressor.graph.channels.analysis import map_channels
from compressor.passes.prepare.maths.rotation import DenseRotation, principal_components
from compressor.passes.prepare.turned_decoder import (
    LAST_NORM,
    NORMS,
    TABLE,
    Turns,
    is_tied,
    parts_of,
    turned,
)
from compressor.passes.prune.criteria import Scores
from compressor.passes.prune.structured.consumers import Consumer, possible_consumers
from compressor.passes.prune.structured.groups import Choice
from compressor.passes.prune.structured.masking import worst_difference
from compressor.passes.prune.structured.moments import gathered, moment_bytes, portions
from compressor.passes.prune.structured.removal import PROOF_SAMPLES
from compressor.types.carrier import Carrier
from compressor.types.channels import ChannelGroup, ChannelMap, Flags
from compressor.types.data import Samples

_SUBJECT = "criterion principal-components"


@dataclass(frozen=True, eq=False)
class Turned:
    """A decoder whose residual stream is turned.

    Attributes:
        carrier: it computes the same.
        stream: the stream's channels.
        powers: the share of each in the power of what is read from the stream, ``[n]``.
        error: the largest difference of outputs, over their largest value.
    """

    carrier: Carrier
    stream: ChannelGroup
    powers: Scores
    error: float

    def scores(self, groups: Sequence[ChannelGroup], plain: Sequence[Scores]) -> list[Scores]:
        """Return the powers for the stream, and for other groups what they score otherwise."""
        pairs = zip(groups, plain, strict=True)
        return [self.powers if g.name == self.stream.name else other for g, other in pairs]

    def scaled(self, smaller: Carrier, removed: Flags) -> Carrier:
        """Return a smaller decoder whose norms divide by the root mean square of the whole stream.

        What is gone counts in that mean, though it has hardly any power. Without this, all that
        is read from the stream would be smaller. The scales of norms are 1 before; their epsilon
        stays what it is.
        """
        left = int((~removed[self.stream.units]).sum())
        scale = (len(self.stream.units) / left) ** 0.5
        changes = {
            name: torch.full(tensor.shape, scale, dtype=tensor.dtype)
            for name, tensor in smaller.tensors().items()
            if name.endswith((*NORMS, LAST_NORM))
        }
        return smaller.with_weights(changes)

    def note(self, removed: Flags) -> str:
        """Return what turning changed, and what went with some channels, in a sentence."""
        gone = removed[self.stream.units]
        return (
            f"the residual stream was turned to its {len(gone)} principal components, which "
            f"changes outputs by at most {self.error:.1e} of the largest; the {gone.sum()} that "
            f"went had {100 * self.powers[gone].sum():.2g} % of the power of what layers read"
        )


def stream_of(carrier: Carrier, channels: ChannelMap) -> ChannelGroup:
    """Return the channels of a decoder's residual stream.

    Raises:
        SpecError: it cannot be turned.
    """
    try:
        table = parts_of(carrier)[TABLE]
    except SpecError as error:
        remedy = (
            "run the pass rotate on the directory alone (no model.factory) and prune what it "
            "writes, which has an output layer of its own; or choose another criterion"
            if is_tied(carrier)
            else "choose another criterion, such as reconstruction"
        )
        raise SpecError(_SUBJECT, error.problem, remedy) from error
    return next(
        group
        for group in channels.groups
        if len(group.units) == table.shape[1]
        and any(m.parameter == table.weight and m.role == "output" for m in group.members)
    )


def check(carrier: Carrier, choice: Choice) -> None:
    """Check that there is a residual stream that can be turned, and that some of it may go.

    Raises:
        SpecError: there is none, or all of it stays.
    """
    stream = stream_of(carrier, choice.channels)
    reason = choice.reasons.get(choice.channels.groups.index(stream), "")
    if reason:
        raise SpecError(
            _SUBJECT,
            f"is for the residual stream, and all its {len(stream.units)} channels stay: {reason}",
            "let some of them go, or choose another criterion",
        )


def to_components(carrier: Carrier, samples: Samples) -> Turned:
    """Return a decoder in the basis of the principal components of what its layers read.

    What each norm of the stream gives counts alike: it is what the layers behind it multiply.

    Raises:
        SpecError: as :func:`stream_of`.
        DataError: there are no samples.
        ModelError: the turned decoder computes something else.
    """
    stream = stream_of(carrier, map_channels(carrier.graph()))
    width = len(stream.units)
    same = Turns(DenseRotation(torch.eye(width, dtype=torch.float64)))
    folded = turned(carrier, same)  # norms without scales: what layers read is the stream's
    readers: dict[str, Consumer] = {}
    for consumer in possible_consumers(folded, [stream])[0]:
        readers.setdefault(consumer.input, consumer)
    every = list(readers.values())
    total = torch.zeros((width, width), dtype=torch.float64)
    for start, end in portions([moment_bytes(c) for c in every]):
        for sums in gathered(folded, every[start:end], samples.batches).values():
            if not sums.count:
                raise DataError("calibration data", "has no samples", "give at least one batch")
            total += sums.inputs / sums.count
    turn, powers = principal_components(total)
    after = turned(carrier, Turns(turn))
    probe = samples.probe(PROOF_SAMPLES)
    error, limit = worst_difference(*(c.runner().run(probe) for c in (carrier, after)))
    if error > limit:
        raise ModelError(
            _SUBJECT,
            f"cannot be used: with the residual stream turned, outputs differ by {error:.1e} of "
            f"the largest, and the limit is {limit:.0e}",
            "report it with the model; until then choose another criterion",
        )
    return Turned(after, stream, (powers / powers.sum()).numpy(), error)
