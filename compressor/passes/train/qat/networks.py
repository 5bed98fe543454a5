"""The graphs of quantization-aware training, and the weights and values quantized in them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import onnx_ir as ir
import torch
from torch import Tensor

from compressor import catalog
from compressor.errors import SpecError
from compressor.graph.layers import graph_layers
from compressor.graph.operators import operator
from compressor.graph.values import value_by_name
from compressor.models.element_types import tensor_of
from compressor.passes.fuse.absorb import find_target
from compressor.passes.fuse.draft import Draft
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.quantize.maths.affine import absmax_parameters, mse_parameters
from compressor.passes.quantize.maths.pairs import paired_scale
from compressor.passes.quantize.static.settings import StaticSettings
from compressor.passes.quantize.static.writing import input_sources, own_bias
from compressor.passes.train.qat.operators import LEAST_FACTOR
from compressor.types.carrier import Carrier
from compressor.types.layers import Layer, Scheme
from compressor.types.statistics import ChannelGrid, Request

_FOLDED = "set batch-norm: folded"
_LEAST_SHARE = 1e-4  # of a layer's largest scale: what a dead channel's scale is at least


@dataclass(frozen=True)
class Networks:
    """A model before and after batch norms are folded.

    Attributes:
        trained: the graph that is trained; fused except for batch norms that stay.
        folded: the fused graph, which is quantized; the same one if no batch norm stays.
        lowered: the graphs were made from a torch module.
        norms: for layers followed by a batch norm that stays, the name of its node.
        factors: for layers whose weight is trained as it was before something was folded into it,
            what folding multiplied its rows with, ``[rows]``.
    """

    trained: ir.Model
    folded: ir.Model
    lowered: bool
    norms: Mapping[str, str] = field(default_factory=dict)
    factors: Mapping[str, Tensor] = field(default_factory=dict)

    def layers(self) -> dict[str, Layer]:
        """Return the layers of the graph that is trained, by name."""
        return {layer.name: layer for layer in graph_layers(self.trained)}


def make_networks(carrier: Carrier, *, live: bool, evaluate: bool = True) -> Networks:
    """Fuse a model; if ``live``, batch norms stay while it is trained.

    Without ``evaluate``, no weight is computed: only the structure is right.

    Raises:
        SpecError: batch norms are to stay, and none could be folded later.
        ModelError: the graph cannot be fused.
    """
    lowered = carrier.kind == "torch"

    def model(draft: Draft) -> ir.Model:
        return draft.computed() if evaluate else draft.model

    if not live:
        folded = model(Fuse().fused(carrier.graph(), lowered=lowered))
        return Networks(folded, folded, lowered)
    draft = Fuse(batch_norm=False).fused(carrier.graph(), lowered=lowered)
    trained = model(draft)
    folded = model(Fuse().fused(trained, lowered=lowered))
    norms = _norms(draft)
    if not norms:
        raise SpecError("batch-norm", "is live, and no layer is followed by a batch norm", _FOLDED)
    return Networks(trained, folded, lowered, norms)


def with_factors(networks: Networks, carrier: Carrier, names: Collection[str]) -> Networks:
    """Train folded weights at the size that they had before folding.

    Folding multiplies a channel's weights with ``gamma / sigma``, which may be small or large. With
    that factor kept apart, a step of the optimizer moves a weight by as much as it would in the
    network before, so its learning rate suits the folded network, too. No batch norm stays;
    ``names`` are those of the layers that are quantized.
    """
    before = {layer.name: layer for layer in carrier.layers()}
    trained = networks.trained.clone()
    factors = {}
    for name, layer in networks.layers().items():
        old = before.get(name)
        shape = (layer.rows, layer.columns)
        if name not in names or old is None or (old.rows, old.columns) != shape:
            continue
        folded = layer.canonical(_weight(networks.folded, layer)).double()
        factor = folded.norm(dim=1) / old.canonical(carrier.weight(old)).double().norm(dim=1)
        factor = torch.where(factor.isfinite() & (factor > 0), factor, 1.0)
        if torch.allclose(factor, torch.ones_like(factor), rtol=1e-4):
            continue
        factors[name] = factor
        array = layer.stored((folded / factor[:, None]).float()).numpy()
        trained.graph.initializers[layer.weight].const_value = ir.tensor(array, name=layer.weight)
    return replace(networks, trained=trained, factors=factors)


def refolded(networks: Networks, tensors: Mapping[str, Tensor]) -> ir.Model:
    """Return the fused graph with trained initializers by name; other names are ignored."""
    graph = networks.trained.clone()
    factors = {
        layer.weight: (layer, networks.factors[layer.name])
        for layer in networks.layers().values()
        if layer.name in networks.factors
    }
    for name, value in graph.graph.initializers.items():
        if name in tensors and value.const_value is not None:
            tensor = tensors[name].detach().cpu()
            if name in factors:
                layer, factor = factors[name]
                tensor = layer.stored(layer.canonical(tensor) * factor.float()[:, None])
            array = tensor.contiguous().numpy()
            value.const_value = ir.tensor(array, name=name, dtype=value.const_value.dtype)
    if not networks.norms:
        return graph
    return Fuse().fused(graph, lowered=networks.lowered).computed()


def check_factors(networks: Networks) -> None:
    """Check that folding multiplies weights with their batch norm's factor and nothing else.

    Raises:
        SpecError: something else is folded into a layer, too.
    """
    nodes = {node.name: node for node in networks.trained.graph}
    layers, after = networks.layers(), {x.name: x for x in graph_layers(networks.folded)}
    for name, norm in networks.norms.items():
        layer, factor = layers[name], folding_factor(nodes[norm], {})
        before = layer.canonical(_weight(networks.trained, layer)).double()
        folded = after[name].canonical(_weight(networks.folded, after[name])).double()
        expected = before * factor[:, None]
        if not torch.allclose(folded, expected, rtol=1e-3, atol=1e-6 * float(expected.abs().max())):
            raise SpecError(
                f"batch-norm of layer {name!r}",
                "is followed by another factor that is folded with it",
                _FOLDED,
            )


def folding_factor(node: ir.Node, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the factor of rows in folding a batch norm, ``[rows]``, float64; never zero.

    What is not among the trained tensors has its value in the graph.
    """
    gamma, variance, epsilon = norm_factor(node)
    scale, spread = (
        (tensor_of(v) if (tensor := tensors.get(v.name or "")) is None else tensor).detach()
        for v in (gamma, variance)
    )
    factor = scale.cpu().double() / (spread.cpu().double() + epsilon).sqrt()
    return torch.where(factor.abs() < LEAST_FACTOR, LEAST_FACTOR, factor)


