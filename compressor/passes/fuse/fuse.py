"""``fuse``: the pass, and the order in which its rules are applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import onnx_ir as ir
from onnx_ir import passes as ir_passes
from pydantic import Field

from compressor.graph.layers import graph_layers
from compressor.graph.operators import operator
from compressor.graph.values import all_nodes
from compressor.passes.fuse import classes, detours, rows, shapes, simplify, states
from compressor.passes.fuse.absorb import fold_affine, fold_batch_norm
from compressor.passes.fuse.ahead import fold_ahead
from compressor.passes.fuse.draft import Draft, Rule, unsimplified
from compressor.passes.fuse.einsums import einsum_to_matmul
from compressor.passes.fuse.patterns import (
    drop_neutral,
    gelu,
    layer_norm,
    matmul_to_gemm,
    mean_to_pool,
    merge_clips,
    scale_queries,
    unguard,
)
from compressor.types.carrier import Capability, Carrier
from compressor.types.layers import Layer
from compressor.types.passes import GraphPass, LayerOutcome, LayerPlan, Outcome, PassContext, Survey

_NO_LAYER = "before it is no layer that could take it over"
_SHARED = (
    "another layer reads the same weight, and is not followed by the same; if a module is called "
    "several times, compress it alone"
)

_ROUNDS = 12
"""Rounds of simplification at most; graphs settle after two to five."""

_SHAPES: tuple[Rule, ...] = (
    drop_neutral,
    shapes.slice_of_shape,
    shapes.known_lengths,
    shapes.shape_of_input,
    shapes.copy_lengths,
    shapes.swap_last_axes,
    shapes.transpose_without_unsqueeze,
    shapes.plain_reshape,
    shapes.merge_slices,
    detours.same_shape,
    detours.keep_axes,
    detours.reduce_one,
    detours.times_zero,
    shapes.other_axes,
    detours.branch_that_fits,
    states.zero_states,
    states.reshape_units,
    classes.look_up_labels,
    classes.cast_labels,
    classes.index_without_axis,
    classes.labels_that_count,
)
_PATTERNS: tuple[Rule, ...] = (
    gelu,
    layer_norm,
    einsum_to_matmul,
    mean_to_pool,
    detours.pool_parts,
    detours.split_packed,
    shapes.separate_heads,
    rows.rows_in_order,
    scale_queries,
    unguard,
    merge_clips,
)


def _offer(rules: Sequence[Rule], draft: Draft) -> bool:
    """Offer every node to every rule, in the order of execution; return whether one fitted."""
    changed = False
    for node in list(all_nodes(draft.model.graph)):
        for rule in rules:
            if node.graph is not None and rule(node, draft):
                draft.counts[rule.__name__] += 1
                changed = True
    return changed


# To fuse takes as long as much of a plan, and each graph is surveyed, previewed and fused by a run.
_SURVEYED: WeakKeyDictionary[ir.Model, tuple[Fuse, Draft]] = WeakKeyDictionary()
_NOTHING = "nothing to fuse: the graph is in its final form already"


class Fuse(GraphPass):
    """Fewer, larger operators that compute the same.

    Batch-norm and constant factors are folded into the layers before them, constant expressions
    are computed, shape arithmetic, identities and dead code go away, and functions that were
    written out become the standard operators that runtimes have kernels for. Layer names,
    inputs, outputs and dynamic axes stay. No operator is used that the model's opset lacks, and
    none of a private domain.
    """

    name: ClassVar[str] = "fuse"
    version: ClassVar[int] = 10
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.GRAPH})
    source: ClassVar[str] = (
        "B. Jacob et al., Quantization and Training of Neural Networks for Efficient "
        "Integer-Arithmetic-Only Inference, 2018, section 3.2 (batch-norm folding)"
    )

    batch_norm: bool = Field(
        default=True, description="fold batch-norm into the convolution or linear layer before it"
    )
    affine: bool = Field(
        default=True,
        description="fold multiplications by and additions of constants into the layer before, "
        "and those of one number into the layer behind",
    )
    constants: bool = Field(
        default=True,
        description="compute constant expressions and shapes; drop redundant reshapes, "
        "transposes, slices and casts",
    )
    patterns: bool = Field(
        default=True,
        description="recognize GELU, layer normalization, hard-swish, global pooling, clips, "
        "attention and products of weights that were written out",
    )

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Plan which layers take over what follows them; weights are not read."""
        draft = self.surveyed(carrier)
        layers = tuple(_plan(layer, draft) for layer in graph_layers(carrier.graph()))
        return Survey(layers, notes=_notes(carrier, draft))

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Fuse a copy of the graph.

        Raises:
            ModelError: a batch-norm's variance is not positive, or a library cannot simplify the
                graph.
        """
        draft = self.surveyed(carrier)
        graph = draft.computed()
        layers = tuple(
            LayerOutcome(layer.name, layer.dtype, details={"fused": draft.actions[layer.name]})
            for layer in graph_layers(graph)
            if layer.name in draft.actions
        )
        return Outcome(carrier.with_graph(graph), layers, _notes(carrier, draft))

    def preview(
        self,
        carrier: Carrier,
        context: PassContext,
        statistics: Mapping[str, Any],
    ) -> Carrier:
        """Fuse lazily: no new weight is computed."""
        return carrier.with_graph(self.surveyed(carrier).model)

    def surveyed(self, carrier: Carrier) -> Draft:
        """Return a model's fused graph, whose weights are not computed, once for each graph.

        It is shared: clone its model before changing it.
        """
        graph = carrier.graph()
        known, draft = _SURVEYED.get(graph, (None, None))
        if draft is None or known != self:
            draft = self.fused(graph, lowered=carrier.kind == "torch")
            _SURVEYED[graph] = self, draft
        return draft

    def fused(self, graph: ir.Model, *, lowered: bool) -> Draft:
        """Fuse a copy of a graph; new weights are promises, which its ``computed`` keeps.

        Raises:
            ModelError: a library cannot simplify the graph.
        """
        draft = Draft(graph.clone(), lowered=lowered)
        names = frozenset(node.name for node in all_nodes(draft.model.graph) if node.name)
        try:
            with simplify.quiet():
                simplify.inline_functions(draft.model)
                with draft.hidden_parameters(), draft.doubted_outputs():
                    self._simplify(draft)
                if self.constants:
                    simplify.fold_parameters(draft)
                self._absorb(draft)
                simplify.tidy(draft, names)
        except (ir_passes.PassError, RuntimeError) as error:
            raise unsimplified(error) from error
        return draft

    def _simplify(self, draft: Draft) -> None:
        rules = (_SHAPES if self.constants else ()) + (_PATTERNS if self.patterns else ())
        for _ in range(_ROUNDS):
            changed = False
            if self.constants:
                folded = simplify.fold(draft.model)
                changed, draft.failure = folded.changed, folded.failure
                shapes.note_shapes(draft.model, folded.shapes)
                shapes.share_lengths(draft.model)
                changed |= simplify.rewrite(draft.model, draft.opset, self.patterns)
            changed |= _offer(rules, draft)
            changed |= simplify.remove_unused(draft.model)
            if self.constants:
                changed |= simplify.share_expressions(draft.model)
            if not changed:
                return

    def _absorb(self, draft: Draft) -> None:
        folds = ((fold_batch_norm, self.batch_norm), (fold_affine, self.affine))
        rules = tuple(rule for rule, on in folds if on)
        if rules:
            _offer(rules, draft)
        if self.affine:
            _offer((fold_ahead,), draft)
        if self.patterns:
            _offer((matmul_to_gemm,), draft)


def _plan(layer: Layer, draft: Draft) -> LayerPlan:
    actions = draft.actions.get(layer.name)
    if actions:
        return LayerPlan(layer.name, "; ".join(actions))
    reason = draft.reasons.get(layer.name, "nothing to fold into it")
    return LayerPlan(layer.name, "keep", reason, touched=False)


def _behind_shared_layer(node: ir.Node) -> bool:
    """Whether a batch-norm follows a layer whose weight other layers read, too."""
    made = None if node.inputs[0] is None else node.inputs[0].producer()
    row = operator(made)
    weight = made.inputs[row.weight] if made is not None and row.is_product else None
    return weight is not None and len(weight.uses()) > 1


def _notes(carrier: Carrier, draft: Draft) -> tuple[str, ...]:
    before, after = (sum(1 for _ in all_nodes(m.graph)) for m in (carrier.graph(), draft.model))
    if before == after and not draft.actions and not draft.counts:
        notes = [_NOTHING]
    else:
        more = "" if after < before else ", which take less time"
        notes = [f"{before} operators became {after}{more}"]
    left = [n for n in all_nodes(draft.model.graph) if operator(n).running_statistics]
    shared = sum(map(_behind_shared_layer, left))
    for count, why in ((len(left) - shared, _NO_LAYER), (shared, _SHARED)):
        if count:
            notes.append(
                f"{count} {'batch-norm stays' if count == 1 else 'batch-norms stay'}: {why}"
            )
    if draft.failure:
        notes.append(f"some constants are still computed in each run: onnxscript: {draft.failure}")
    return tuple(notes)
