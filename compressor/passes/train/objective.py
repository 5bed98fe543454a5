"""What a training makes small, whichever pass it belongs to."""

from __future__ import annotations

from compressor.passes.train.job import Objective
from compressor.passes.train.recipe import Recipe
from compressor.passes.train.task import task_loss
from compressor.types.carrier import Carrier
from compressor.types.passes import PassContext
from compressor.types.training import Training


def make_objective(
    recipe: Recipe, carrier: Carrier, training: Training, context: PassContext
) -> Objective:
    """Return the loss that a recipe asks for.

    Args:
        recipe: the pass's options.
        carrier: the model that is trained.
        training: data.
        context: has the metric.

    Raises:
        SpecError: no loss is given, and the metric does not tell.
    """
    return task_loss(recipe, tuple(o.name for o in carrier.outputs), training, context)
