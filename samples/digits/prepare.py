"""Write `train.npz` and `test.npz` from the handwritten digits that ship with scikit-learn.

Run `python -m samples.digits.prepare`; the files are in the repository, so nobody has to.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

HERE = Path(__file__).parent
SEED = 0
TEST_SAMPLES = 500


def splits() -> dict[str, dict[str, np.ndarray]]:
    """Return the stratified splits `train` (1297 samples) and `test` (500).

    Each holds `image`, uint8 [N, 8, 8] with values 0..16, and `label`, int64 [N].
    """
    digits = load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target.astype(np.int64)
    train, test = train_test_split(
        np.arange(len(labels)), test_size=TEST_SAMPLES, random_state=SEED, stratify=labels
    )
    return {
        name: {"image": images[rows], "label": labels[rows]}
        for name, rows in (("train", train), ("test", test))
    }


def main() -> None:
    """Write both files beside this module; the same arrays give the same bytes."""
    for name, arrays in splits().items():
        # numpy stamps every member 1980-01-01, so no clock time gets in.
        np.savez_compressed(HERE / f"{name}.npz", image=arrays["image"], label=arrays["label"])


if __name__ == "__main__":
    main()
