"""``rotate``: rotate what flows through a decoder, so that no channel of it stands out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from pydantic import Field

from compressor.errors import SpecError
from compressor.models.transformers.block_checkpoint import BlockCheckpoint
from compressor.passes.prepare.learned_rotations import Recipe, learned, memory_of
from compressor.passes.prepare.rotated_decoder import (
    added_by_untying,
    parts_of,
    random_rotations,
    rotated,
    untied,
)
from compressor.passes.quantize.weights.layers import Preset
from compressor.types.carrier import Capability, Carrier
from compressor.types.layer_rules import plan_layers
from compressor.types.passes import GraphPass, LayerOutcome, Outcome, PassContext, Survey

_AROUND, _HEADS = "rotate the residual stream", "rotate the residual stream and heads"


class Rotate(GraphPass):
    """Rotate the residual stream of a decoder, and what its heads mix; it computes the same.

    A few channels of a language model's residual stream are many times as large as the others, and
    set the scale of all. An orthogonal matrix spreads them over all channels: a Hadamard matrix
    with random signs (from the spec's seed), if the width has one. The scales of norms are folded
    into the layers that read them. The embedding table and all layers that write to the residual
    stream are multiplied by the matrix, those that read from it by its transpose. `v_proj` and
    `o_proj` are also rotated head by head. The input of `down_proj` is not rotated, because that
    would need a product at run time. The written directory keeps its class. Put the pass before
    those that round weights or activations. It takes llama, mistral, qwen2 and qwen3. An output
    layer that shares the table's weight gets a weight of its own. With `learn`, the matrices follow
    the gradient of the loss from rounding to a preset, on calibration text (SpinQuant). Held-out
    text judges: if they are no better there, the random ones stay.
    """

    name: ClassVar[str] = "rotate"
    source: ClassVar[str] = (
        "Ashkboos et al. 2024 (arXiv:2404.00456) section 4, what is folded into weights; learn: "
        "Liu et al. 2024 (arXiv:2405.16406)"
    )
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.WEIGHTS})

    heads: bool = Field(default=True, description="rotate `v_proj` and `o_proj` head by head, too")
    learn: Preset | None = Field(
        default=None,
        description="learn the matrices on calibration text, for a network that "
        "`quantize-weights` rounds to this preset; default: random matrices",
    )
    steps: int = Field(default=100, ge=1, description="steps of learning")

    @property
    def replays(self) -> str:
        """What calibration text is run for."""
        return "to learn its matrices" if self.learn is not None else ""

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Find the layers of the decoder.

        Raises:
            SpecError: it is of another family, is a module with tied embeddings, or has tensors
                that are none of the family's; or it cannot be learned from.
        """
        carrier = untied(carrier)
        memory = 0 if self.learn is None else memory_of(_with_blocks(carrier), context)
        parts = parts_of(carrier)
        actions = {}
        for layer in carrier.layers():
            headed = self.heads and layer.name.endswith((".v_proj", ".o_proj"))
            actions[layer.name] = _HEADS if headed else _AROUND
        reasons = {n: "" if n in parts else "it is not part of the decoder" for n in actions}
        plans = plan_layers(self.name, actions, reasons)
        return Survey(plans, notes=added_by_untying(carrier), memory=memory)

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Rotate it; of a checkpoint that is streamed, as its weights are read."""
        carrier = untied(carrier)
        outcomes = tuple(LayerOutcome(x.name, x.dtype) for x in carrier.layers())
        start = random_rotations(carrier, context.seed, heads=self.heads)
        if self.learn is not None:
            found = learned(_with_blocks(carrier), start, Recipe(self.learn, self.steps), context)
            return Outcome(rotated(carrier, found.rotations), outcomes, (found.note,))
        again = partial(_rotated, seed=context.seed, heads=self.heads)
        return Outcome(rotated(carrier, start), outcomes, rescale=again)

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Return the model with an output layer of its own; nothing else changes its size."""
        return untied(carrier)


def _rotated(carrier: Carrier, seed: int, *, heads: bool) -> Carrier:
    return rotated(carrier, random_rotations(carrier, seed, heads=heads))


def _with_blocks(carrier: Carrier) -> BlockCheckpoint:
    """Return a checkpoint whose blocks can be run.

    Raises:
        SpecError: they cannot.
    """
    if isinstance(carrier, BlockCheckpoint):
        return carrier
    raise SpecError(
        "learn",
        f"runs the blocks of a checkpoint on text, and this is a {carrier.kind} model without any",
        "name the directory as model.checkpoint, leave out model.factory, and give "
        "data.calibration; or leave out learn",
    )
