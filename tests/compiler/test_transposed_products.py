"""A product that is transposed at once becomes one of swapped operands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshpar as mp
from meshpar import Replicate, Shard
from meshpar.compiler.program import program_of

MESH = mp.ProcessMesh(np.arange(4).reshape(2, 2), ["dp", "tp"])
HIGH, LOW = lax.Precision.HIGHEST, lax.Precision.DEFAULT


def operations(fn, *args):
    return program_of(jax.make_jaxpr(fn)(*args)).nodes


def heads_gradient(w, x):
    return jax.grad(lambda w: jnp.sum(jnp.einsum("btd,dhk->bthk", x, w) ** 2))(w)


def batched(lhs, rhs):
    dims = ((1,), (2,)), ((0,), (1,))
    product = lax.dot_general(lhs, rhs, dims, (HIGH, LOW), jnp.float32)
    return lax.transpose(product, (0, 2, 1))


def scanned_gradient(ws, x):
    def loss(ws):
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0])

    return jax.grad(loss)(ws)


CASES = {
    "weight of heads": (heads_gradient, (6, 4, 2), (4, 3, 6)),
    "batch dims": (batched, (2, 3, 4), (5, 2, 3)),
    "in a loop": (scanned_gradient, (3, 4, 4), (2, 4)),
}


def nested(nodes):
    for node in nodes:
        yield node
        for body in node.bodies.bodies if node.bodies else ():
            yield from nested(body.nodes)


@pytest.mark.parametrize("name", CASES)
def test_the_product_is_made_transposed(name):
    fn, *shapes = CASES[name]
    rng = np.random.default_rng(0)
    args = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    assert "transpose" in str(jax.make_jaxpr(fn)(*args))
    assert all(node.name != "transpose" for node in nested(operations(fn, *args)))
    f = mp.jit(fn, out_placements=[Replicate(), Replicate()])
    placed = [mp.shard_tensor(x, MESH, [Shard(0), Shard(1)]) for x in args]
    np.testing.assert_allclose(np.asarray(f(*placed)), fn(*args), rtol=1e-5, atol=1e-5)


def test_precision_and_dtype_go_with_their_operands():
    lhs, rhs = np.ones((2, 3, 4), jnp.bfloat16), np.ones((5, 2, 3), jnp.bfloat16)
    (product,) = operations(batched, lhs, rhs)
    assert product.params["precision"] == (LOW, HIGH)
    assert product.eqn.outvars[0].aval.shape == (2, 5, 4)
    assert product.eqn.outvars[0].aval.dtype == jnp.float32


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: ((p := x @ y).T, p + 1),  # taken as it is too
        lambda x, y: ((p := x @ y).T, p),
        lambda x, y: ((p := x @ y).T, lax.transpose(p, (1, 0))),
        lambda x, y: lax.transpose(jnp.tensordot(x, y, 0), (0, 2, 1, 3)),  # no exchange of blocks
        lambda x, y: lax.transpose(jnp.sin(x), (1, 0)),
    ],
)
def test_other_transposes_stay(fn):
    x, y = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32)
    before = str(jax.make_jaxpr(fn)(x, y)).count("transpose[")
    assert before == sum(node.name == "transpose" for node in operations(fn, x, y)) > 0
