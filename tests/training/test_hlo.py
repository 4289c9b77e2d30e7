"""Collectives read from HLO text."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.training.hlo import Collective, collectives_of

MESH = mp.ProcessMesh([[0, 1, 2, 3], [4, 5, 6, 7]], ["dp", "tp"])

LINES = [
    (
        "%all-reduce.3 = f32[64,32]{1,0} all-reduce(%x), channel_id=1, "
        "replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%add",
        Collective("all-reduce", ("tp",), 8192),
    ),
    (
        "ROOT %ar = (f32[4]{0}, /*index=1*/bf16[2,2]{1,0}) all-reduce(%x, %y), channel_id=1, "
        "replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add",
        Collective("all-reduce", ("dp",), 24),
    ),
    (
        "%all-gather = s32[8]{0} all-gather(%x), channel_id=2, "
        "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}",
        Collective("all-gather", ("dp", "tp"), 32),
    ),
    (
        "%rs = bf16[3]{0} reduce-scatter(%x), replica_groups={{0,4},{1,5},{2,6},{3,7}}, "
        "dimensions={0}, to_apply=%add",
        Collective("reduce-scatter", ("dp",), 6),
    ),
    (
        "%cp = pred[7]{0} collective-permute(%x), channel_id=3, "
        "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
        Collective("collective-permute", ("tp",), 7),
    ),
    (
        "%a2a = (f32[2]{0}, f32[2]{0}) all-to-all(%x, %y), replica_groups={{0,1},{2,3}}",
        Collective("all-to-all", ("tp",), 16),
    ),
    (
        "%ags = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8]",
        Collective("all-gather", ("tp",), 32),
    ),
    (
        "%ar = f32[4]{0} all-reduce(%x), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}",
        Collective("all-reduce", ("dp",), 16),
    ),
    (
        "%ar = f32[4]{0} all-reduce(%x), replica_groups=mesh['a'=8] {'a':(2)2}, to_apply=%add",
        Collective("all-reduce", ("tp",), 16),  # 8 = 2 x 2 x 2: 0 and 2, 1 and 3, 4 and 6, ...
    ),
    (
        "%ar = f32[4]{0} all-reduce(%x), "
        "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}",
        Collective("all-reduce", ("dp",), 16),  # 0 and 4, 1 and 5, ...
    ),
    ("%done = f32[8]{0} all-gather-done(%ags)", None),
    ("%get = f32[4]{0} get-tuple-element(%all-reduce.3), index=0", None),
    ("%all = f32[] all-reduce(%x), replica_groups={}", Collective("all-reduce", ("dp", "tp"), 4)),
]


@pytest.mark.parametrize("line, expected", LINES)
def test_a_line(line, expected):
    assert list(collectives_of(f"HloModule m\n  {line}\n", MESH)) == [expected] * bool(expected)


@pytest.mark.parametrize("axes", [("dp",), ("tp",), ("dp", "tp")])
def test_a_compiled_program(axes):
    def local(x):
        return jax.lax.psum(x, axes)

    program = jax.jit(jax.shard_map(local, mesh=MESH.jax_mesh, in_specs=P(axes), out_specs=P()))
    table = collectives_of(program.lower(jnp.ones((8, 4))).compile().as_text(), MESH)
    rows = 8 // {"dp": 2, "tp": 4, "dptp": 8}["".join(axes)]
    assert list(table) == [Collective("all-reduce", axes, rows * 16)]
    assert table.axes() == set(axes) and len(table) == 1


def test_the_table_adds_up():
    text = "\n".join(line for line, _ in LINES)
    table = collectives_of(text, MESH)
    assert table.counts()["all-gather", ("tp",)] == 1
    assert table.bytes()["all-reduce", ("tp",)] == 8192 + 16
    assert sum(table.counts().values()) == len(table) == 11
    assert "│ all-reduce" in repr(table) and "8,208" in repr(table)
