"""A training's state on disk: safetensors and JSON, under hashes, so that no code runs from it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from compressor.files import damage, disk_errors, seal, staging, sync
from compressor.models.torch.matching import load_tensors
from compressor.passes.train.job import Regulator
from compressor.types.data import Ranks

if TYPE_CHECKING:
    from accelerate import Accelerator

_STATE, _BEST = "state-", "best-"
_PARTIAL = "partial-state"
_MODEL, _OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_PROGRESS = "progress.json"
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)


@dataclass(frozen=True)
class Prepared:
    """The trained module and optimizer, as the accelerator has prepared them."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def spread(self) -> bool:
        """Whether each process holds a part of the weights: FSDP."""
        return str(self.accelerator.distributed_type.value) == "FSDP"

    def weights(self) -> dict[str, Tensor]:
        """Return parameters and buffers, on the CPU; all processes have to ask."""
        state = self.accelerator.get_state_dict(self.model)
        return {name: tensor.detach().cpu() for name, tensor in state.items()}

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Load what :meth:`weights` returned."""
        if self.spread:
            set_model_state_dict(self.model, weights, options=_FULL)
        else:
            load_tensors(self.accelerator.unwrap_model(self.model), weights)

    def moments(self) -> dict[str, Any]:
        """Return the optimizer's state; all processes have to ask."""
        if self.spread:
            return get_optimizer_state_dict(self.model, self.optimizer, options=_FULL)
        return self.optimizer.state_dict()

    def load_moments(self, state: dict[str, Any]) -> None:
        """Load what :meth:`moments` returned."""
        if self.spread:
            set_optimizer_state_dict(self.model, self.optimizer, state, options=_FULL)
        else:
            self.optimizer.load_state_dict(state)


class SavedState:
    """The states of one training, in a folder of its own that outlives the process.

    Weights, optimizer, regulators, loss scale, and the generators of random numbers that no step
    seeds. The first process publishes what all have gathered.

    Args:
        note: called with one line if a state is damaged.
    """

    def __init__(
        self,
        folder: Path,
        prepared: Prepared,
        regulators: tuple[Regulator, ...],
        ranks: Ranks,
        note: Callable[[str], None],
    ):
        self._folder = folder
        self._prepared = prepared
        self._regulators = regulators
        self._ranks = ranks
        self._note = note

    def save(self, step: int, progress: Mapping[str, Any]) -> None:
        """Write the state after ``step`` steps, and remove older ones.

        Raises:
            InputError: the disk is full; the previous state stays.
        """
        partial, first = self._folder / _PARTIAL, self._ranks.rank == 0
        with disk_errors(self._folder):
            if first:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            self._ranks.wait()
            _write(partial / _random(self._ranks.rank), _generators())
            weights = self._prepared.weights()
            moments, optimizer = flat(self._prepared.moments())
            self._ranks.wait()
            if first:
                _save(weights, partial / _MODEL)
                _save(moments, partial / _OPTIMIZER)
                for number, regulator in enumerate(self._regulators):
                    _save(regulator.state_dict(), partial / _regulator(number))
                scaler = self._prepared.accelerator.scaler
                scale = None if scaler is None else scaler.state_dict()
                document = {"step": step, "optimizer": optimizer, "scaler": scale, **progress}
                _write(partial / _PROGRESS, document)
                self._publish(partial, f"{_STATE}{step:09d}")
        self._ranks.wait()

    def restore(self) -> dict[str, Any] | None:
        """Load the newest state; return what was saved with it, or ``None`` if there is none.

        If one is damaged, all go, and the training begins again.
        """
        if self._ranks.rank == 0:
            self._remove_damaged()
        self._ranks.wait()
        states = self._all(_STATE)
        if not states:
            return None
        state, prepared = states[-1], self._prepared
        document = _read(state / _PROGRESS)
        prepared.load_weights(load_file(state / _MODEL))
        prepared.load_moments(deep(load_file(state / _OPTIMIZER), document["optimizer"]))
        for number, regulator in enumerate(self._regulators):
            regulator.load_state_dict(load_file(state / _regulator(number)))
        if document["scaler"] is not None:
            prepared.accelerator.scaler.load_state_dict(document["scaler"])
        _set_generators(_read(state / _random(self._ranks.rank)))
        return document

    def save_best(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep weights as the best so far."""
        if self._ranks.rank == 0:
            with staging(self._folder) as staged:
                folder = staged / _BEST
                folder.mkdir()
                _save(tensors, folder / _MODEL)
                self._publish(folder, f"{_BEST}{step:09d}")
        self._ranks.wait()

    def best(self) -> dict[str, Tensor]:
        """Return the best weights."""
        return load_file(self._all(_BEST)[-1] / _MODEL)

    def _publish(self, folder: Path, name: str) -> None:
        """Give a folder its name, and remove the older ones of its kind."""
        seal(folder)
        target = self._folder / name
        if target.exists():
            shutil.rmtree(target)
        folder.replace(target)
        sync(self._folder)
        for other in self._all(name.partition("-")[0]):
            if other != target:
                shutil.rmtree(other)

    def _remove_damaged(self) -> None:
        folders = [*self._all(_STATE), *self._all(_BEST)]
        problem = next(filter(None, map(damage, folders)), "")
        if not problem and folders:
            newest = self._all(_STATE)[-1:]
            judged = any(_read(state / _PROGRESS)["validations"] for state in newest)
            problem = "the best weights are missing" if judged and not self._all(_BEST) else ""
        if problem:
            self._note(f"the saved state of a training is damaged ({problem}): it begins again")
            for folder in folders:
                shutil.rmtree(folder)

    def _all(self, kind: str) -> list[Path]:
        return sorted(self._folder.glob(f"{kind}*"))


def flat(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Divide an optimizer's state into tensors and what JSON holds; :func:`deep` is the inverse.

    PyTorch numbers the parameters, and with FSDP they have names.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, entries in state["state"].items():
        values[str(parameter)] = {n: v for n, v in entries.items() if not isinstance(v, Tensor)}
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{name}:{parameter}"] = value
    return tensors, {"groups": state["param_groups"], "values": values}


def deep(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state from what :func:`flat` made of it."""
    names = [parameter for group in rest["groups"] for parameter in group["params"]]
    by_text = {str(name): name for name in names}
    state = {by_text[text]: dict(entries) for text, entries in rest["values"].items()}
    for key, tensor in tensors.items():
        name, _, text = key.partition(":")
        state[by_text[text]][name] = tensor
    return {"state": state, "param_groups": rest["groups"]}


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors; one that several names share is written for each of them."""
    written: set[int] = set()
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        here = tensor.detach().cpu().contiguous()
        copies[name] = here.clone() if here.data_ptr() in written else here
        written.add(here.data_ptr())
    save_file(copies, path)


def _generators() -> dict[str, Any]:
    """Return the state of Python's and numpy's generators; each step seeds PyTorch's."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 - that is what may be used
    return {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}


def _set_generators(saved: Mapping[str, Any]) -> None:
    version, numbers, gauss = saved["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = saved["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))  # noqa: NPY002 - likewise


def _random(rank: int) -> str:
    return f"random-{rank}.json"


def _regulator(number: int) -> str:
    return f"regulator-{number}.safetensors"


def _write(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document
