"""Take units and residual blocks away, and prove that nothing else changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property

import numpy as np
import onnx_ir as ir
from torch import nn

from compressor.errors import ModelError, listed
from compressor.graph.channels.analysis import Analysis
from compressor.graph.channels.slicing import Kept, remove_channels
from compressor.graph.costs import Sample, size_notes
from compressor.graph.output_parts import named_parts, output_parts
from compressor.graph.residuals import ResidualBlock, drop_blocks, gated
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.matching import held_tensors
from compressor.passes.prune.batch_statistics import with_batch_statistics
from compressor.passes.prune.structured import masking
from compressor.passes.prune.structured.segments import Variant
from compressor.types.carrier import Carrier
from compressor.types.channels import ChannelMap, Flags, Units
from compressor.types.data import Samples
from compressor.types.tensors import Batch, worst_difference

PROOF_SAMPLES = 4
_NO_CHANGES: Batch = {}


class GatedModel:
    """A model that runs with any units zeroed and any branches multiplied by zero.

    Args:
        statistics: normalize each batch by its own statistics, as if they were estimated anew.
        others: names of further parameters that a run can be given.
    """

    def __init__(
        self,
        carrier: Carrier,
        channels: ChannelMap,
        blocks: Sequence[ResidualBlock],
        *,
        statistics: bool = False,
        others: Collection[str] = (),
    ):
        graph, self._gates = gated(carrier.graph(), blocks)
        if statistics:
            graph = with_batch_statistics(graph)
        types = {value.name: value.dtype for value in graph.graph.inputs}
        self._types = [t.numpy() if (t := types[name]) else np.float32 for name in self._gates]
        self._model = masking.MaskedModel(carrier.with_graph(graph), channels, others)

    @property
    def unfed(self) -> str:
        """Why its units cannot be zeroed; empty if they can."""
        return self._model.unfed

    def run(self, batch: Batch, variant: Variant, changes: Batch = _NO_CHANGES) -> Batch:
        """Run one batch without what a variant takes away, and with other parameters."""
        return self._model.run({**batch, **self._opened(variant)}, variant.removed, changes)

    def run_in_doubles(self, batch: Batch, variant: Variant) -> Batch:
        """Do the same in double precision."""
        return self._model.run_in_doubles({**batch, **self._opened(variant)}, variant.removed)

    def _opened(self, variant: Variant) -> Batch:
        gates = zip(self._gates, self._types, strict=True)
        return {n: np.asarray(i not in variant.dropped, t) for i, (n, t) in enumerate(gates)}


class Removal:
    """Removes from one model.

    Args:
        blocks: residual blocks, which variants drop by their numbers.
        sample: shapes of inputs, for which work is counted.
    """

    def __init__(
        self,
        carrier: Carrier,
        analysis: Analysis,
        blocks: Sequence[ResidualBlock],
        sample: Sample,
    ):
        self._carrier, self._analysis, self._blocks = carrier, analysis, blocks
        self._sample = sample

    @cached_property
    def masked(self) -> GatedModel:
        """The model with zeros in place of what is removed."""
        return GatedModel(self._carrier, self._analysis.channels, self._blocks)

    def zeroed(self, batches: Sequence[Batch]) -> Callable[[Flags], list[Batch]]:
        """Return what gives the outputs of batches with units zeroed."""
        parts = output_parts(self._carrier.graph())
        return lambda flags: [
            named_parts(self.masked.run(batch, Variant(flags)), parts) for batch in batches
        ]

    def smaller(self, variant: Variant) -> tuple[ir.Model, Kept]:
        """Return the graph without a variant's units and blocks, and what remains of parameters."""
        graph = self._carrier.graph()
        smaller, kept = remove_channels(graph, self._analysis, variant.removed)
        return self._without_blocks(smaller, variant), kept

    def _without_blocks(self, model: ir.Model, variant: Variant) -> ir.Model:
        return drop_blocks(model, [self._blocks[i] for i in sorted(variant.dropped)])

    def became(self, after: Carrier, kept: Kept, *, dropped: bool) -> list[str]:
        """Describe what the model has become; ``dropped`` says that residual blocks are gone."""
        notes = _became_notes(self._carrier, after, dropped=dropped)
        rebuilt = [isinstance(c, TorchCarrier) and c.executes_graph for c in (self._carrier, after)]
        if rebuilt == [False, True] and not dropped:
            notes.append(self._why_rebuilt(after, kept))
        return [*notes, *size_notes(self._carrier, after, self._sample)]

    def _why_rebuilt(self, after: Carrier, kept: Kept) -> str:
        """Return why a module that executes the graph takes the place of the user's."""
        if rigid := _rigid_attention(self._carrier, after):
            return (
                "the heads of PyTorch's MultiheadAttention together are as wide as its inputs, "
                f"which stay at {listed(rigid)}: a module that executes the graph takes the place "
                f"of all. A rule that skips '{rigid[0]}.*' keeps its heads, so that the module may "
                "stay"
            )
        if computed := self._computed_weights(kept):
            return (
                f"the weights of {listed(computed)} are computed from other tensors: a module that "
                "executes the graph takes its place. Remove parametrizations first, and the module "
                "may stay (torch.nn.utils.parametrize.remove_parametrizations; "
                "remove_spectral_norm)"
            )
        for name in sorted(kept):
            if layers := self._bound_layers(name, kept[name]):
                match = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", layers[0])
                return (
                    f"forward computes numbers for the outputs of {layers[0]!r}, other ones for "
                    "each channel or head, and would compute those of fewer in a smaller module: a "
                    "module that executes the graph takes its place. A rule that skips "
                    f"{match!r} keeps them, so that the module may stay"
                )
        return (
            "no sizes of the module make it compute what its graph does, such as where its "
            "forward has sizes written into it or computes weights of its parameters: a module "
            "that executes the graph takes its place"
        )

    def _computed_weights(self, kept: Kept) -> list[str]:
        """Return the layers that have lost units of a weight that is no tensor of the module."""
        assert isinstance(self._carrier, TorchCarrier)
        held = held_tensors(self._carrier.module)
        layers = self._carrier.layers()
        return [x.name for x in layers if x.weight in kept and x.weight not in held]

    def _bound_layers(self, name: str, kept: Mapping[int, Units]) -> list[str]:
        """Return the layers that write the units of a constant that forward computes.

        None where it is a tensor of the module, or its positions are alike.
        """
        assert isinstance(self._carrier, TorchCarrier)
        stored = self._carrier.graph().graph.initializers[name].const_value
        if name in held_tensors(self._carrier.module) or stored is None:
            return []
        values = stored.numpy()
        alike = [(values == values.take([0], axis)).all() for axis in kept]
        if all(alike):
            return []
        beside = {
            member.parameter
            for group in self._analysis.channels.groups
            if any(member.parameter == name for member in group.members)
            for member in group.members
            if member.role == "output"
        }
        return [x.name for x in self._carrier.layers() if x.weight in beside]

    def proof(self, variant: Variant, smaller: ir.Model, samples: Samples | None) -> list[str]:
        """Compare the smaller model with the masked one; return what was found, in sentences.

        Raises:
            ModelError: they are not the same function.
        """
        if samples is None:
            return ["no removal was proved: the model was not run"]
        if self.masked.unfed:
            return [f"no removal was proved: {self.masked.unfed}"]
        batch = samples.probe(PROOF_SAMPLES)
        notes = [self._blocks_proof(batch, variant)] if variant.dropped else []

        def sliced(flags: Flags) -> ir.Model:
            if (flags == variant.removed).all():
                return smaller
            return self.smaller(Variant(flags, variant.dropped))[0]

        def compared(flags: Flags) -> tuple[Batch, Batch]:
            runner = self._carrier.with_graph(sliced(flags)).runner()
            return self.masked.run(batch, Variant(flags, variant.dropped)), runner.run(batch)

        def exactly(flags: Flags) -> tuple[Batch, Batch]:
            masked = self.masked.run_in_doubles(batch, Variant(flags, variant.dropped))
            return masked, masking.in_doubles(sliced(flags), batch)

        if variant.removed.any() or not notes:
            proof = masking.prove(compared, exactly, self._analysis.channels, variant.removed)
            notes.append(proof.note(samples.made_up))
        return notes

    def _blocks_proof(self, batch: Batch, variant: Variant) -> str:
        """Compare the model without its blocks with the one whose branches give zeros."""
        only = Variant(np.zeros_like(variant.removed), variant.dropped)
        without = self._carrier.with_graph(self._without_blocks(self._carrier.graph(), variant))
        outputs = without.runner().run(batch)
        error, limit = worst_difference(self.masked.run(batch, only), outputs)
        if error > limit:
            raise ModelError(
                f"block {self._blocks[min(variant.dropped)].name!r} and others",
                f"cannot be dropped: the outputs without them differ by {error:.1e} of the largest "
                f"from those with zeros in their place, and the limit is {limit:.0e}",
                "report it with the model; until then set drop-blocks: false",
            )
        blocks = "block was" if len(variant.dropped) == 1 else "blocks were"
        return (
            f"{len(variant.dropped)} dropped {blocks} proved: the smaller model differs by at most "
            f"{error:.1e} of the largest output from the one whose branches return zeros"
        )


def _rigid_attention(before: Carrier, after: Carrier) -> list[str]:
    """Return the paths of PyTorch's attention that lost heads while its inputs lost nothing."""
    assert isinstance(before, TorchCarrier)
    left = {name: tensor.shape for name, tensor in after.tensors().items()}
    widths = {
        path: (part.embed_dim, left.get(f"{path}.out_proj.weight"))
        for path, part in before.module.named_modules()
        if isinstance(part, nn.MultiheadAttention)
    }
    return [
        path for path, (width, shape) in widths.items() if shape and shape[1] < shape[0] == width
    ]


def _became_notes(before: Carrier, after: Carrier, *, dropped: bool) -> list[str]:
    if after.kind != before.kind:
        return [
            "no sizes of the module make it compute what its graph does: the graph takes its "
            "place, and cannot be trained"
        ]
    rebuilt = [isinstance(c, TorchCarrier) and c.executes_graph for c in (before, after)]
    if rebuilt == [False, True] and dropped:
        return [
            "the module still has the blocks that were dropped: a module that executes the graph "
            "takes its place"
        ]
    return []
