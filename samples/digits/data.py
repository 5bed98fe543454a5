"""What happens to a batch of digits between the npz file and the network.

A transform takes and returns a dictionary of arrays whose first axis is the batch. Both here read
`image`, uint8 [N, 8, 8] with values 0..16, and leave every other entry (the label) as it is.
"""

import numpy as np

BRIGHTEST = 16
MAX_SHIFT = 1

Batch = dict[str, np.ndarray]


def normalize(batch: Batch) -> Batch:
    """Return the batch with `image` as float32 [N, 1, 8, 8] in [-1, 1]."""
    image = batch["image"].astype(np.float32)[:, np.newaxis]
    return {**batch, "image": image / (BRIGHTEST / 2) - 1}


def augment(batch: Batch, rng: np.random.Generator) -> Batch:
    """Shift each image by up to one pixel along each axis, filling with 0, then normalize."""
    image = batch["image"]
    height, width = image.shape[1:]
    margin = (MAX_SHIFT, MAX_SHIFT)
    padded = np.pad(image, ((0, 0), margin, margin))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
    top, left = rng.integers(0, 2 * MAX_SHIFT + 1, size=(2, len(image)))
    return normalize({**batch, "image": windows[np.arange(len(image)), top, left]})
