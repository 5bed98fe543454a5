"""Training in a program's own loop: prepare a module, and convert the trained one."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from compressor.errors import SpecError, listed
from compressor.front.compress import (
    ONNX,
    OutputForm,
    TemporaryFolder,
    first_samples,
    model_name,
    output_form,
)
from compressor.front.run import apart_from_the_program, run
from compressor.front.spec import MetricLike, Spec, checked
from compressor.models.torch.carrier import TorchCarrier
from compressor.models.torch.program_module import content_digest
from compressor.models.torch.wrappers import unwrapped
from compressor.progress import SILENT
from compressor.report.result import RunResult
from compressor.run.options import RunOptions
from compressor.run.pipeline import run_passes
from compressor.run.plan import make_plan
from compressor.run.store import Store, store_of
from compressor.run.workspace import Workspace
from compressor.spec.load import Spec as CheckedSpec
from compressor.types.arguments import check_arguments
from compressor.types.passes import Pass, TrainPass
from compressor.types.training import Handed, OwnLoop

_STEP = "step"


class PreparedModule(nn.Module):
    """A module to train, with the fake quantization, masks and projections of a pass.

    It has the inputs and outputs of the original. Masks and bounds of scales are applied at the
    first call after an optimizer step, so any training loop works. :func:`prepare` creates it, and
    :func:`convert` exports it.
    """

    def __init__(self, handed: Handed, form: OutputForm, spec: CheckedSpec, folder: Any = None):
        super().__init__()
        self.network: nn.Module = handed.module
        self.spec = spec
        self._handed = handed
        self._form = form
        self._folder = folder
        self._own = tuple(handed.module.parameters())
        self._step = 0
        self._seen = 0
        self._stepped = False
        self._given: dict[str, Tensor] = {}
        self._outputs: Mapping[str, Tensor] = {}
        self._begin()
        _note_steps(self)
        _save_once(self)
        hook = self.register_load_state_dict_post_hook
        hook(lambda *_: self._begin())  # type: ignore[no-untyped-call]  # PyTorch's own

    def forward(self, *inputs: Tensor, **named: Any) -> Any:
        """Run the network on inputs by position or name; other names are ignored.

        Raises:
            SpecError: parameters have been replaced, as by sharding.
        """
        self.settle()
        names = self._handed.inputs
        given = {**dict(zip(names, inputs, strict=False)), **named}
        self._given = {name: given[name] for name in names}
        self._outputs = self.network(**self._given)
        return self._form.filled([self._outputs[n] for n in self._handed.outputs])

    def loss(self, target: Tensor | None = None) -> Tensor:
        """Return the pass's own loss for the last outputs, of the task and of distillation.

        Args:
            target: the labels; not needed if the loss is of distillation alone.

        Raises:
            SpecError: the module has not been called.
            DataError: the target does not fit the outputs.
        """
        if not self._outputs:
            raise SpecError("loss", "has no outputs yet", "call the module first")
        tensors = dict(self._given)
        if target is not None and self._handed.target is not None:
            tensors[self._handed.target] = target
        return self._handed.loss(self._outputs, tensors, min(self._step, self._handed.steps - 1))

    def settle(self) -> None:
        """Apply masks and bounds of scales if the optimizer has changed parameters since.

        Raises:
            SpecError: parameters have been replaced, as by sharding.
        """
        self._check_own()
        if not self._stepped and self._versions() == self._seen:
            return
        self._handed.after(self._step)
        self._step += 1
        self._begin()

    def get_extra_state(self) -> Tensor:
        """Return the step and the masks, as the bytes of a safetensors file, ``[bytes]`` uint8.

        Loops save states with ``torch.save`` or, as the Trainer of ``transformers`` does, with
        safetensors, which takes nothing but tensors.
        """
        self.settle()  # what is saved after a step has its masks
        state = {name: tensor.contiguous() for name, tensor in self._handed.state().items()}
        content = save({_STEP: torch.tensor(self._step), **state})
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore a saved step and masks.

        Raises:
            SpecError: it is not what :meth:`get_extra_state` returned, such as an average.
        """
        try:
            saved = load(state.cpu().numpy().tobytes())
        except SafetensorError as error:
            raise SpecError(
                "prepared module",
                f"cannot read its step and masks from _extra_state ({error})",
                "load it as state_dict() gave it; average parameters and buffers only",
            ) from error
        self._step = int(saved.pop(_STEP))
        self._handed.load(saved)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: in a copy, masks and bounds of scales would act on this module's parameters."""
        raise SpecError(
            "prepared module",
            "cannot be copied: masks and bounds of scales act on the parameters that prepare gave",
            "average or keep its state_dict(), and load that before convert",
        )

    def _begin(self) -> None:
        self._handed.before(self._step)
        self._seen = self._versions()
        self._stepped = False

    def _check_own(self) -> None:
        """Refuse parameters that are not those that masks and bounds of scales act on.

        ``fully_shard`` puts others in their place, and during ``forward`` whole copies of them,
        whose versions stay the same and which are thrown away.
        """
        present = {id(parameter) for parameter in self.network.parameters()}
        lost = sum(id(parameter) not in present for parameter in self._own)
        if lost:
            raise SpecError(
                "prepared module",
                f"{lost} of its {len(self._own)} parameters have been replaced since prepare, as "
                "fully_shard and load_state_dict(assign=True) do, so that masks and bounds of "
                "scales would not be applied",
                "keep its parameters whole: train it in one process or with "
                "DistributedDataParallel",
            )

    def _versions(self) -> int:
        """Return a number that changes when PyTorch sees that parameters are written."""
        return sum(parameter._version for parameter in self.network.parameters())