def norm_factor(node: ir.Node) -> tuple[ir.Value, ir.Value, float]:
    """Return a batch norm's scale, variance and epsilon."""
    gamma, variance = node.inputs[1], node.inputs[4]
    assert gamma is not None
    assert variance is not None
    return gamma, variance, node.attributes.get_float("epsilon", 1e-5)


def _norms(draft: Draft) -> dict[str, str]:
    """Return the batch norms that can be folded later, by the layer before them."""
    norms: dict[str, str] = {}
    for node in draft.model.graph:
        if not operator(node).running_statistics or node.inputs[0] is None:
            continue
        target = find_target(node.inputs[0], node, 1, draft)
        if target is None or target.obstacle:
            continue
        if target.layer.is_transposed_convolution and target.layer.groups > 1:
            raise SpecError(
                f"layer {target.layer.name!r}",
                "is a transposed convolution with groups, whose batch norm cannot stay",
                _FOLDED,
            )
        norms[target.layer.name] = node.name or ""
    return norms


def _weight(graph: ir.Model, layer: Layer) -> Tensor:
    return tensor_of(graph.graph.initializers[layer.weight])


@dataclass(frozen=True)
class WeightPoint:
    """A weight that is quantized.

    Attributes:
        layer: in the graph that is trained.
        scheme: what its codes mean.
        scale: at the beginning, ``[rows, 1]`` or ``[1, 1]``, of the weight as it will be stored.
        zero_point: likewise.
        grid: the levels of the input's channels, which are folded into the layer, if the input's
            codes are pixels.
        norm: name of the batch norm that is folded into it at the end.
        source: the activation that the layer reads; ``None`` if there is a ``grid``.
        integer_bias: the layer will have a bias in integers at the scale of the product, stored as
            such or made by the runtime.
    """

    layer: Layer
    scheme: Scheme
    scale: Tensor
    zero_point: Tensor
    grid: ChannelGrid | None = None
    norm: str | None = None
    source: str | None = None
    integer_bias: bool = False

    @property
    def scales_folded(self) -> bool:
        """Whether scales are trained without the batch norm's factors, and get them later.

        Rows with a scale each are rounded to the same codes before and after a factor goes into
        both. So the running variances, which move while norms are live, move no range.
        """
        return self.norm is not None and self.scheme.granularity == "channel"

    def column_factors(self) -> Tensor | None:
        """Return the factors that are folded into the columns of the weight in canonical form."""
        if self.grid is None:
            return None
        steps = torch.tensor(self.grid.step, dtype=torch.float64)
        return steps.repeat_interleave(self.layer.columns // len(steps))


@dataclass(frozen=True)
class ActivationPoint:
    """An activation that is quantized, with its scale and zero point at the beginning.

    If it is exact, its codes are the pixels of images, so that nothing is to be learned.
    """

    value: str
    scale: float
    zero_point: int
    scheme: Scheme
    exact: bool

    @property
    def movable(self) -> bool:
        """Whether the zero point may move: it lies inside the range, not at an end of it."""
        return not self.scheme.symmetric and self.scheme.low < self.zero_point < self.scheme.high


@dataclass(frozen=True)
class Points:
    """What is quantized: weights by the layer's name, activations by the value's."""

    weights: Mapping[str, WeightPoint]
    activations: Mapping[str, ActivationPoint]


def find_points(
    networks: Networks,
    settings: StaticSettings,
    statistics: Mapping[str, Any],
    span: Literal["min-max", "mse"],
) -> Points:
    """Return where to quantize, with ranges from calibration and scales from the weights.

    ``statistics`` answer the requests of the decision about the fused graph.

    Raises:
        SpecError: batch norms are to stay, and a value of the fused graph exists only without them.
    """
    changed = settings.decide(networks.folded.clone())
    schemes, grids = changed.schemes, changed.pixel_grids(statistics)
    changed, pixels = changed.with_pixels(statistics, {})
    placement, codes = changed.placement, changed.codes(pixels, statistics)
    present = value_by_name(networks.trained)
    activations = {}
    for name in placement.values:
        if name in present:
            code, scheme = codes[name], changed.value_scheme(name)
            activations[name] = ActivationPoint(
                name, code.scale, code.zero_point, scheme, exact=name in pixels
            )
        elif name not in pixels:
            raise SpecError(
                f"activation {name!r}",
                "exists only once batch norms are folded",
                "set batch-norm: folded",
            )
    find = mse_parameters if span == "mse" else absmax_parameters
    trained, sources = networks.layers(), input_sources(changed.model, placement)
    weights: dict[str, WeightPoint] = {}
    for layer, value in placement.layers:
        if layer.name in weights:
            continue
        matrix = layer.canonical(_weight(changed.model, layer)).to(torch.float32)
        scale, zero = find(matrix, schemes[layer.name])
        scale = paired_scale(matrix, scale, schemes[layer.name])
        bias = own_bias(changed.nodes[layer.name]) if settings.profile.integer_bias else None
        weights[layer.name] = WeightPoint(
            layer=trained[layer.name],
            scheme=schemes[layer.name],
            scale=torch.maximum(scale, scale.max() * _LEAST_SHARE),
            zero_point=zero,
            grid=grids.get(layer.name),
            norm=networks.norms.get(layer.name),
            source=None if layer.name in grids else sources[value].name,
            integer_bias=bias is not None,
        )
    return Points(weights, activations)


def placeholders(requests: Sequence[Request]) -> Mapping[str, Any]:
    """Return statistics of the right form, for planning."""
    return {
        request.key: catalog.load("observer", request.observer)(**request.options).placeholder()
        for request in requests
    }
