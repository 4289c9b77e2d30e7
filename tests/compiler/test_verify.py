"""The verifier of planned programs, on programs that are right and on ones that are broken."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar import Replicate, Shard
from meshpar.compiler.verify import verify
from meshpar.placements.layout import Layout

SHARD = Shard(0)
MESH = mp.ProcessMesh(np.arange(8), ["dp"])


def gradient_step(size, batch=16, out=SHARD):
    """A gradient, which a contraction makes, transposed."""

    def step(w, x):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w).T

    args = (
        jax.ShapeDtypeStruct((size, size), np.float32),
        jax.ShapeDtypeStruct((batch, size), np.float32),
    )
    f = mp.jit(step, ([Replicate()], [Shard(0)]), [out], mesh=MESH)
    return f.plan(*args).planned


@pytest.mark.parametrize("out", [Replicate(), Shard(0)], ids=str)
def test_a_large_gradient_is_reduced_before_its_transpose(out):
    planned = gradient_step(512, batch=8192, out=out)
    verify(planned)
    (moved,) = [node for node in planned.nodes if any(m.src.partial for m in node.moves)]
    assert moved.node.name == "transpose"


def test_what_is_taken_must_be_there():
    planned = gradient_step(8)
    nodes = tuple(replace(node, moves=()) for node in planned.nodes)
    assert nodes != planned.nodes
    with pytest.raises(AssertionError, match=r"transpose .* is not there as"):
        verify(replace(planned, nodes=nodes))


def test_a_layout_must_fit_its_value():
    planned = gradient_step(8)
    with pytest.raises(AssertionError, match=r"argument 0: .* is no layout of 2 dims"):
        verify(replace(planned, inputs=(Layout.replicated(1), *planned.inputs[1:])))
    with pytest.raises(AssertionError, match="on a mesh"):
        verify(replace(planned, inputs=(Layout((("tp",), ())), *planned.inputs[1:])))


def test_dims_are_cut_as_their_factors_are():
    planned = gradient_step(8)
    number = next(i for i, n in enumerate(planned.nodes) if n.node.name == "tanh")
    nodes = list(planned.nodes)
    nodes[number] = replace(nodes[number], axes={})
    with pytest.raises(AssertionError, match=r"tanh at .*: dim 0 of .* is cut by \('dp',\)"):
        verify(replace(planned, nodes=tuple(nodes)))


def test_a_cut_sum_is_pending():
    planned = gradient_step(8)
    found = next(
        i
        for i, n in enumerate(planned.nodes)
        if n.node.name == "dot_general" and n.results[0].partial
    )
    nodes = list(planned.nodes)
    nodes[found] = replace(nodes[found], results=(nodes[found].results[0].without_partial(),))
    with pytest.raises(AssertionError, match=r"dot_general .* are not pending"):
        verify(replace(planned, nodes=tuple(nodes)))
