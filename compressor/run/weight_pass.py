"""The base of passes that change weights: it chooses layers, streams, previews and compares.

A pass of this kind is a function on the rows of one layer. Everything that depends on where a
weight comes from is here: a module, a graph, or a checkpoint larger than memory, of any float type,
with statistics of the whole model or of one block at a time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from pydantic import Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema
from torch import Tensor

from compressor.calibration.sources.user_functions import call
from compressor.errors import DataError
from compressor.graph.stored_weights import is_quantized
from compressor.models.checkpoint.rows import read_rows
from compressor.types.carrier import Capability, Carrier, WeightChange
from compressor.types.layer_rules import plan_layers, resolve_rules, skip_reason
from compressor.types.layers import (
    Layer,
    QuantizedTensor,
    Scheme,
    WeightCodes,
    check_finite,
    sqnr_db,
)
from compressor.types.options import kebab
from compressor.types.passes import LayerOutcome, LayerRule, Outcome, Pass, PassContext, Survey
from compressor.types.rounded_inputs import InputScheme
from compressor.types.statistics import Block, Request

FLOATS = ("float16", "bfloat16", "float32", "float64")
_COMPARED = 4 << 20  # weights
_SAMPLE_ROWS = 32  # the first ones: others would be seeks on a cold disk before anything streams


@dataclass(frozen=True)
class Treatment:
    """The treatment of one layer by a pass.

    Attributes:
        action: a short description for the plan, such as ``int4/group 128``.
        kept: why the layer stays unchanged; empty if it is changed.
        remark: a further remark on a changed layer in the plan.
        setting: parameters for :meth:`WeightPass.change`; a :class:`Scheme` if the weight is
            quantized.
        request: the statistic of the layer's inputs, if one is needed.
        together: a pass by rows gets a multiple of this number of rows at once.
        inputs: how the layer's inputs are rounded at run time.
        span: the statistic of the range of these inputs, if one is needed.
    """

    action: str = ""
    kept: str = ""
    remark: str = ""
    setting: Any = None
    request: Request | None = None
    together: int = 1
    inputs: InputScheme | None = None
    span: Request | None = None

    @property
    def scheme(self) -> Scheme | None:
        """The quantization scheme, if the weight is quantized."""
        return self.setting if isinstance(self.setting, Scheme) else None


@dataclass(frozen=True)
class WeightRows:
    """Rows of one layer's weight.

    Attributes:
        matrix: ``[rows, columns]``, rows are output channels; in float32 unless the weight is
            float64 or the pass does not widen. It must not be modified.
        start: the index of the first row; a pass by rows gets some rows at a time.
    """

    layer: Layer
    matrix: Tensor
    start: int = 0


@dataclass(frozen=True)
class Choice:
    """The choices of a pass for a model.

    Attributes:
        treatments: treatments by layer name, for every layer in order.
        notes: notes for the user, one sentence each.
        work: state that the pass keeps from block to block.
    """

    treatments: Mapping[str, Treatment]
    notes: tuple[str, ...] = ()
    work: Any = None

    def layers(self, carrier: Carrier) -> list[Layer]:
        """Return the layers that are changed, in the model's order."""
        return [layer for layer in carrier.layers() if not self.treatments[layer.name].kept]


@dataclass(eq=False)
class Changes:
    """Changed weights.

    Attributes:
        weights: by parameter name: codes, a float tensor in stored shape, or a change that is
            computed when the weight is read.
        notes: notes for the user, one sentence each.
        spans: the largest magnitudes of values that are rounded at run time, by value name.
    """

    weights: dict[str, WeightCodes | WeightChange | Tensor] = field(default_factory=dict)
    outcomes: dict[str, LayerOutcome] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    spans: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def update(self, other: Changes) -> None:
        """Add the changes of a later block."""
        self.weights.update(other.weights)
        self.outcomes.update(other.outcomes)
        self.notes += other.notes


