"""A checkpoint's tensors against those of a module."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from compressor.errors import ModelError
from compressor.models.torch.carrier import open_module
from compressor.models.torch.matching import check_finite, check_names, load_into
from compressor.passes.train.saved_state import Prepared
from tests.compressor.models.sample_modules import spec


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 3))


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    made = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 3)).state_dict()
    return {name: tensor.clone() for name, tensor in made.items()}


def refusal(tensors: dict[str, torch.Tensor]) -> str:
    with pytest.raises(ModelError) as caught:
        check_names(network(), tensors, "w.pt")
    return str(caught.value)


def test_tensors_are_copied():
    module, tensors = network(), state()
    load_into(module, tensors, "w.pt")
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, tensors[name])
        assert tensor.data_ptr() != tensors[name].data_ptr()


def test_half_precision_becomes_the_module_s_own():
    module = network()
    load_into(module, {n: t.half() for n, t in state().items()}, "w.pt")
    assert module[0].weight.dtype == torch.float32
    assert torch.equal(module[0].weight, state()["0.weight"].half().float())


def test_old_checkpoints_lack_the_batch_counter():
    tensors = state()
    del tensors["1.num_batches_tracked"]
    load_into(network(), tensors, "w.pt")


class Versioned(nn.Module):
    """Reads states of its second version only, as torchvision's MNASNet does."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def _load_from_state_dict(
        self, state: Any, prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        if local_metadata.get("version") != 2:
            raise ValueError(f"version {local_metadata.get('version')}")
        super()._load_from_state_dict(state, prefix, local_metadata, *others)


def by_carrier(module: nn.Module, tensors: dict[str, torch.Tensor]) -> nn.Module:
    carrier = open_module(lambda: module, {}, [spec("x", "n", 3)], "key")
    return carrier.with_weights(tensors).module


def by_training(module: nn.Module, tensors: dict[str, torch.Tensor]) -> nn.Module:
    kind = SimpleNamespace(value="NO")
    accelerator: Any = SimpleNamespace(distributed_type=kind, unwrap_model=lambda model: model)
    optimizer = torch.optim.SGD(module.parameters())
    Prepared(accelerator, module, optimizer).load_weights(tensors)
    return module


def by_checkpoint(module: nn.Module, tensors: dict[str, torch.Tensor]) -> nn.Module:
    load_into(module, tensors, "w.pt")
    return module


@pytest.mark.parametrize("load", [by_carrier, by_training, by_checkpoint])
def test_a_module_that_reads_several_versions_gets_its_own(
    load: Callable[[nn.Module, dict[str, torch.Tensor]], nn.Module],
):
    module = nn.Sequential(Versioned())
    tensors = {name: tensor + 1 for name, tensor in module.state_dict().items()}
    found = load(module, tensors).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_missing():
    tensors = state()
    del tensors["2.bias"], tensors["1.running_var"]
    assert refusal(tensors) == (
        "checkpoint 'w.pt': lacks '1.running_var', '2.bias'; "
        "check that the factory builds the network that was saved"
    )


def test_unexpected():
    extra = {f"extra{i}": torch.zeros(1) for i in range(7)}
    assert refusal({**state(), **extra}).startswith(
        "checkpoint 'w.pt': has unexpected 'extra0', 'extra1', 'extra2', 'extra3', 'extra4' "
        "and 2 more; check that"
    )


def test_renamed_tensors_are_paired():
    tensors = {n.replace("2.", "head.2."): t for n, t in state().items()}
    message = refusal(tensors)
    assert "lacks '2.weight', '2.bias' and has unexpected 'head.2.weight', 'head.2.bias'" in message
    assert message.endswith(
        "'2.weight' may be its 'head.2.weight'; '2.bias' may be its 'head.2.bias': "
        "save the tensors under the module's own names"
    )


def test_tensors_of_another_shape_are_no_renamed_ones():
    tensors = {n.replace("2.", "head.2."): torch.zeros(*t.shape, 2) for n, t in state().items()}
    assert refusal(tensors).endswith("check that the factory builds the network that was saved")


@pytest.mark.parametrize("prefix", ["net.", "model.backbone."])
def test_the_prefix_of_a_training_class_is_no_part_of_the_names(prefix: str):
    module, tensors = network(), {prefix + n: t for n, t in state().items()}
    load_into(module, tensors, "w.pt")
    assert all(torch.equal(module.state_dict()[n], t) for n, t in state().items())
    assert "unexpected" in refusal({**tensors, "loss.weight": torch.zeros(1)})


def test_another_shape():
    assert refusal({**state(), "2.weight": torch.zeros(4, 2)}) == (
        "checkpoint 'w.pt': has '2.weight' with shape [4, 2], the factory's module expects [3, 2]; "
        "build the network with the sizes it was trained with (model.config)"
    )


def test_headers_are_enough():
    check_names(network(), {n: t.to("meta") for n, t in state().items()}, "w.pt")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite(value: float):
    tensors = state()
    tensors["2.weight"][1] = value
    with pytest.raises(ModelError, match=r"'2.weight' holds 2 values that are NaN or infinite"):
        load_into(network(), tensors, "w.pt")
    check_finite({"count": torch.tensor([3])}.items(), "w.pt")


def test_a_mask_may_be_infinite_but_not_nan():
    module = torch.nn.Linear(2, 2)
    module.register_buffer("mask", torch.zeros(2))
    tensors = {**module.state_dict(), "mask": torch.tensor([0.0, -torch.inf])}
    load_into(module, tensors, "w.pt")
    assert torch.isneginf(module.mask).any()
    tensors["mask"] = torch.tensor([0.0, torch.nan])
    with pytest.raises(ModelError, match="'mask' holds 1 values"):
        load_into(module, tensors, "w.pt")


def test_codes_are_not_taken_for_weights():
    module = torch.nn.Linear(2, 2)
    tensors = {**module.state_dict(), "weight": torch.ones(2, 2, dtype=torch.int8)}
    with pytest.raises(ModelError, match="'weight' as int8, the module expects floating point"):
        load_into(module, tensors, "w.pt")
