"""A small residual network for 8x8 images of handwritten digits."""

import torch
from torch import Tensor, nn

CLASSES = 10


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; `y = relu(bn2(conv2(relu(bn1(conv1(x))))) + short(x))`.

    The shortcut is the identity where shapes agree and a strided 1x1 projection where they do not.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map [N, channels_in, H, W] to [N, channels_out, H / stride, W / stride]."""
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class DigitsNet(nn.Module):
    """Stem, one residual block at 8x8, one at 4x4, global average pooling, linear head."""

    def __init__(self, narrow: int = 48, wide: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, narrow, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(narrow)
        self.block1 = ResidualBlock(narrow, narrow)
        self.block2 = ResidualBlock(narrow, wide, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(wide, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        """Map images [N, 1, 8, 8] to logits [N, 10]."""
        x = torch.relu(self.bn(self.stem(image)))
        x = self.block2(self.block1(x))
        logits: Tensor = self.head(self.pool(x).flatten(1))
        return logits


def digits_net() -> nn.Module:
    """Return an untrained network: 48 channels at 8x8, 64 at 4x4, 111k parameters."""
    return DigitsNet()
