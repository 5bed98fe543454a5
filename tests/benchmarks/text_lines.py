"""Lines of text to read: words of a play, drawn, turned, blurred and noisy, with their characters.

For the recognizer of PP-OCRv4, as the package rapidocr-onnxruntime has it. Pillow's own font is
the only one, so that every machine draws the same lines.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from compressor.graph.costs import node_macs
from compressor.graph.operators import operator
from compressor.types.tensors import Array

HEIGHT, WIDTH, MOST = 48, 320, 48  # pixels, pixels, characters of a line
COUNTS = {"calibration": 256, "search": 512, "evaluation": 1024}


def characters(scores: Array) -> list[int]:
    """Return the numbers of the characters that scores ``[steps, classes]`` say, without spaces.

    Equal numbers in a row are one character, and 0 is none (CTC: Graves et al. 2006).
    """
    best, space = scores.argmax(axis=-1).tolist(), scores.shape[-1] - 1
    return [c for c, before in zip(best, [0, *best], strict=False) if c not in (0, before, space)]


def right_lines(outputs: Array, target: Array) -> Array:
    """Return 1 for each line that was read right, else 0."""
    pairs = zip(outputs, target, strict=True)
    return np.array([characters(o) == [c for c in t if c] for o, t in pairs], float)


def write(folder: Path, model: Path, text: Path) -> None:
    """Write ``lines.npz``: images ``[N, 3, 48, 320]`` and characters ``[N, 48]`` of each role."""
    (known,) = (p.value for p in onnx.load(model).metadata_props if p.key == "character")
    numbers = {character: i for i, character in enumerate(known.split("\n"), 1)}
    words = re.findall(r"[A-Za-z',.;:!?]+", text.read_text(encoding="utf-8"))
    random, arrays = np.random.default_rng(0), dict[str, Array]()
    for role, count in COUNTS.items():
        made = [_line(random, words, numbers) for _ in range(count)]
        arrays[role] = np.stack([image for image, _ in made])
        arrays[f"{role}_characters"] = np.stack([line for _, line in made])
    np.savez(folder / "lines.npz", **arrays)  # type: ignore[arg-type]


def _line(
    random: np.random.Generator, words: list[str], numbers: dict[str, int]
) -> tuple[Array, Array]:
    """Return an image of a line, and the numbers of its characters, filled with zeros."""
    start = int(random.integers(0, len(words) - 5))
    text = " ".join(words[start : start + int(random.integers(1, 5))])
    text += f" {random.integers(0, 10000)}" if random.random() < 0.3 else ""
    size, paper, ink = (int(random.integers(*x)) for x in ((18, 34), (150, 256), (0, 100)))
    font = ImageFont.load_default(size=size)
    image = Image.new("L", (max(40, int(font.getlength(text)) + 12), size + 14), paper)
    ImageDraw.Draw(image).text((6, 4), text, ink, font=font)
    turn = float(random.normal(0, 1.0))
    image = image.rotate(turn, fillcolor=paper, resample=Image.Resampling.BILINEAR)
    image = image.filter(ImageFilter.GaussianBlur(float(random.uniform(0, 1.0))))
    width = min(WIDTH, max(16, round(HEIGHT * image.width / image.height)))
    drawn = np.asarray(image.resize((width, HEIGHT), Image.Resampling.BILINEAR), np.float32)
    drawn = drawn + random.normal(0, random.uniform(0, 12), drawn.shape)
    line = np.zeros((3, HEIGHT, WIDTH), np.float32)
    line[:, :, :width] = np.clip(drawn, 0, 255) / 127.5 - 1
    found = [numbers[c] for c in text if c in numbers][:MOST]
    return line, np.array(found + [0] * (MOST - len(found)), np.int64)


def float_share(file: Path) -> float:
    """Return the share of multiply-accumulates of an ONNX file whose inputs are floats."""
    proto = onnx.load(file)
    for place, size in enumerate((1, 3, HEIGHT, WIDTH)):
        proto.graph.input[0].type.tensor_type.shape.dim[place].dim_value = size
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    whole = floats = 0
    for node in model.graph:
        count = node_macs(node)
        makers = [None if value is None else value.producer() for value in node.inputs[:2]]
        coded = all(maker is not None and operator(maker).dequantizes for maker in makers)
        whole += count
        floats += 0 if coded else count
    return floats / whole
