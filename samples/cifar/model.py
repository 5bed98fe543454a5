"""ResNet-20 for CIFAR-10: K. He et al., Deep Residual Learning, 2015, section 4.2.

Parameters are named as in the public checkpoint of akamaster/pytorch_resnet_cifar10, without its
prefix `module.`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10
WIDTHS = (16, 32, 64)
BLOCKS_PER_STAGE = 3


class ZeroPadShortcut(nn.Module):
    """Option A of the paper: keep every second row and column, pad the new channels with zeros.

    It has no parameters. The zeros go half before and half after the old channels, which is what
    the public checkpoint was trained with.
    """

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        new = channels_out - channels_in
        self.before, self.after = new // 2, new - new // 2

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, channels_in, H, W] to [N, channels_out, H / 2, W / 2]."""
        return functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.before, self.after))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch-norm and a shortcut without parameters."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1:
            self.shortcut = ZeroPadShortcut(channels_in, channels_out)

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, channels_in, H, W] to [N, channels_out, H / stride, W / stride]."""
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def stage(channels_in: int, channels_out: int) -> nn.Sequential:
    """Return the blocks of one resolution; the first halves it where the width changes."""
    stride = 1 if channels_in == channels_out else 2
    rest = (BasicBlock(channels_out, channels_out, 1) for _ in range(BLOCKS_PER_STAGE - 1))
    return nn.Sequential(BasicBlock(channels_in, channels_out, stride), *rest)


class ResNet20(nn.Module):
    """3x3 stem, three stages of three blocks, global average pooling, linear head."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third = WIDTHS
        self.conv1 = nn.Conv2d(3, first, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        self.layer1 = stage(first, first)
        self.layer2 = stage(first, second)
        self.layer3 = stage(second, third)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(third, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Map images [N, 3, 32, 32] to logits [N, 10]."""
        x = torch.relu(self.bn1(self.conv1(image)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(self.pool(x).flatten(1))
        return logits


def resnet20() -> nn.Module:
    """Return an untrained ResNet-20 with 269,722 parameters."""
    return ResNet20()
