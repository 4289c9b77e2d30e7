"""A small residual network with batch norm, for images of CIFAR's size.

Follows "Deep Residual Learning for Image Recognition" (arXiv:1512.03385), section 4.2: a 3x3 stem,
stages of basic blocks that halve the image and double the channels, mean over the image, one linear
layer. A shortcut that changes shape is a 1x1 convolution.

B batch, H height, W width, C channels.
"""

from dataclasses import dataclass

import jax
from flax import nnx


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetConfig:
    """Sizes of a `ResNet`; the defaults are the paper's ResNet-20."""

    stages: tuple[int, ...] = (3, 3, 3)  # basic blocks per stage
    width: int = 16  # channels of the first stage; stage i has width * 2**i
    in_channels: int = 3
    num_classes: int = 10
    momentum: float = 0.9  # the share of the old running statistics that a step keeps


class ResNet(nnx.Module):
    """Maps images of shape `(B, H, W, C)` to logits of shape `(B, num_classes)`.

    After construction and `model.train()` batch norm uses the batch's statistics and updates the
    running ones (`nnx.BatchStat`); after `model.eval()` it uses the running ones.

    Example:
      >>> import jax.numpy as jnp
      >>> model = ResNet(ResNetConfig(stages=(1, 1), width=8), rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((2, 8, 8, 3))).shape
      (2, 10)
    """

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.stem = _conv(config.in_channels, config.width, 3, 1, rngs)
        self.stem_norm = nnx.BatchNorm(config.width, momentum=config.momentum, rngs=rngs)
        blocks = []
        channels = config.width
        for stage, num_blocks in enumerate(config.stages):
            for block in range(num_blocks):
                out = config.width * 2**stage
                stride = 2 if stage and not block else 1
                blocks.append(BasicBlock(channels, out, stride, config.momentum, rngs=rngs))
                channels = out
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(channels, config.num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.stem_norm(self.stem(images)))  # [B,H,W,C]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))  # [B,num_classes]


class BasicBlock(nnx.Module):
    """Two 3x3 convolutions with batch norm, added to the shortcut."""

    def __init__(
        self, channels: int, out: int, stride: int, momentum: float, *, rngs: nnx.Rngs
    ) -> None:
        self.conv1 = _conv(channels, out, 3, stride, rngs)
        self.norm1 = nnx.BatchNorm(out, momentum=momentum, rngs=rngs)
        self.conv2 = _conv(out, out, 3, 1, rngs)
        self.norm2 = nnx.BatchNorm(out, momentum=momentum, rngs=rngs)
        self.projects = stride != 1 or channels != out
        if self.projects:
            self.shortcut = _conv(channels, out, 1, stride, rngs)
            self.shortcut_norm = nnx.BatchNorm(out, momentum=momentum, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        if self.projects:
            x = self.shortcut_norm(self.shortcut(x))
        return jax.nn.relu(x + y)


def _conv(channels: int, out: int, size: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    """Kernel of shape `(size, size, channels, out)`; no bias, since a norm follows."""
    return nnx.Conv(
        channels,
        out,
        kernel_size=(size, size),
        strides=stride,
        use_bias=False,
        kernel_init=nnx.initializers.he_normal(),
        rngs=rngs,
    )
