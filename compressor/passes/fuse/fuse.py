"""The pass ``fuse``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import onnx_ir as ir
from pydantic import Field

from compressor.graph.layers import graph_layers
from compressor.graph.values import all_nodes, is_op
from compressor.passes.fuse import pipeline
from compressor.passes.fuse.draft import Draft
from compressor.types.carrier import Capability, Carrier
from compressor.types.layers import Layer
from compressor.types.passes import (
    LayerOutcome,
    LayerPlan,
    Outcome,
    Pass,
    PassContext,
    Survey,
)

_NOTHING = "nothing to fuse: the graph is in its final form already"


class Fuse(Pass):
    """Fewer, larger operators that compute the same.

    Batch-norm and constant factors are folded into the layers before them, constant expressions
    are computed, shape arithmetic, identities and dead code go away, and functions that were
    written out become the standard operators that runtimes have kernels for. Layer names,
    inputs, outputs and dynamic axes stay. No operator is used that the model's opset lacks, and
    none of a private domain.
    """

    name: ClassVar[str] = "fuse"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.GRAPH})
    source: ClassVar[str] = (
        "B. Jacob et al., Quantization and Training of Neural Networks for Efficient "
        "Integer-Arithmetic-Only Inference, 2018, section 3.2 (batch-norm folding)"
    )

    batch_norm: bool = Field(
        default=True,
        description="fold batch-norm into the convolution or linear layer before it",
    )
    affine: bool = Field(
        default=True,
        description="fold multiplications by and additions of constants into the layer before",
    )
    constants: bool = Field(
        default=True,
        description="compute constant expressions and shapes; drop redundant reshapes, "
        "transposes, slices and casts",
    )
    patterns: bool = Field(
        default=True,
        description="recognise GELU, layer normalization, hard-swish, global pooling, clips and "
        "attention that were written out",
    )

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:  # noqa: ARG002
        """Say which layers take something over; weights are not read."""
        draft = self._run(carrier, evaluate=False)
        layers = tuple(_plan(layer, draft) for layer in graph_layers(carrier.graph()))
        return Survey(layers, notes=_notes(carrier, draft))

    def apply(
        self,
        carrier: Carrier,
        context: PassContext,  # noqa: ARG002
        statistics: Mapping[str, Any],  # noqa: ARG002
    ) -> Outcome:
        """Fuse a copy of the graph.

        Raises:
            ModelError: a batch-norm's variance is not positive.
        """
        draft = self._run(carrier, evaluate=True)
        layers = tuple(
            LayerOutcome(layer.name, layer.dtype, details={"fused": draft.actions[layer.name]})
            for layer in graph_layers(draft.model)
            if layer.name in draft.actions
        )
        notes = _notes(carrier, draft)
        return Outcome(carrier.with_graph(draft.model), layers, notes)

    def fused(self, graph: ir.Model, *, lowered: bool, evaluate: bool = True) -> Draft:
        """Fuse a copy of a graph.

        Args:
            graph: the model; not changed.
            lowered: it was made from a torch module.
            evaluate: compute new weights; otherwise they are computed when they are read.

        Raises:
            ModelError: a batch-norm's variance is not positive.
        """
        draft = Draft(graph.clone(), lowered=lowered, evaluate=evaluate)
        choice = pipeline.Choice(
            constants=self.constants,
            batch_norm=self.batch_norm,
            affine=self.affine,
            patterns=self.patterns,
        )
        pipeline.run(draft, choice)
        return draft

    def _run(self, carrier: Carrier, *, evaluate: bool) -> Draft:
        return self.fused(carrier.graph(), lowered=carrier.kind == "torch", evaluate=evaluate)


def _plan(layer: Layer, draft: Draft) -> LayerPlan:
    actions = draft.actions.get(layer.name)
    if actions:
        return LayerPlan(layer.name, "; ".join(actions))
    reason = draft.reasons.get(layer.name, "nothing to fold into it")
    return LayerPlan(layer.name, "keep", reason, touched=False)


def _notes(carrier: Carrier, draft: Draft) -> tuple[str, ...]:
    before, after = pipeline.op_count(carrier.graph()), pipeline.op_count(draft.model)
    if before == after and not draft.actions and not draft.counts:
        notes = [_NOTHING]
    else:
        notes = [f"{before} operators became {after}"]
    left = sum(is_op(n, "BatchNormalization") for n in all_nodes(draft.model.graph))
    if left:
        many = "batch-norm stays" if left == 1 else "batch-norms stay"
        notes.append(f"{left} {many}: before it is no layer that could take it over")
    return tuple(notes)
