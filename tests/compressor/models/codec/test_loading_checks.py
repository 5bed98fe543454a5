"""Tensors are compared with their checksums when they are first read."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors import safe_open

from compressor.errors import ModelError
from compressor.exporters import SafetensorsExporter
from compressor.models.codec.headers import read_header
from compressor.models.codec.load import load
from compressor.models.lazy_tensor import CheckedTensor, OnceChecked, check_ahead
from compressor.models.onnx.carrier import OnnxCarrier
from tests.compressor.exporters.hand_made import CONTEXT, FEATURES, Builder, entry, quantized

X = torch.linspace(-1, 1, 2 * FEATURES).reshape(2, FEATURES)
CHANGED = r"tensor 'first\.weight' of weights .*model\.safetensors': .* checksum differs"


@pytest.fixture(params=[ir.DataType.INT8, ir.DataType.INT4], ids=["as it is", "packed"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    SafetensorsExporter().write(quantized(request.param), tmp_path, CONTEXT)
    return tmp_path


def flip(folder: Path, tensor: str, bit: int = 0) -> None:
    path = folder / "model.safetensors"
    place = read_header(path).tensors[tensor]
    data = bytearray(path.read_bytes())
    data[place.offset + place.nbytes // 2] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("dequantize", ["on-use", "once"])
def test_a_changed_tensor_is_refused_when_it_is_read(
    saved: Path, mmap: bool, dequantize: str
) -> None:
    flip(saved, "first.weight")
    module = load(saved, mmap=mmap, dequantize=dequantize)  # type: ignore[arg-type]  # of two words
    state = module.state_dict()
    assert state["first.weight"].dtype == torch.int8
    state["first.bias"].clone()  # the others are as they were
    for _ in range(2):  # and it stays refused
        with pytest.raises(ModelError, match=CHANGED):
            module(X)
        with pytest.raises(ModelError, match=CHANGED):
            state["first.weight"].clone()
    loose = load(saved, mmap=mmap, verify=False)
    assert loose(X)["output"].shape[0] == 2


def test_a_tensor_that_nobody_reads_is_not_compared(saved: Path) -> None:
    flip(saved, "first.weight")
    assert load(saved).state_dict()["first.weight"].shape[0] == FEATURES


def test_results_are_the_same_without_checks(saved: Path) -> None:
    checked, loose = load(saved), load(saved, verify=False)
    for _ in range(2):
        assert torch.equal(checked(X)["output"], loose(X)["output"])
    for name, tensor in loose.state_dict().items():
        assert torch.equal(checked.state_dict()[name], tensor)


def test_files_without_checksums_load(saved: Path) -> None:
    document = json.loads((saved / "model.json").read_bytes())
    del document["files"]
    for described in document["tensors"].values():
        del described["crc32"]
    (saved / "model.json").write_text(json.dumps(document))
    header = read_header(saved / "model.safetensors")
    with safe_open(saved / "model.safetensors", framework="pt") as file:
        assert file.metadata()["description"] == header.metadata["description"]
    text = (saved / "model.safetensors").read_bytes()
    other = text.replace(b'"description"', b'"descriptioX"')  # an earlier version's, and edited
    (saved / "model.safetensors").write_bytes(other)
    flip(saved, "first.weight")
    assert load(saved)(X)["output"].shape[0] == 2


def test_an_entry_that_is_no_checksum(saved: Path) -> None:
    document = json.loads((saved / "model.json").read_bytes())
    document["tensors"]["first.bias"]["crc32"] = 1
    (saved / "model.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"has an invalid checksum for 'first\.bias'"):
        load(saved)


def checked(values: torch.Tensor, calls: list[int]) -> CheckedTensor:
    return CheckedTensor(values, OnceChecked(lambda _: calls.append(1)))


def test_a_checked_tensor_is_an_ordinary_one() -> None:
    calls: list[int] = []
    values = torch.arange(4.0)
    tensor = checked(values, calls)
    assert (tensor.shape, tensor.dtype, tensor.numel()) == ((4,), torch.float32, 4)
    same = tensor.detach()
    assert not calls
    same += 1  # it may be written to, and shares its memory
    assert calls == [1]
    assert torch.equal(values, torch.arange(1.0, 5.0))
    tensor[0] = 7
    assert type(tensor + 1) is torch.Tensor
    np.testing.assert_array_equal(tensor.numpy(), values.numpy())
    assert tensor.data_ptr() == values.data_ptr()
    assert "7" in repr(tensor)
    assert calls == [1]


def test_a_checked_tensor_is_copied_and_saved_as_an_ordinary_one() -> None:
    calls: list[int] = []
    tensor = checked(torch.arange(3.0), calls)
    copied = copy.deepcopy(tensor)
    assert (type(copied), calls) == (torch.Tensor, [1])
    stream = io.BytesIO()
    torch.save(tensor, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=True), torch.arange(3.0))


def test_a_checked_tensor_as_a_parameter() -> None:
    calls: list[int] = []
    parameter = torch.nn.Parameter(checked(torch.ones(3), calls))
    (parameter.clone() * 2).sum().backward()
    assert parameter.grad is not None
    assert (parameter.grad.tolist(), calls) == ([2.0, 2.0, 2.0], [1])


@pytest.mark.parametrize("verify", [True, False])
def test_copies_of_all_sizes_and_types(verify: bool, tmp_path: Path) -> None:
    """One chunk, several, part of one, and none."""
    noise = np.random.default_rng(0)
    shapes = ((1 << 16,), (3, 1 << 15), (1 << 18, 3), (7,), (), (0, 3))
    arrays = {f"f{n}": noise.normal(size=s).astype(np.float32) for n, s in enumerate(shapes)}
    arrays["codes"] = noise.integers(-9, 9, (1 << 19) + 1, dtype=np.int8)
    arrays["mask"] = arrays["codes"] > 0
    made = Builder()
    constants = [made.constant(name, np.asarray(array)) for name, array in arrays.items()]
    model = made.model([entry(features=2)], made.node("Identity", constants[:1], "y"))
    SafetensorsExporter(sparse="never").write(OnnxCarrier(model), tmp_path, CONTEXT)
    state = load(tmp_path, verify=verify).state_dict()
    assert state.keys() == arrays.keys()
    for name, tensor in state.items():
        for _ in range(2):
            copied = tensor.clone()
            assert type(copied) is torch.Tensor
            np.testing.assert_array_equal(copied.numpy(), arrays[name])
        assert not copied.numel() or copied.data_ptr() != tensor.data_ptr()


def test_a_damaged_tensor_is_not_copied(saved: Path) -> None:
    flip(saved, "first.weight")
    tensor = load(saved).state_dict()["first.weight"]
    for _ in range(2):
        with pytest.raises(ModelError, match=CHANGED):
            tensor.clone()


def test_checks_ahead_leave_what_is_wrong_to_the_reader() -> None:
    def refuse(copy: memoryview | None) -> None:
        raise ModelError("tensor 'w'", "is another one", "copy it")

    good: list[int] = []
    tensors = [CheckedTensor(torch.ones(1), OnceChecked(refuse)), checked(torch.ones(1), good)]
    assert check_ahead(tensors)
    assert tensors[1].item() == 1
    assert good == [1]
    with pytest.raises(ModelError, match="is another one"):
        tensors[0].item()
    assert not check_ahead(tensors[1:])