class WeightPass(Pass):
    """A pass that changes each layer's weight by a function on its rows.

    A pass overrides :meth:`change`, the function; :meth:`choose`, if not every layer of floats is
    changed alike; :meth:`change_layers`, if layers are changed together; and :meth:`conclude`, if
    something remains to be done to the model as a whole.

    Class attributes:
        action: the description of a changed layer in the plan.
        by_rows: whether a changed row depends on that row alone, so that weights may be changed
            some rows at a time when they are read.
        widens: whether 16-bit floats are converted to float32; otherwise less memory is needed.

    >>> class Halve(WeightPass):
    ...     name = "halve"
    ...     def change(self, rows, treatment, statistics): return rows.matrix / 2
    """

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.WEIGHTS})
    action: ClassVar[str] = "change"
    by_rows: ClassVar[bool] = True
    widens: ClassVar[bool] = True

    layers: tuple[LayerRule, ...] = Field(
        default=(), description="rules for single layers; the first that matches wins"
    )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """List a pass's own options before those that it inherits."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        names = [name for owner in cls.__mro__ for name in vars(owner).get("__annotations__", ())]
        for key in [kebab(name) for name in dict.fromkeys(names) if kebab(name) in properties]:
            properties[key] = properties.pop(key)
        return schema

    def choose(self, carrier: Carrier, context: PassContext) -> Choice:  # noqa: ARG002
        """Return the treatment of each layer: by default, every float layer that no rule skips.

        Reads structure only, never weights.

        Raises:
            SpecError: an option does not fit the model, or a rule matches no layer.
        """
        rules = resolve_rules(self.layers, carrier.layers())
        treatments = {}
        for layer in carrier.layers():
            not_float = "" if layer.dtype in FLOATS else f"its weight is {layer.dtype}"
            kept = skip_reason(rules[layer.name]) or not_float
            treatments[layer.name] = Treatment(self.action, kept)
        return Choice(treatments)

    @abstractmethod
    def change(
        self, rows: WeightRows, treatment: Treatment, statistics: Mapping[str, Any]
    ) -> Tensor | QuantizedTensor:
        """Return the changed rows of a weight.

        Args:
            rows: the rows and their layer.
            treatment: the chosen treatment of the layer.
            statistics: results of the requests, by ``Request.key``.

        Returns:
            A float matrix of the same shape, or its codes if the treatment has a scheme.
        """

    def change_layers(
        self, carrier: Carrier, choice: Choice, layers: Sequence[Layer], block: Block
    ) -> Changes:
        """Return the changes of the chosen layers of a block; by default, of each separately.

        Raises:
            ModelError: a weight is not finite.
        """
        changes = Changes()
        for layer in layers:
            treatment = choice.treatments[layer.name]
            compute = self._computation(carrier, layer, treatment, block.statistics)
            streamed = self.by_rows and not self.by_block and Capability.RUN not in carrier.offers
            if streamed:
                matrix = read_rows(carrier, layer, 0, min(_SAMPLE_ROWS, layer.rows))
            else:
                matrix = layer.canonical(carrier.weight(layer))
            check_finite(layer, matrix)
            value = compute(matrix)
            change: WeightCodes | WeightChange | Tensor
            if treatment.scheme is not None and self.by_rows:
                change = WeightCodes(layer, treatment.scheme, compute, True, treatment.inputs)
            elif isinstance(value, QuantizedTensor):
                change = WeightCodes.known(layer, value)
            elif streamed:
                change = WeightChange(layer, partial(_checked, compute, layer), treatment.together)
            else:
                change = layer.stored(value.to(matrix.dtype))
            changes.weights[layer.weight] = change
            changes.outcomes[layer.name] = compared(layer, treatment, matrix, value)
        return changes

    def conclude(self, carrier: Carrier, choice: Choice, changes: Changes) -> Outcome:
        """Return the model with its changed weights, and the outcomes in the model's order."""
        by_kind: dict[type, dict[str, Any]] = {Tensor: {}, WeightChange: {}, WeightCodes: {}}
        order = {layer.weight: place for place, layer in enumerate(carrier.layers())}
        for name in sorted(changes.weights, key=lambda name: order.get(name, -1)):
            change = changes.weights[name]
            kind = Tensor if isinstance(change, Tensor) else type(change)
            by_kind[kind][name] = change
        after = carrier
        if by_kind[Tensor]:
            after = after.with_weights(by_kind[Tensor])
        if by_kind[WeightChange]:
            after = after.with_changes(by_kind[WeightChange])
        if by_kind[WeightCodes]:
            after = after.with_codes(by_kind[WeightCodes])
        outcomes = [changes.outcomes[layer.name] for layer in choice.layers(carrier)]
        return Outcome(after, tuple(outcomes), changes.notes)

    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Return the plan's rows, and the statistics that the chosen layers need."""
        choice = self.choose(carrier, context)
        treatments = choice.treatments
        rows = plan_layers(
            self.name,
            {name: treatment.action for name, treatment in treatments.items()},
            {name: treatment.kept for name, treatment in treatments.items()},
            quantized=Capability.GRAPH in carrier.offers and is_quantized(carrier.graph()),
        )
        rows = tuple(
            replace(row, reason=treatments[row.name].remark) if row.touched else row for row in rows
        )
        changed = (treatment for treatment in treatments.values() if not treatment.kept)
        requests = [r for t in changed for r in (t.request, t.span) if r is not None]
        return Survey(rows, tuple({r.key: r for r in requests}.values()), choice.notes)

    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Return the changed model; a streamed model's weights are changed when they are read.

        Raises:
            ModelError: a weight is not finite.
            DataError: calibration found nothing about a layer's input.
        """
        choice = self.choose(carrier, context)
        layers = choice.layers(carrier)
        changes = Changes()
        whole = BlockInMemory(tuple(layer.weight for layer in layers), statistics)
        blocks = [whole] if context.blocks is None else context.blocks
        for block in blocks:
            inside = set(block.weights)
            waiting = [x for x in layers if x.weight in inside and x.name not in changes.outcomes]
            made = block.kept(partial(self.change_layers, carrier, choice, waiting, block))
            block.replace(
                {k: v for k, v in made.weights.items() if not isinstance(v, WeightChange)}
            )
            changes.update(made)
        return self.conclude(carrier, choice, changes)

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Return the model with lazy codes; changed floats take the room that they took."""
        choice = self.choose(carrier, context)
        codes = {}
        for layer in choice.layers(carrier):
            treatment = choice.treatments[layer.name]
            if treatment.scheme is not None:
                compute = self._computation(carrier, layer, treatment, statistics)
                codes[layer.weight] = WeightCodes(
                    layer, treatment.scheme, compute, inputs=treatment.inputs
                )
        return carrier.with_codes(codes) if codes else carrier

    def _computation(
        self,
        carrier: Carrier,  # noqa: ARG002
        layer: Layer,
        treatment: Treatment,
        statistics: Mapping[str, Any],
    ) -> Callable[..., Any]:
        """Return the change of a layer's rows, whatever their float type."""

        def compute(matrix: Tensor, start: int = 0) -> Tensor | QuantizedTensor:
            if self.widens and matrix.dtype != torch.float64:
                matrix = matrix.to(torch.float32)
            rows = WeightRows(layer, matrix, start)
            if type(self).__module__.partition(".")[0] == __name__.partition(".")[0]:
                return self.change(rows, treatment, statistics)
            return self._change_of_others(rows, treatment, statistics)

        return compute

    def _change_of_others(
        self, rows: WeightRows, treatment: Treatment, statistics: Mapping[str, Any]
    ) -> Tensor | QuantizedTensor:
        """Call :meth:`change` of another package, which may do anything with a copy.

        Raises:
            DataError: it raises something, or returns something else than such rows.
        """
        subject = f"pass {self.name!r} on layer {rows.layer.name!r}"
        given = replace(rows, matrix=rows.matrix.clone())
        made: object = call(subject, self.change, given, treatment, statistics)
        problem = ""
        if not isinstance(made, Tensor | QuantizedTensor):
            problem = f"returned a {type(made).__name__}"
        elif isinstance(made, Tensor) and made.shape != rows.matrix.shape:
            problem = f"returned shape {list(made.shape)} for rows {list(rows.matrix.shape)}"
        elif isinstance(made, Tensor) and not bool(made.isfinite().all()):
            problem = "returned NaN or infinity"
        if problem:
            raise DataError(subject, problem, "return a finite tensor of the shape of rows.matrix")
        assert isinstance(made, Tensor | QuantizedTensor)
        return made


