"""ResNet-50 in plain torch, for benchmarks of what a run costs."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
EXPANSION = 4


def convolution(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    """Return a convolution without a bias, and its batch normalization."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Bottleneck(nn.Module):
    """A residual block: 1 x 1, 3 x 3 and 1 x 1 convolutions (He et al. 2016, version 1.5)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.first = convolution(inputs, width)
        self.second = convolution(width, width, 3, stride)
        self.third = convolution(width, outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

    def forward(self, image: Tensor) -> Tensor:
        inner = functional.relu(self.second(functional.relu(self.first(image))))
        return functional.relu(self.third(inner) + self.shortcut(image))


class ResNet50(nn.Module):
    """ResNet-50 for images of any size, with a thousand classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = convolution(3, 64, 7, 2)
        blocks: list[nn.Module] = []
        inputs = 64
        for stage, (width, count) in enumerate(STAGES):
            for index in range(count):
                blocks.append(Bottleneck(inputs, width, 2 if stage and not index else 1))
                inputs = EXPANSION * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, image: Tensor) -> Tensor:
        features = functional.max_pool2d(functional.relu(self.stem(image)), 3, 2, 1)
        logits: Tensor = self.head(self.blocks(features).mean((2, 3)))
        return logits


def resnet50() -> ResNet50:
    """Return the network; the spec's seed decides its weights."""
    return ResNet50()
