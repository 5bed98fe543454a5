"""The CIFAR-10 sample: the network fits the published checkpoint, the transforms are right."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import samples
from compressor.cli.application import application
from compressor.run.verdicts.verdicts import AGREES
from samples.cifar import data
from samples.cifar.model import ZeroPadShortcut, resnet20


def published_file(name: str) -> Path:
    folder = os.environ.get("COMPRESSOR_DATA")
    if not folder:
        pytest.skip("COMPRESSOR_DATA is not set")
    path = Path(folder) / name
    if not path.exists():
        pytest.skip(f"COMPRESSOR_DATA holds no {name}")
    return path


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Return name → shape of every tensor in the published state dict, prefix stripped."""
    shapes: dict[str, tuple[int, ...]] = {}

    def convolution(prefix: str, number: int, out: int, columns: int) -> None:
        shapes[f"{prefix}conv{number}.weight"] = (out, columns, 3, 3)
        for name in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{prefix}bn{number}.{name}"] = (out,)

    convolution("", 1, 16, 3)
    for layer, before, out in ((1, 16, 16), (2, 16, 32), (3, 32, 64)):
        for block in range(3):
            prefix = f"layer{layer}.{block}."
            convolution(prefix, 1, out, before if block == 0 else out)
            convolution(prefix, 2, out, out)
    shapes["linear.weight"] = (10, 64)
    shapes["linear.bias"] = (10,)
    return shapes


def test_names_and_shapes_are_the_published_ones() -> None:
    model = resnet20()
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        # The checkpoint is older than this counter, which inference does not use.
        if not name.endswith("num_batches_tracked")
    }
    assert shapes == published_shapes()
    assert len(shapes) == 97
    # The paper's option A; option B's projections would make it 272,474.
    assert sum(parameter.numel() for parameter in model.parameters()) == 269_722


def test_shortcut_samples_every_second_pixel_and_pads_both_sides() -> None:
    x = torch.arange(1, 1 + 2 * 16 * 4 * 4).reshape(2, 16, 4, 4)
    y = ZeroPadShortcut(16, 32)(x)
    assert y.shape == (2, 32, 2, 2)
    assert torch.equal(y[:, 8:24], x[:, :, 0::2, 0::2])
    assert not y[:, :8].any()
    assert not y[:, 24:].any()


def test_normalize_standardizes_channels() -> None:
    image = np.zeros((1, 32, 32, 3), np.uint8)
    image[0, 4, 7] = (255, 128, 0)
    label = np.zeros(1, np.int64)
    batch = data.normalize({"image": image, "label": label})
    assert batch["label"] is label
    assert batch["image"].dtype == np.float32
    assert batch["image"].shape == (1, 3, 32, 32)
    expected = [(1 - 0.485) / 0.229, (128 / 255 - 0.456) / 0.224, (0 - 0.406) / 0.225]
    np.testing.assert_allclose(batch["image"][0, :, 4, 7], expected, rtol=1e-5)


def test_augment_flips_and_crops() -> None:
    rng = np.random.default_rng(0)
    samples = 32
    image = rng.integers(1, 256, (samples, 32, 32, 3)).astype(np.uint8)
    batch = {"image": image, "label": np.arange(samples)}
    augmented = data.augment(batch, rng)
    assert augmented["label"] is batch["label"]
    assert augmented["image"].dtype == np.float32

    padded = np.pad(image, ((0, 0), (4, 4), (4, 4), (0, 0)))
    mirrored = np.pad(image[:, :, ::-1], ((0, 0), (4, 4), (4, 4), (0, 0)))
    flips = [
        flipped
        for index in range(samples)
        for flipped, source in ((False, padded[index]), (True, mirrored[index]))
        if is_crop(augmented["image"][index], source)
    ]
    assert len(flips) == samples
    assert 0 < sum(flips) < samples


def is_crop(normalized: np.ndarray, padded: np.ndarray) -> bool:
    """Whether `normalized` [3, 32, 32] is one of the 81 crops of `padded` [40, 40, 3]."""
    crops = [padded[top : top + 32, left : left + 32] for top in range(9) for left in range(9)]
    candidates = data.normalize({"image": np.stack(crops)})["image"]
    return bool((candidates == normalized).all(axis=(1, 2, 3)).any())


def test_published_checkpoint_reaches_its_accuracy() -> None:
    checkpoint = torch.load(
        published_file("resnet20_cifar10.th"), weights_only=True, map_location="cpu"
    )
    model = resnet20().eval()
    state = checkpoint["state_dict"].items()
    model.load_state_dict({name.removeprefix("module."): tensor for name, tensor in state})
    with np.load(published_file("cifar10_test2000.npz")) as file:
        batch = data.normalize({"image": file["image"][:500], "label": file["label"][:500]})
    with torch.inference_mode():
        predicted = model(torch.from_numpy(batch["image"])).argmax(1).numpy()
    # Measured 80.4 on these 500 and 81.35 on all 2000; a wrong shortcut or scaling falls far below.
    assert 100 * np.mean(predicted == batch["label"]) == pytest.approx(80.4, abs=0.6)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["openvino", "tensorrt"])
def test_another_runtime_may_round_otherwise(target: str, tmp_path: Path) -> None:
    """Its outputs are near those of the quantized model, or no further from the float model."""
    published_file("resnet20_cifar10.th")
    if target == "openvino":
        pytest.importorskip("openvino")
    spec = Path(samples.__file__).parent / "cifar" / "spec.yaml"
    settings = [f"exports.1.target={target}", f"output={tmp_path / 'out'}"]
    command = ["run", str(spec), "--quiet", *(part for s in settings for part in ("--set", s))]
    result = CliRunner().invoke(application, command)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    checks = [check for artifact in report["artifacts"] for check in artifact["checks"]]
    assert {check["name"] for check in checks} >= {AGREES}
    assert all(check["ok"] for check in checks)
