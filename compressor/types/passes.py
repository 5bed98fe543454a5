"""Passes: frozen, typed declarations that survey a model and then change it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from pydantic import Field
from torch import Tensor

from compressor.progress import SILENT, Progress
from compressor.types.carrier import Capability, Carrier
from compressor.types.data import Samples
from compressor.types.options import Options
from compressor.types.statistics import Blocks, Request
from compressor.types.training import Training


class Kept(Protocol):
    """Numbers that a run stores beside its results, such as measured times."""

    def read(self, identity: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what was stored under an identity on this machine with these versions, if any."""
        ...

    def write(self, identity: Mapping[str, Any], content: Mapping[str, Any]) -> None:
        """Store JSON under an identity, in place of what was stored before."""
        ...


class LayerRule(Options):
    """A per-layer rule; the first whose ``match`` fits a layer's name wins."""

    match: str = Field(
        description="name of a layer, or of an initializer or node if no layer matches; * and ? "
        "are wildcards"
    )
    skip: bool = Field(default=False, description="leave these layers unchanged")


class KeptTensors(Protocol):
    """Intermediate results of a pass, stored so that a killed run resumes from them."""

    def read(self) -> Mapping[str, Tensor]:
        """Return what was last written for the same model, options and data; empty at first."""
        ...

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Store tensors in place of what was stored before."""
        ...


@dataclass(frozen=True)
class PassContext:
    """What a pass may know of the spec and the run.

    Attributes:
        seed: the spec's seed.
        targets: targets of the exports, such as ``ort-cpu``.
        metric: name of the metric, if there is one.
        shapes: shapes of the model's inputs in a calibration sample, by name.
        source: the float model before the first pass, the reference of predictions.
        progress: shows the progress of a long pass; the run shows that of collecting statistics.
        samples: the calibration data, for a pass that :attr:`Pass.replays` them; ``None`` in a
            plan.
        blocks: the model's blocks with their statistics, for a pass :attr:`Pass.by_block`.
        kept: numbers measured earlier on this machine; ``None`` in a plan.
        kept_tensors: intermediate results of a pass that :attr:`Pass.replays` data over a
            streamed checkpoint; ``None`` for other passes.
    """

    seed: int = 0
    targets: frozenset[str] = frozenset()
    metric: str | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    source: Carrier | None = field(default=None, compare=False, repr=False)
    progress: Progress = field(default=SILENT, compare=False, repr=False)
    samples: Samples | None = field(default=None, compare=False, repr=False)
    blocks: Blocks | None = field(default=None, compare=False, repr=False)
    kept: Kept | None = field(default=None, compare=False, repr=False)
    kept_tensors: KeptTensors | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class LayerPlan:
    """What a pass will do to one layer.

    Attributes:
        name: the layer.
        action: a short description, such as ``int8/channel``; ``keep`` if the layer stays.
        reason: why the layer stays or is treated specially; empty if the action says enough.
        touched: whether the pass changes the layer.
        remark: what else may happen to the layer.
        parts: names of the layers that replace it; empty if it stays one layer of this name.
    """

    name: str
    action: str
    reason: str = ""
    touched: bool = True
    parts: tuple[str, ...] = ()
    remark: str = ""


@dataclass(frozen=True)
class Survey:
    """What a pass finds in a model before it sees data.

    Attributes:
        layers: an entry for each layer that the pass considers.
        requests: the statistics that it needs.
        notes: notes for the user, one sentence each.
        memory: bytes of statistics that the pass collects itself.
    """

    layers: tuple[LayerPlan, ...]
    requests: tuple[Request, ...] = ()
    notes: tuple[str, ...] = ()
    memory: int = 0


@dataclass(frozen=True)
class LayerOutcome:
    """What a pass did to one layer.

    Attributes:
        name: the layer.
        scheme: how its weight is represented now.
        weight_sqnr_db: SQNR of the new weight against the old one in dB; ``None`` if they are
            equal or cannot be compared.
        details: further facts by name, such as a chosen activation range.
    """

    name: str
    scheme: str
    weight_sqnr_db: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The result of a pass.

    Attributes:
        carrier: the new model.
        layers: what was done to each layer.
        notes: notes for the user, one sentence each.
        training: a record of the training as JSON; ``None`` without training.
        untrained: the model before training, if training recovers a loss of this pass; the report
            measures both.
        rescale: scales the channels of another model as the pass scaled those of this one, which
            keeps the model's function; ``None`` if it scaled none. Outputs of layers are then
            compared with those of the rescaled float model. It should hold no weights.
    """

    carrier: Carrier
    layers: tuple[LayerOutcome, ...] = ()
    notes: tuple[str, ...] = ()
    training: Mapping[str, Any] | None = None
    untrained: Carrier | None = None
    rescale: Callable[[Carrier], Carrier] | None = None


