"""The graphs of quantization-aware training: the one that is trained, and what is made of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir
import torch

from compressor.errors import SpecError
from compressor.graph.layers import graph_layers
from compressor.graph.values import is_op
from compressor.models.executor import from_numpy
from compressor.models.executor.training import LEAST_FACTOR
from compressor.passes.fuse.draft import Draft
from compressor.passes.fuse.fuse import Fuse
from compressor.passes.fuse.target import find_target
from compressor.types.carrier import Carrier
from compressor.types.layers import Layer

_FOLDED = "set batch-norm: folded"


@dataclass(frozen=True)
class Networks:
    """A model before and after batch norms are folded.

    Attributes:
        trained: the graph that is trained; fused but for batch norms that stay.
        folded: the fused graph, which is quantized; the same one where none stay.
        lowered: the graphs were made from a torch module.
        norms: names of the layers behind which a batch norm stays, with the name of its node.
        factors: for layers whose weight is trained as it was before something was folded into it,
            what folding multiplied its rows with, ``[rows]``.
    """

    trained: ir.Model
    folded: ir.Model
    lowered: bool
    norms: Mapping[str, str] = field(default_factory=dict)
    factors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def layers(self) -> dict[str, Layer]:
        """Return the layers of the graph that is trained, by name."""
        return {layer.name: layer for layer in graph_layers(self.trained)}


def make_networks(carrier: Carrier, *, live: bool, evaluate: bool = True) -> Networks:
    """Fuse a model.

    Args:
        carrier: the model.
        live: batch norms stay while it is trained.
        evaluate: compute weights; otherwise only the structure is right.

    Raises:
        SpecError: batch norms are to stay, and there is none that could be folded later.
        ModelError: the graph cannot be fused.
    """
    lowered = carrier.kind == "torch"
    if not live:
        folded = Fuse().fused(carrier.graph(), lowered=lowered, evaluate=evaluate).model
        return Networks(folded, folded, lowered)
    trained = Fuse(batch_norm=False).fused(carrier.graph(), lowered=lowered, evaluate=evaluate)
    folded = Fuse().fused(trained.model, lowered=lowered, evaluate=evaluate).model
    found = Networks(trained.model, folded, lowered, _norms(trained))
    if not found.norms:
        raise SpecError("batch-norm", "is live, and no layer is followed by a batch norm", _FOLDED)
    return found


def with_factors(networks: Networks, carrier: Carrier, names: Collection[str]) -> Networks:
    """Let folded weights be trained as multiples of what was folded into them.

    A step of the optimizer then moves a weight by as much as it would in the network before, whose
    recipe is thereby the right one here, too. Folding multiplies a channel's weights with
    ``gamma / sigma``, which may be small or large.

    Args:
        networks: without batch norms that stay.
        carrier: the model before.
        names: layers that are quantized.
    """
    before = {layer.name: layer for layer in carrier.layers()}
    trained = networks.trained.clone()
    factors = {}
    for name, layer in networks.layers().items():
        old = before.get(name)
        if (
            name not in names
            or old is None
            or (old.rows, old.columns)
            != (
                layer.rows,
                layer.columns,
            )
        ):
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


def refolded(networks: Networks, tensors: Mapping[str, torch.Tensor]) -> ir.Model:
    """Return the fused graph with tensors that were trained.

    Args:
        networks: what was trained.
        tensors: initializers of the trained graph by name; other names are passed over.
    """
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
    return Fuse().fused(graph, lowered=networks.lowered).model


def check_factors(networks: Networks) -> None:
    """Check that folding multiplies weights with their batch norm's factor and nothing else.

    Raises:
        SpecError: something else is folded into a layer, too.
    """
    nodes = {node.name: node for node in networks.trained.graph}
    after = {layer.name: layer for layer in graph_layers(networks.folded)}
    for name, norm in networks.norms.items():
        layer, factor = networks.layers()[name], folding_factor(nodes[norm], {})
        before = layer.canonical(_weight(networks.trained, layer)).double()
        folded = after[name].canonical(_weight(networks.folded, after[name])).double()
        wanted = before * factor[:, None]
        if not torch.allclose(folded, wanted, rtol=1e-3, atol=1e-6 * float(wanted.abs().max())):
            raise SpecError(
                f"batch-norm of layer {name!r}",
                "is followed by another factor that is folded with it",
                _FOLDED,
            )


def folding_factor(node: ir.Node, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return what folding a batch norm multiplies rows with, ``[rows]``, float64; never zero.

    Args:
        node: the batch norm.
        tensors: what was trained, by name; what is not among them has the value of the graph.
    """
    gamma, variance, epsilon = norm_factor(node)
    found = [tensors.get(v.name or "") for v in (gamma, variance)]
    known = [_read(v) if t is None else t for v, t in zip((gamma, variance), found, strict=True)]
    scale, spread = (t.detach().cpu().double() for t in known)
    factor = scale / (spread + epsilon).sqrt()
    return torch.where(factor.abs() < LEAST_FACTOR, LEAST_FACTOR, factor)


def norm_factor(node: ir.Node) -> tuple[ir.Value, ir.Value, float]:
    """Return a batch norm's scale, variance and epsilon."""
    gamma, variance = node.inputs[1], node.inputs[4]
    assert gamma is not None
    assert variance is not None
    return gamma, variance, node.attributes.get_float("epsilon", 1e-5)


def _norms(draft: Draft) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in draft.model.graph:
        if not is_op(node, "BatchNormalization") or node.inputs[0] is None:
            continue
        target = find_target(node.inputs[0], node, 1, draft)
        if target is None or not target.weight_is_own:
            continue
        if target.layer.kind == "ConvTranspose" and target.layer.groups > 1:
            raise SpecError(
                f"layer {target.layer.name!r}",
                "is a transposed convolution with groups, whose batch norm cannot stay",
                _FOLDED,
            )
        found[target.layer.name] = node.name or ""
    return found


def _weight(graph: ir.Model, layer: Layer) -> torch.Tensor:
    return _read(graph.graph.initializers[layer.weight])


def _read(value: ir.Value) -> torch.Tensor:
    assert value.const_value is not None
    return from_numpy(value.const_value)
