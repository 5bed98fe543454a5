"""What happens to a batch of CIFAR-10 images between the npz file and the network.

A transform takes and returns a dictionary of arrays whose first axis is the batch. Both here read
`image`, uint8 [N, 32, 32, 3], and leave every other entry (the label) as it is.
"""

import numpy as np

MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
STD = np.array([0.229, 0.224, 0.225], dtype=np.float32)
MARGIN = 4

Batch = dict[str, np.ndarray]


def normalize(batch: Batch) -> Batch:
    """Return the batch with `image` as float32 [N, 3, 32, 32], standardized per channel."""
    image = (batch["image"].astype(np.float32) / 255 - MEAN) / STD
    return {**batch, "image": np.ascontiguousarray(image.transpose(0, 3, 1, 2))}


def augment(batch: Batch, rng: np.random.Generator) -> Batch:
    """Flip half of the images, crop each from a zero-padded copy at random, then normalize."""
    image = batch["image"]
    samples, height, width, _ = image.shape
    flip = rng.random((samples, 1, 1, 1)) < 0.5
    image = np.where(flip, image[:, :, ::-1], image)
    margin = (MARGIN, MARGIN)
    padded = np.pad(image, ((0, 0), margin, margin, (0, 0)))
    # [N, top, left, 3, 32, 32]: a view of all crops, of which one per image is copied.
    crops = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))
    top, left = rng.integers(0, 2 * MARGIN + 1, size=(2, samples))
    cropped = crops[np.arange(samples), top, left].transpose(0, 2, 3, 1)
    return normalize({**batch, "image": cropped})
