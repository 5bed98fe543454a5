"""``finetune``: train the weights on the training data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from compressor.passes.train.engine import length, make_order, train
from compressor.passes.train.job import Job
from compressor.passes.train.preparing import freeze, outcome, plan_training, regulators
from compressor.passes.train.recipe import Recipe
from compressor.passes.train.task import TaskLoss, loss_name
from compressor.types.carrier import Capability, Carrier
from compressor.types.passes import Outcome, PassContext, Survey
from compressor.types.training import Training


class Finetune(Recipe):
    """Train the weights on, with the loss of the task.

    What pruning made zero stays zero. The state is saved every so many steps and at Ctrl-C; the
    same command goes on from there, and on one CPU ends in the same bytes as if it had never
    stopped.
    """

    name: ClassVar[str] = "finetune"
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.TRAIN, Capability.GRAPH})
    source: ClassVar[str] = (
        "gradual pruning: Zhu and Gupta 2017 (arXiv:1710.01878); rewinding: Frankle et al. 2020 "
        "(arXiv:1912.05671)"
    )

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Say which layers are trained; check the loss."""
        name = loss_name(self.loss, context.metric)
        notes = (f"trained with {name} as loss",)
        return Survey(plan_training(self, carrier), notes=notes, trains=True, labels=True)

    def apply_training(
        self,
        carrier: Carrier,
        context: PassContext,
        statistics: Mapping[str, Any],  # noqa: ARG002
        training: Training,
    ) -> Outcome:
        """Train.

        Raises:
            CompressorError: see :func:`compressor.passes.train.engine.train`.
        """
        order = make_order(self, training, carrier.inputs, context.seed)
        module = carrier.trainable()
        freeze(self, carrier, module)
        outputs = tuple(output.name for output in carrier.outputs)
        loss = TaskLoss(loss_name(self.loss, context.metric), outputs, training)
        job = Job(
            name=self.name,
            module=module,
            objective=loss,
            inputs=tuple(i.name for i in carrier.inputs),
            outputs=outputs,
            regulators=regulators(self, carrier, module, length(self, order)),
        )
        return outcome(self, carrier, train(job, self, training, order), training.metric)

    def preview(
        self,
        carrier: Carrier,
        context: PassContext,  # noqa: ARG002
        statistics: Mapping[str, Any],  # noqa: ARG002
    ) -> Carrier:
        """Return the model as it is: training changes no shape."""
        return carrier
