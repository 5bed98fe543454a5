"""The digits sample: what its README states about data, checkpoint and training holds."""

from pathlib import Path

import numpy as np
import pytest
import torch

from samples.digits import data, prepare, train
from samples.digits.model import digits_net

FOLDER = Path(train.__file__).parent


@pytest.fixture(scope="module")
def trained() -> torch.nn.Module:
    model = digits_net()
    model.load_state_dict(torch.load(FOLDER / "digits.pt", weights_only=True))
    return model.eval()


def test_checkpoint_reaches_the_stated_accuracy(trained: torch.nn.Module) -> None:
    # 498 of 500; one sample of room for another CPU's rounding.
    assert train.accuracy(trained) >= 99.4


def test_checkpoint_is_small() -> None:
    assert (FOLDER / "digits.pt").stat().st_size < 500_000


def test_checkpoint_does_not_depend_on_the_batch(trained: torch.nn.Module) -> None:
    images = torch.from_numpy(data.normalize(train.load("test"))["image"][:8])
    with torch.inference_mode():
        together, alone = trained(images), torch.cat([trained(image[None]) for image in images])
    assert together.shape == (8, 10)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_committed_data_is_what_prepare_makes() -> None:
    for split, made in prepare.splits().items():
        committed = train.load(split)
        assert made.keys() == committed.keys()
        for name, values in made.items():
            assert values.dtype == committed[name].dtype
            np.testing.assert_array_equal(values, committed[name])


def test_splits_are_stratified_and_apart() -> None:
    training, test = train.load("train"), train.load("test")
    assert (len(training["label"]), len(test["label"])) == (1297, 500)
    counts = np.bincount(test["label"])
    assert len(counts) == 10
    assert counts.min() >= 48
    seen = {image.tobytes() for image in training["image"]}
    assert not any(image.tobytes() in seen for image in test["image"])


def test_normalize_scales_the_image_and_leaves_the_label() -> None:
    label = np.arange(2)
    image = np.stack([np.zeros((8, 8), np.uint8), np.full((8, 8), 16, np.uint8)])
    batch = data.normalize({"image": image, "label": label})
    assert batch["label"] is label
    assert batch["image"].dtype == np.float32
    expected = np.stack([np.full((1, 8, 8), -1.0), np.full((1, 8, 8), 1.0)])
    np.testing.assert_array_equal(batch["image"], expected)


def test_augment_shifts_each_image_by_at_most_one_pixel() -> None:
    batch = {name: values[:64] for name, values in train.load("train").items()}
    augmented = data.augment(batch, np.random.default_rng(3))
    assert augmented["label"] is batch["label"]
    assert augmented["image"].shape == (64, 1, 8, 8)

    padded = np.pad(batch["image"], ((0, 0), (1, 1), (1, 1)))
    used = set()
    for index, image in enumerate(augmented["image"]):
        shifts = [
            (top, left)
            for top in range(3)
            for left in range(3)
            if np.array_equal(image[0], padded[index, top : top + 8, left : left + 8] / 8.0 - 1)
        ]
        assert shifts, f"image {index} is no shift of its original"
        used.add(shifts[0])
    assert len(used) == 9


def test_augment_follows_its_generator() -> None:
    batch = train.load("test")
    first, again, other = (
        data.augment(batch, np.random.default_rng(seed))["image"] for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_training_learns_and_repeats() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first, again = train.train(epochs=1), train.train(epochs=1)
        assert train.accuracy(first) > 40  # 69.8 measured; chance is 10
    finally:
        torch.set_num_threads(threads)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