def _note_steps(prepared: PreparedModule) -> None:
    """Make optimizers tell a module of their steps: fused ones do not change versions."""
    held, own = weakref.ref(prepared), {id(parameter) for parameter in prepared._own}

    def note(optimizer: Optimizer, *_: Any) -> None:
        module = held()
        stepped = (id(p) in own for group in optimizer.param_groups for p in group["params"])
        if module is not None and any(stepped):
            module._stepped = True

    weakref.finalize(prepared, register_optimizer_step_post_hook(note).remove)


def _save_once(prepared: PreparedModule) -> None:
    """Leave further names of a tensor out of states: safetensors takes no tensor twice."""
    first: dict[int, str] = {}
    again: dict[str, str] = {}
    for named in (prepared.named_parameters, prepared.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if first.setdefault(id(tensor), name) != name:
                again[name] = first[id(tensor)]

    def leave_out(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for name in again:
            state.pop(prefix + name, None)

    def put_back(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for name, kept in again.items():
            if prefix + kept in state:
                state.setdefault(prefix + name, state[prefix + kept])

    prepared.register_state_dict_post_hook(leave_out)  # type: ignore[no-untyped-call]  # PyTorch's
    prepared.register_load_state_dict_pre_hook(put_back)  # type: ignore[no-untyped-call]


class _HandedOver(Exception):  # it ends a run at its training, and is not an error
    def __init__(self, handed: Handed):
        super().__init__()
        self.handed = handed


def prepare(
    module: nn.Module,
    passes: Spec | Sequence[Pass | Mapping[str, Any]],
    data: Any = None,
    *,
    evaluate: Any = None,
    metric: MetricLike | None = None,
) -> PreparedModule:
    """Return a module for a training loop of the program's own.

    The passes before the training pass are applied; the training pass calibrates, and then returns
    the module that it would train. ``qat`` adds fake quantization, ``distill`` a loss against the
    teacher, and the option ``prune`` of both adds masks.

    Example:
        >>> prepared = compressor.prepare(module, [{"pass": "qat", "loss": "mse"}], loader)
        >>> result = compressor.convert(train(prepared))

    Args:
        module: the module, which is not modified.
        passes: the passes, exactly one of which trains; or a whole spec, whose model is replaced
            by the module.
        data: calibration data, as for :func:`compressor.quantize`.
        evaluate: evaluation data for :func:`convert`.
        metric: the metric of that evaluation.

    Raises:
        SpecError: not exactly one of the passes trains, or one depends on the number of steps,
            which is not given.
        CompressorError: the module or the data cannot be used.
    """
    check_arguments(prepare, locals())
    if not isinstance(passes, Spec):
        given = first_samples(data)
        sources = {"calibration": given, "training": given, "evaluation": evaluate}
        passes = Spec(
            name=model_name(module),
            model=module,
            data={role: source for role, source in sources.items() if source is not None},
            metric=metric,
            passes=passes,
            exports=[ONNX],
        )
    folder = None
    spec = checked(replace(passes, model=module))
    _check_one_trains(spec)
    if passes.output is None:
        folder = TemporaryFolder()
        spec = replace(spec, output=folder.path / spec.name)
    with apart_from_the_program():
        plan = make_plan(spec)
        workspace = Workspace(
            plan, Store(store_of(spec.output)), SILENT, RunOptions(loop=OwnLoop("", _take))
        )
        with workspace.store.locked():
            handed = _handed_by(workspace)
            source = plan.model.carrier
            assert isinstance(source, TorchCarrier)
            form = output_form(source.module, workspace)
    return PreparedModule(handed, form, spec, folder).train()


def convert(prepared: nn.Module) -> RunResult:
    """Finish the run of a module that the program has trained: passes, artifacts and report.

    The result is the same as if the spec's own training had produced these weights. The module may
    be trained further and converted again.

    Args:
        prepared: the module of :func:`prepare`, or a wrapper of it, as ``torch.compile`` returns.

    Example:
        >>> compressor.convert(prepared).save("out/edge")

    Raises:
        SpecError: the module was not prepared, or its parameters have been replaced, as by
            sharding.
        CompressorError: the run cannot continue.
    """
    prepared = unwrapped(prepared)
    if not isinstance(prepared, PreparedModule):
        raise SpecError(
            "convert",
            f"takes what compressor.prepare returned, and was given a {type(prepared).__name__}",
            "train that module, or take it out of its wrapper",
        )
    prepared.settle()
    state = prepared.network.state_dict()
    trained = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}

    def given(handed: Handed) -> Mapping[str, Tensor]:
        del handed  # it is the same network once more
        return trained

    result = run(prepared.spec, RunOptions(loop=OwnLoop(content_digest(trained), given)))
    return replace(result, kept=prepared._folder)


def _take(handed: Handed) -> NoReturn:
    raise _HandedOver(handed)


def _handed_by(workspace: Workspace) -> Handed:
    try:
        run_passes(workspace)
    except _HandedOver as over:
        return over.handed
    raise AssertionError("the pass that trains did not")


def _check_one_trains(spec: CheckedSpec) -> None:
    training = [declared.name for declared in spec.passes if isinstance(declared, TrainPass)]
    if len(training) != 1:
        what = f"{listed(training)} train" if training else "none of them trains"
        raise SpecError(
            "passes", f"cannot be prepared: {what}", "give one of qat, distill and finetune"
        )
