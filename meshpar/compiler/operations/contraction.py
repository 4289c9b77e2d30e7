"""Matrix products, alone and fused with what follows them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from meshpar.compiler.operations.registry import operation

Array = jax.Array


@operation("matmul matmul_v2")
def matmul(x: Array, y: Array, trans_x: bool = False, trans_y: bool = False) -> Array:
    """A product of matrices, with batch dims that broadcast; of vectors as numpy's."""
    x = jnp.swapaxes(x, -1, -2) if trans_x and x.ndim > 1 else x
    y = jnp.swapaxes(y, -1, -2) if trans_y and y.ndim > 1 else y
    return jnp.matmul(x, y)


@operation("bmm")
def bmm(x: Array, y: Array) -> Array:
    """A batch of products of matrices."""
    return jnp.matmul(x, y)


@operation("einsum")
def einsum(operands: list[Array], equation: str = "") -> Array:
    """A sum of products in Einstein's notation."""
    return jnp.einsum(equation, *operands)


@operation("fused_gemm_epilogue")
def fused_gemm_epilogue(
    x: Array, y: Array, bias: Array, trans_x: bool = False, trans_y: bool = False
) -> tuple[Array, None]:
    """`x @ y + bias`."""
    out = matmul(x, y, trans_x, trans_y)
    return out + jnp.broadcast_to(bias, out.shape), None


@operation("linear_v2", optional=frozenset({2}))
def linear_v2(
    x: Array, weight: Array, bias: Array | None = None, transpose_weight: bool = False
) -> tuple[Array, None]:
    """`x @ weight + bias`."""
    out = matmul(x, weight, trans_y=transpose_weight)
    return (out if bias is None else out + jnp.broadcast_to(bias, out.shape)), None


@operation("fused_linear_param_grad_add", optional=frozenset({2, 3}))
def fused_linear_param_grad_add(
    x: Array,
    dout: Array,
    dweight: Array | None = None,
    dbias: Array | None = None,
    multi_precision: bool = False,
    has_bias: bool = True,
) -> tuple[Array, Array | None]:
    """The gradients of a linear layer's parameters, added to what there is."""
    rows, batch = "abcdefgh"[: x.ndim - 1], tuple(range(dout.ndim - 1))
    weight = jnp.einsum(f"{rows}x,{rows}y->xy", x, dout)
    weight = weight if dweight is None else weight + dweight
    if not has_bias:
        return weight, None
    bias = jnp.sum(dout, axis=batch)
    return weight, bias if dbias is None else bias + dbias
