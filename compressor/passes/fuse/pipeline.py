"""The order in which a graph is fused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir import passes as ir_passes

from compressor.errors import ModelError
from compressor.graph.values import all_nodes
from compressor.passes.fuse import library
from compressor.passes.fuse.absorb import fold_affine, fold_batch_norm
from compressor.passes.fuse.activations import drop_neutral, gelu, merge_clips
from compressor.passes.fuse.attention import scale_queries, separate_heads
from compressor.passes.fuse.draft import Draft, Rule
from compressor.passes.fuse.gemm import matmul_to_gemm
from compressor.passes.fuse.normalization import layer_norm
from compressor.passes.fuse.parameters import fold_parameters
from compressor.passes.fuse.pooling import mean_to_pool
from compressor.passes.fuse.shapes import (
    copy_lengths,
    note_shapes,
    plain_reshape,
    shape_of_input,
    slice_of_shape,
    swap_last_axes,
    transpose_without_unsqueeze,
)
from compressor.passes.fuse.slices import merge_slices
from compressor.passes.fuse.tidy import tidy

_ROUNDS = 12
"""Rounds of simplification at most; graphs settle after two to five."""

_SHAPES: tuple[Rule, ...] = (
    drop_neutral,
    slice_of_shape,
    shape_of_input,
    copy_lengths,
    swap_last_axes,
    transpose_without_unsqueeze,
    plain_reshape,
    merge_slices,
)
_PATTERNS: tuple[Rule, ...] = (
    gelu,
    layer_norm,
    mean_to_pool,
    separate_heads,
    scale_queries,
    merge_clips,
)


@dataclass(frozen=True)
class Choice:
    """Which groups of rules to apply; see the options of ``Fuse``."""

    constants: bool
    batch_norm: bool
    affine: bool
    patterns: bool


def run(draft: Draft, choice: Choice) -> None:
    """Fuse a draft in place.

    Raises:
        ModelError: a library pass fails on the graph, or a batch-norm cannot be folded.
    """
    known = frozenset(node.name for node in all_nodes(draft.model.graph) if node.name)
    try:
        with library.quiet():
            library.inline_functions(draft.model)
            with draft.hidden_parameters(), draft.doubted_outputs():
                _simplify(draft, choice)
            if choice.constants:
                fold_parameters(draft)
            _absorb(draft, choice)
            tidy(draft, known)
    except (ir_passes.PassError, RuntimeError) as error:
        raise ModelError(
            "pass fuse", f"the graph cannot be simplified ({error})", "try constants: false"
        ) from error


def _simplify(draft: Draft, choice: Choice) -> None:
    """Apply the rules about structure until nothing changes."""
    rules = (_SHAPES if choice.constants else ()) + (_PATTERNS if choice.patterns else ())
    for _ in range(_ROUNDS):
        changed = False
        if choice.constants:
            changed, symbolic = library.fold(draft.model)
            note_shapes(draft.model, symbolic)
            changed |= library.rewrite(draft.model, draft.opset, choice.patterns)
        changed |= apply(rules, draft)
        changed |= library.remove_unused(draft.model)
        if choice.constants:
            changed |= library.share_expressions(draft.model)
        if not changed:
            return


def _absorb(draft: Draft, choice: Choice) -> None:
    rules: list[Rule] = []
    if choice.batch_norm:
        rules.append(fold_batch_norm)
    if choice.affine:
        rules.append(fold_affine)
    if rules:
        apply(rules, draft)
    if choice.patterns:
        apply((matmul_to_gemm,), draft)


def apply(rules: Sequence[Rule], draft: Draft) -> bool:
    """Offer every node to every rule, in the order of execution; say whether one fitted."""
    changed = False
    for node in list(all_nodes(draft.model.graph)):
        for rule in rules:
            if node.graph is not None and rule(node, draft):
                draft.counts[rule.__name__] += 1
                changed = True
    return changed


def op_count(model: ir.Model) -> int:
    """Return the number of nodes, subgraphs included."""
    return sum(1 for _ in all_nodes(model.graph))
