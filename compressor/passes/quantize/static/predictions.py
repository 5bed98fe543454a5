"""Predicted times of a quantized network over those of the float model, for plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from compressor.graph.layers import layers_with_nodes
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.static.cuts import Network
from compressor.passes.quantize.static.islands import kernels_of
from compressor.passes.quantize.static.latency import CostModel, typical_shapes
from compressor.passes.quantize.static.placement import Profile, profile_for
from compressor.types.carrier import Carrier
from compressor.types.passes import PassContext


@dataclass(frozen=True)
class Base:
    """What a predicted time is stated over.

    Attributes:
        name: whose time it is, in words.
        floats: the time of the network in floats over that, by kind of CPU; 1 where it is missing.
    """

    name: str = "the float model's"
    floats: Mapping[str, float] = field(default_factory=dict)

    def times(self, ratios: Mapping[str, float]) -> str:
        """Return times as words.

        Args:
            ratios: the network's predicted time over its own in floats, by kind of CPU.
        """
        return " and ".join(
            f"{ratio * self.floats.get(cpu, 1.0):.2f} x on CPUs {cpu}"
            for cpu, ratio in ratios.items()
        )


def base_of(carrier: Carrier, context: PassContext) -> Base:
    """Return what predicted times of a model are stated over: the float model's, where known.

    Earlier passes may have made the float model another, such as a narrower one. Both are fused, as
    ONNX Runtime fuses what it opens. No weight is read.
    """
    source, profile = context.source, profile_for(context.targets)
    if source is None or not profile.latencies or _sizes(source) == _sizes(carrier):
        return Base()
    ours, theirs = (_float_times(each, profile, context) for each in (carrier, source))
    if not ours or not all(theirs):
        return Base("its own in floats")
    pairs = zip(profile.latencies, ours, theirs, strict=True)
    return Base(floats={facts.title: own / whole for facts, own, whole in pairs})


def _sizes(carrier: Carrier) -> list[tuple[int, ...]]:
    return sorted(layer.shape for layer in carrier.layers())


def _float_times(carrier: Carrier, profile: Profile, context: PassContext) -> Sequence[float]:
    """Return a model's nanoseconds on each kind of CPU; nothing if a layer's size is unknown."""
    model = Fuse().surveyed(carrier).model
    layers = {node: layer for layer, node in layers_with_nodes(model)}
    shapes = typical_shapes(model, context.shapes)
    if any(node.outputs[0].name not in shapes for node in layers):
        return ()
    kernels = kernels_of(model, profile, layers, [layer.name for layer in layers.values()])
    costs = [CostModel(facts, shapes) for facts in profile.latencies]
    return Network(model.graph, kernels, costs).floating