class Pass(Options, ABC):
    """Base class of the three kinds of pass. Fields are options.

    A pass is a :class:`~compressor.run.weight_pass.WeightPass`, a :class:`GraphPass` or a
    :class:`TrainPass`.

    Class attributes:
        name: the name in a spec.
        needs: what a carrier must offer for any options.
        version: incremented whenever results change, so that stored results are not reused.
        source: the paper or document that describes the method.
        neutral: options (fields) that change how the result is computed, but not the result.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[Capability]]
    version: ClassVar[int] = 1
    source: ClassVar[str] = ""
    neutral: ClassVar[frozenset[str]] = frozenset()

    @property
    def required(self) -> frozenset[Capability]:
        """What a carrier must offer for these options; at least :attr:`needs`."""
        return self.needs

    def lacking(self, carrier: Carrier) -> frozenset[Capability]:
        """Return the capabilities that the pass needs and the model does not offer."""
        lacking = self.required - carrier.offers
        if Capability.BLOCKS in carrier.offers and self.in_blocks:
            return lacking - {Capability.RUN, Capability.GRAPH}
        return lacking

    @property
    def by_block(self) -> bool:
        """Whether the pass works block by block, each on the outputs of the changed ones before.

        The run then passes the blocks as :attr:`PassContext.blocks`.
        """
        return False

    @property
    def in_blocks(self) -> bool:
        """Whether a pass :attr:`by_block` accepts a checkpoint whose blocks run one at a time.

        It then needs neither a graph nor a runnable whole model, whatever :attr:`required` says.
        """
        return False

    @property
    def replays(self) -> str:
        """What the pass runs the calibration data for itself; empty if it does not.

        The run then passes the data as :attr:`PassContext.samples`.
        """
        return ""

    @property
    def replays_given(self) -> str:
        """What the pass runs calibration data for if there are any; it also works without."""
        return ""

    @property
    def estimated(self) -> bool:
        """Whether sizes after the pass depend on weights or data, so that a plan estimates them."""
        return False

    @property
    def code(self) -> tuple[str, ...]:
        """The user's functions that the options name, as ``package.module:function``.

        Planning imports them, and a stored result is reused only if their code is unchanged.
        """
        return ()

    @property
    def other_models(self) -> Mapping[str, Mapping[str, Any]]:
        """Models that the options name, with the keys of ``model`` in a spec, by option.

        An option inside another or inside a list is written as a path, such as ``teachers.0``.
        Planning opens their structure, and a stored result is reused only if their files and code
        are unchanged.
        """
        return {}

    @property
    def by_metric(self) -> bool:
        """Whether the result depends on which metric there is; that of training always does."""
        return False

    def adapted(self, carrier: Carrier, context: PassContext) -> Carrier:
        """Return the model in the form that the pass works on; by default, unchanged.

        The run calls this before :meth:`survey`; all other methods get its result.

        Args:
            carrier: the model; it is not modified, and its weights are not read.
            context: the rest of the spec.
        """
        return carrier

    def check_models(self, carrier: Carrier, others: Mapping[str, Carrier]) -> None:
        """Check at planning that the models named by the options fit the model.

        Args:
            carrier: the model that the pass gets.
            others: the opened :attr:`other_models`, without valid weights.

        Raises:
            CompressorError: they do not fit.
        """

    @abstractmethod
    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Return what will happen to each layer, and which statistics are needed.

        It is also called by plans, so it reads structure only, never weights.

        Raises:
            SpecError: an option does not fit the model, or a rule matches no layer.
        """

    @abstractmethod
    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Return a preview of the changed model, for planning.

        Args:
            carrier: the model, without valid weights.
            context: the rest of the spec.
            statistics: placeholder results of the survey's requests, by ``Request.key``.
        """


class GraphPass(Pass):
    """A pass that edits a clone of the model's graph, or needs the whole model at once."""

    @abstractmethod
    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Return the changed model.

        Args:
            carrier: the model; it is not modified.
            context: the rest of the spec, and the data that the pass asked for.
            statistics: results of the survey's requests, by ``Request.key``; empty for a pass
                :attr:`by_block`.
        """

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Apply the pass; override this if it reads weights or takes long."""
        return self.apply(carrier, context, statistics).carrier


class TrainPass(Pass):
    """A pass that trains a module, in every process of the run.

    The result of the first process is stored.
    """

    searches: ClassVar[bool] = False
    """Whether the pass chooses among trained models by the metric on ``data.search``."""

    @property
    def labelled(self) -> bool:
        """Whether the training data must have a target."""
        return False

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Return the model unchanged; override this if the pass changes more than values."""
        return carrier

    @abstractmethod
    def apply_training(
        self,
        carrier: Carrier,
        context: PassContext,
        statistics: Mapping[str, Any],
        training: Training,
    ) -> Outcome:
        """Return the trained model.

        Args:
            carrier: the model; it is not modified.
            context: the rest of the spec.
            statistics: results of the survey's requests, by ``Request.key``.
            training: the training data, and where to store the state.
        """
