"""What a pass is: a frozen, typed declaration that surveys a model and then changes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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


class Collect(Protocol):
    """Gathers statistics of a model."""

    def __call__(self, carrier: Carrier, requests: Sequence[Request]) -> Mapping[str, Any]:
        """Return them by ``Request.key``, over the calibration data."""
        ...


class Kept(Protocol):
    """Numbers that a run keeps beside its results, such as times that were measured once."""

    def read(self, identity: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return what was kept under an identity, on this machine with these versions, if any."""
        ...

    def write(self, identity: Mapping[str, Any], content: Mapping[str, Any]) -> None:
        """Keep JSON in place of what was kept under the identity before."""
        ...


class LayerRule(Options):
    """A per-layer rule; the first whose ``match`` fits a layer's name wins."""

    match: str = Field(
        description="name of a layer, or of an initializer or node if no layer matches; * and ? "
        "are wildcards"
    )
    skip: bool = Field(default=False, description="leave these layers unchanged")


class KeptTensors(Protocol):
    """What a pass has found on its way, kept so that a run that was killed goes on from there."""

    def read(self) -> Mapping[str, Tensor]:
        """Return what was written last for the same model, options and data; nothing at first."""
        ...

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors in place of what was kept before."""
        ...


@dataclass(frozen=True)
class PassContext:
    """What a pass may know about the rest of the spec.

    Attributes:
        seed: the spec's seed.
        targets: targets of the exports that follow, such as ``ort-cpu``.
        metric: name of the metric, if there is one.
        shapes: those of the model's inputs in a sample of the calibration data, by name.
        source: the float model before the first pass, which predictions compare with.
        progress: shows how far a pass is that takes long by itself; what it waits for, such as
            statistics, is shown by whoever runs it.
        samples: the calibration data, for a pass that :attr:`Pass.replays` them; a plan has none.
        blocks: the model's blocks with their statistics, for a pass :attr:`Pass.by_block`.
        collect: for a pass that changes a model and then needs statistics of what it became; a
            plan has none.
        kept: what was measured on this machine before; a plan has none.
        kept_tensors: what a pass that :attr:`Pass.replays` data of a streamed checkpoint has found
            on its way; others have none.
    """

    seed: int = 0
    targets: frozenset[str] = frozenset()
    metric: str | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    source: Carrier | None = field(default=None, compare=False, repr=False)
    progress: Progress = field(default=SILENT, compare=False, repr=False)
    samples: Samples | None = field(default=None, compare=False, repr=False)
    blocks: Blocks | None = field(default=None, compare=False, repr=False)
    collect: Collect | None = field(default=None, compare=False, repr=False)
    kept: Kept | None = field(default=None, compare=False, repr=False)
    kept_tensors: KeptTensors | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class LayerPlan:
    """What a pass will do to one layer.

    Attributes:
        name: the layer.
        action: what happens, in a few words, such as ``int8/channel``; ``keep`` if nothing does.
        reason: why it is kept or treated specially; empty where the action says it all.
        touched: the pass changes this layer.
        remark: what else may happen to it, and how.
        parts: names of the layers that it becomes; empty where it remains one of this name.
    """

    name: str
    action: str
    reason: str = ""
    touched: bool = True
    parts: tuple[str, ...] = ()
    remark: str = ""


@dataclass(frozen=True)
class Survey:
    """What a pass found in a model before any data is seen.

    Attributes:
        layers: one entry for each layer that the pass looks at.
        requests: the statistics it needs.
        notes: things the user should know, one sentence each.
        memory: bytes of statistics that the pass gathers by itself.
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
        weight_sqnr_db: signal to noise of the new weight against the old, in dB; ``None`` where
            they are equal or cannot be compared.
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
        layers: what was done, layer by layer.
        notes: what the user should know, one sentence each.
        training: how a training went, as JSON; ``None`` where there was none.
        untrained: the model that the pass would have given without training, where that lost
            something that training wins back; the report measures both.
        rescale: scales the channels of another model as those of this one were scaled, which keeps
            its function; ``None`` where none were. What layers write is then compared with the
            float model scaled so. It should hold no weights.
    """

    carrier: Carrier
    layers: tuple[LayerOutcome, ...] = ()
    notes: tuple[str, ...] = ()
    training: Mapping[str, Any] | None = None
    untrained: Carrier | None = None
    rescale: Callable[[Carrier], Carrier] | None = None


class Pass(Options, ABC):
    """What the three kinds of pass have in common. Its fields are its options.

    A pass is a :class:`~compressor.run.weight_pass.WeightPass`, a :class:`GraphPass` or a
    :class:`TrainPass`.

    Class attributes:
        name: the name in a spec.
        needs: what a carrier must offer whatever the options are.
        version: raised whenever results change, so that stored results are not reused.
        source: paper or document the method comes from.
        neutral: options (fields) that do not change the result, only how it is computed.
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
        """Return what a model does not offer of what the pass needs."""
        lacking = self.required - carrier.offers
        if Capability.BLOCKS in carrier.offers and self.in_blocks:
            return lacking - {Capability.RUN, Capability.GRAPH}
        return lacking

    @property
    def by_block(self) -> bool:
        """Whether statistics are wanted block by block, each block as earlier ones left it.

        The run then hands them over as :attr:`PassContext.blocks`.
        """
        return False

    @property
    def in_blocks(self) -> bool:
        """Whether a pass :attr:`by_block` takes a checkpoint whose blocks run one at a time.

        It then needs no graph and nothing that runs the whole model, whatever :attr:`required`
        says.
        """
        return False

    @property
    def replays(self) -> str:
        """What the pass itself runs the calibration data for; empty where it does not.

        The run then hands the data over as :attr:`PassContext.samples`.
        """
        return ""

    @property
    def replays_given(self) -> str:
        """What the pass runs calibration data for where there are some; it does without them."""
        return ""

    @property
    def estimated(self) -> bool:
        """Whether the sizes after it depend on weights or data, so that a plan can only guess."""
        return False

    @property
    def code(self) -> tuple[str, ...]:
        """The user's functions that the options name, as ``package.module:function``.

        Planning imports them, and a result is only reused while their code is the same.
        """
        return ()

    @property
    def other_models(self) -> Mapping[str, Mapping[str, Any]]:
        """Models that the options name, keys as under ``model`` in a spec, by option.

        An option inside another or inside a list is written as a path, such as ``teachers.0``.
        Planning opens their structure, and a result is only reused while their files and code
        are the same.
        """
        return {}

    def adapted(self, carrier: Carrier, context: PassContext) -> Carrier:
        """Return the model in the form that the pass works on: by default, as it is.

        The run calls this before :meth:`survey`, and everything else is given what it returns.

        Args:
            carrier: the model; it is not modified, and its weights are not read.
            context: the rest of the spec.
        """
        return carrier

    def check_models(self, carrier: Carrier, others: Mapping[str, Carrier]) -> None:
        """Compare the models that the options name with the model, when a run is planned.

        Args:
            carrier: the model that the pass is given.
            others: the opened :attr:`other_models`; their weights mean nothing.

        Raises:
            CompressorError: they do not fit.
        """

    @abstractmethod
    def survey(self, carrier: Carrier, context: PassContext) -> Survey:
        """Return what will happen to each layer, and which statistics are needed.

        Reads structure only, never weights, so that it also serves planning.

        Raises:
            SpecError: an option does not fit the model, or a rule matches no layer.
        """

    @abstractmethod
    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Return the model as it will be, for planning.

        Args:
            carrier: the model; its weights mean nothing and are not read.
            context: the rest of the spec.
            statistics: placeholders of the survey's requests, by ``Request.key``.
        """


class GraphPass(Pass):
    """A pass that edits a clone of the model's graph, or weighs all of a model at once."""

    @abstractmethod
    def apply(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Outcome:
        """Return the changed model.

        Args:
            carrier: the model; it is not modified.
            context: the rest of the spec, with the data that the pass asked for.
            statistics: results of the survey's requests, by ``Request.key``; empty for a pass
                :attr:`by_block`.
        """

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Apply the pass; one that reads weights or is heavy overrides this."""
        return self.apply(carrier, context, statistics).carrier


class TrainPass(Pass):
    """A pass that trains a module, in every process of the run.

    What the first process returns is stored.
    """

    searches: ClassVar[bool] = False
    """The pass chooses among what it trained by the metric on ``data.search``."""

    @property
    def labelled(self) -> bool:
        """Whether the training data must have a target."""
        return False

    def preview(
        self, carrier: Carrier, context: PassContext, statistics: Mapping[str, Any]
    ) -> Carrier:
        """Return the model as it is; a pass that changes more than values overrides this."""
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
            training: data, and where to keep the state.
        """