@dataclass(frozen=True)
class BlockInMemory:
    """A block of which nothing is stored; see :class:`compressor.types.statistics.Block`.

    Attributes:
        replace: by default does nothing, as for a whole model, which no block follows.
    """

    weights: tuple[str, ...]
    statistics: Mapping[str, Any]
    replace: Callable[[Mapping[str, WeightCodes | Tensor]], None] = lambda _: None

    def kept(self, make: Callable[[], Any]) -> Any:
        """Return what is made."""
        return make()


def compared(
    layer: Layer, treatment: Treatment, before: Tensor, after: Tensor | QuantizedTensor
) -> LayerOutcome:
    """Return what was done to a layer, as the report says it.

    Args:
        before: rows of its weight, ``[rows, columns]``; the first ones where it is streamed.
    """
    sample = {"weight_sqnr_rows": len(before)} if len(before) < layer.rows else {}
    if isinstance(after, QuantizedTensor):
        loss = sqnr_db(before, after.dequantize())
        return LayerOutcome(layer.name, str(after.scheme), loss, sample)
    changed = after.to(before.dtype)
    whole = kept = 0.0
    some = max(1, _COMPARED // max(before.shape[1], 1))  # rows: what is widened takes memory
    for old, new in zip(torch.split(before, some), torch.split(changed, some), strict=True):
        size = old.to(torch.float32).abs()
        whole += float(size.sum(dtype=torch.float64))
        kept += float(size.where(new != 0, 0.0).sum(dtype=torch.float64))
    details = {"kept_magnitude": kept / whole if whole else 1.0, **sample}
    scheme = f"{layer.dtype}, {treatment.action}"
    return LayerOutcome(layer.name, scheme, sqnr_db(before, changed), details)


def _checked(
    compute: Callable[[Tensor, int], Tensor], layer: Layer, matrix: Tensor, start: int
) -> Tensor:
    """Compute rows of a weight in the type that it has; ``start`` is the first one's number."""
    check_finite(layer, matrix)
    return compute(matrix, start).to(matrix.dtype)
