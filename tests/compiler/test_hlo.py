"""The readers of StableHLO and HLO text, on what JAX prints and on forms it prints elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.compiler.hlo import (
    Found,
    axes_of,
    axes_of_groups,
    axes_of_pairs,
    collectives_in_hlo,
    collectives_in_stablehlo,
    counts,
    sent_bytes,
)
from meshpar.mesh import ProcessMesh

MESH = ProcessMesh(np.arange(8).reshape(2, 4), ["x", "y"])

EXPECTED = {  # kind -> axes, operand bytes; each device holds float32[2, 8]
    "all_reduce": (("x", "y"), 64),
    "all_gather": (("y",), 64),
    "reduce_scatter": (("x",), 64),
    "all_to_all": (("y",), 64),
    "collective_permute": (("x", "y"), 64),
}


@pytest.fixture(scope="module")
def lowered():
    def body(x):
        ring = [(i, (i + 1) % 8) for i in range(8)]
        return (
            lax.psum(x, ("x", "y")),
            lax.all_gather(x, "y"),
            lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True),
            lax.all_to_all(x, "y", split_axis=1, concat_axis=0, tiled=True),
            lax.ppermute(x, ("x", "y"), ring),
        )

    spec = PartitionSpec("x")
    jax_mesh = MESH.jax_mesh
    mapped = jax.shard_map(body, mesh=jax_mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(jnp.ones((4, 8), "float32"))


@pytest.mark.parametrize("compiled", [False, True])
def test_all_kinds_are_read(lowered, compiled):
    if compiled:
        found = collectives_in_hlo(lowered.compile().as_text())
    else:
        found = collectives_in_stablehlo(lowered.as_text())
    assert counts(found) == dict.fromkeys(EXPECTED, 1)
    assert {kind: (axes_of(kind, f, MESH), f.bytes) for kind, (f,) in found.items()} == EXPECTED


def test_groups_of_a_transposed_iota():
    text = (
        "  %p = bf16[8]{0} parameter(0)\n"
        "  %g = (bf16[8]{0}, bf16[16]{0}) all-gather-start(%p), channel_id=1, "
        "replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}\n"
        "  %d = bf16[16]{0} all-gather-done(%g)\n"
    )
    (found,) = collectives_in_hlo(text)["all_gather"]
    assert found == Found(((0, 4), (1, 5), (2, 6), (3, 7)), 16)
    assert axes_of_groups(found.groups, MESH) == ("x",)


def test_groups_of_a_plain_iota():
    text = (
        "  %p = s4[6]{0} parameter(0)\n  %r = s4[6]{0} all-reduce(%p), replica_groups=[2,4]<=[8]\n"
    )
    assert collectives_in_hlo(text)["all_reduce"] == [Found(((0, 1, 2, 3), (4, 5, 6, 7)), 6)]


def test_groups_as_bytes():
    literal = np.arange(8, dtype="<i8").tobytes().hex().upper()
    text = (
        '%1 = "stablehlo.all_gather"(%0) <{all_gather_dim = 0 : i64, replica_groups = '
        f'dense<"0x{literal}"> : tensor<2x4xi64>}}> : (tensor<2xcomplex<f32>>) -> tensor<8xf32>'
    )
    assert collectives_in_stablehlo(text)["all_gather"] == [Found(((0, 1, 2, 3), (4, 5, 6, 7)), 16)]


def test_the_order_of_the_axes_is_that_of_the_numbers():
    assert axes_of_groups((tuple(range(8)),), MESH) == ("x", "y")
    assert axes_of_groups(((0, 4, 1, 5, 2, 6, 3, 7),), MESH) == ("y", "x")
    assert axes_of_groups(((4, 0), (5, 1), (2, 6), (3, 7)), MESH) == ("x",)


def test_groups_along_no_axes():
    with pytest.raises(ValueError, match="along no axes"):
        axes_of_groups(((0, 1), (2, 3), (4, 5), (6, 7)), MESH)


def test_pairs():
    assert axes_of_pairs(((0, 0), (1, 2), (2, 1)), MESH) == ("y",)


@pytest.mark.parametrize(
    "kind, bytes_sent",
    [("all_gather", 300), ("all_reduce", 150), ("reduce_scatter", 75), ("all_to_all", 75)],
)
def test_bytes_that_a_device_sends(kind, bytes_sent):
    assert sent_bytes(kind, Found(((0, 1, 2, 3), (4, 5, 6, 7)), 100)) == bytes_sent
