"""Convolutions and pooling of regions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.compiler.operations.registry import operation

Array = jax.Array


@operation("conv2d conv3d")
def convolution(
    x: Array,
    kernel: Array,
    strides: Sequence[int] = (),
    paddings: Sequence[int] = (),
    padding_algorithm: str = "EXPLICIT",
    groups: int = 1,
    dilations: Sequence[int] = (),
    data_format: str = "",
) -> Array:
    """A convolution; its kernel is (out, in, ...spatial)."""
    spatial = "DHW"[-(x.ndim - 2) :]
    layout = data_format or f"NC{spatial}"
    return lax.conv_general_dilated(
        x,
        kernel,
        tuple(strides) or (1,) * len(spatial),
        [(p, p) for p in paddings] or [(0, 0)] * len(spatial),
        rhs_dilation=tuple(dilations) or (1,) * len(spatial),
        dimension_numbers=(layout, f"OI{spatial}", layout),
        feature_group_count=groups,
    )


@operation("depthwise_conv2d")
def depthwise_conv2d(x: Array, kernel: Array, *, groups: int = 1, **attributes: Any) -> Array:
    """A convolution of each channel by itself, whatever `groups` says."""
    channels = x.shape[attributes.get("data_format", "NCHW").index("C")]
    return convolution(x, kernel, groups=channels, **attributes)


@operation("conv2d_transpose")
def conv2d_transpose(
    x: Array,
    kernel: Array,
    strides: Sequence[int] = (),
    paddings: Sequence[int] = (),
    output_padding: Sequence[int] = (),
    output_size: Sequence[int] = (),
    padding_algorithm: str = "EXPLICIT",
    groups: int = 1,
    dilations: Sequence[int] = (),
    data_format: str = "NCHW",
) -> Array:
    """The transpose of a convolution; its kernel is (in, out, ...spatial)."""
    pads = tuple(paddings) or (0, 0)
    apart = tuple(dilations) or (1, 1)
    edges = [apart[i] * (kernel.shape[2 + i] - 1) - pads[i] for i in range(2)]
    extra = tuple(output_padding) or (0, 0)
    return lax.conv_general_dilated(
        x,
        jnp.flip(kernel, (2, 3)),
        (1, 1),
        [(edges[i], edges[i] + extra[i]) for i in range(2)],
        lhs_dilation=tuple(strides) or (1, 1),
        rhs_dilation=apart,
        dimension_numbers=(data_format, "IOHW", data_format),
    )


@operation("roi_align", kinds="ffi", bound=lambda shapes, attrs: 4)
def roi_align(
    x: Array,
    boxes: Array,
    boxes_num: Array,
    pooled_height: int = 1,
    pooled_width: int = 1,
    spatial_scale: float = 1.0,
    sampling_ratio: int = 0,
    aligned: bool = False,
) -> Array:
    """Regions of an image sampled at the centres of a grid, bilinearly."""
    image = jnp.sum(
        (jnp.arange(boxes.shape[0])[:, None] >= jnp.cumsum(boxes_num)[None, :]).astype(jnp.int32),
        axis=1,
    )
    image = jnp.clip(image, 0, x.shape[0] - 1)
    box = boxes * spatial_scale - (0.5 if aligned else 0.0)
    steps = [(jnp.arange(n) + 0.5) / n for n in (pooled_width, pooled_height)]
    across = box[:, 0:1] + (box[:, 2:3] - box[:, 0:1]) * steps[0][None, :]
    down = box[:, 1:2] + (box[:, 3:4] - box[:, 1:2]) * steps[1][None, :]
    shape = (boxes.shape[0], pooled_height, pooled_width)
    rows = jnp.broadcast_to(down[:, :, None], shape)
    columns = jnp.broadcast_to(across[:, None, :], shape)
    total = jnp.zeros(())
    for near_row in (0, 1):
        for near_column in (0, 1):
            at_row, at_column = jnp.floor(rows) + near_row, jnp.floor(columns) + near_column
            weight = (1 - jnp.abs(rows - at_row)) * (1 - jnp.abs(columns - at_column))
            picked = _pixels(x, image, at_row, at_column)
            total = total + picked * weight[..., None]
    return jnp.moveaxis(total, -1, 1)


def _pixels(x: Array, image: Array, row: Array, column: Array) -> Array:
    """`[boxes, height, width, channels]`: the pixels at whole coordinates, clamped to the image."""
    last = jnp.moveaxis(x, 1, -1)
    row = jnp.clip(row, 0, x.shape[2] - 1).astype(jnp.int32)
    column = jnp.clip(column, 0, x.shape[3] - 1).astype(jnp.int32)
    return last.at[image[:, None, None], row, column].get(mode="clip", wrap_negative_indices=False)
