"""Collectives read from HLO text."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import meshpar as mp
from meshpar.training.collective_table import Collective, collectives_of

MESH = mp.ProcessMesh([[0, 1, 2, 3], [4, 5, 6, 7]], ["dp", "tp"])

LINES = [  # type of each operand, instruction, what is read
    (
        ["f32[64,32]"],
        "%all-reduce.3 = f32[64,32]{1,0} all-reduce(%x0), channel_id=1, "
        "replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%add",
        Collective("all_reduce", ("tp",), 2 * 8192 * 3 // 4),
    ),
    (
        ["f32[4]", "bf16[2,2]"],
        "ROOT %ar = (f32[4]{0}, /*index=1*/bf16[2,2]{1,0}) all-reduce(%x0, %x1), channel_id=1, "
        "replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add",
        Collective("all_reduce", ("dp",), 24),
    ),
    (
        ["s32[1]"],
        "%all-gather = s32[8]{0} all-gather(%x0), channel_id=2, "
        "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}",
        Collective("all_gather", ("dp", "tp"), 4 * 7),
    ),
    (
        ["bf16[6]"],
        "%rs = bf16[3]{0} reduce-scatter(%x0), replica_groups={{0,4},{1,5},{2,6},{3,7}}, "
        "dimensions={0}, to_apply=%add",
        Collective("reduce_scatter", ("dp",), 6),
    ),
    (
        ["pred[7]"],
        "%cp = pred[7]{0} collective-permute(%x0), channel_id=3, "
        "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
        Collective("collective_permute", ("tp",), 7),
    ),
    (
        ["f32[2]", "f32[2]"],
        "%a2a = (f32[2]{0}, f32[2]{0}) all-to-all(%x0, %x1), replica_groups={{0,1},{2,3}}",
        Collective("all_to_all", ("tp",), 8),
    ),
    (
        ["f32[2]"],
        "%ags = (f32[2]{0}, f32[8]{0}) all-gather-start(%x0), replica_groups=[2,4]<=[8]",
        Collective("all_gather", ("tp",), 24),
    ),
    (
        ["f32[4]"],
        "%ar = f32[4]{0} all-reduce(%x0), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}",
        Collective("all_reduce", ("dp",), 16),
    ),
    (
        ["f32[4]"],
        "%ar = f32[4]{0} all-reduce(%x0), replica_groups=mesh['a'=8] {'a':(2)2}, to_apply=%add",
        Collective("all_reduce", ("tp",), 16),  # 8 = 2 x 2 x 2: 0 and 2, 1 and 3, 4 and 6, ...
    ),
    (
        ["f32[4]"],
        "%ar = f32[4]{0} all-reduce(%x0), "
        "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}",
        Collective("all_reduce", ("dp",), 16),  # 0 and 4, 1 and 5, ...
    ),
    (["f32[2]"], "%done = f32[8]{0} all-gather-done(%x0)", None),
    (["f32[4]"], "%get = f32[4]{0} get-tuple-element(%x0), index=0", None),
    (
        ["f32[]"],
        "%all = f32[] all-reduce(%x0), replica_groups={}",
        Collective("all_reduce", ("dp", "tp"), 7),
    ),
]


def module(operands, line):
    made = [f"  %x{i} = {kind} parameter({i})" for i, kind in enumerate(operands)]
    return "\n".join(["HloModule m", *made, f"  {line}", ""])


@pytest.mark.parametrize("operands, line, expected", LINES)
def test_a_line(operands, line, expected):
    assert list(collectives_of(module(operands, line), MESH)) == [expected] * bool(expected)


@pytest.mark.parametrize("axes", [("dp",), ("tp",), ("dp", "tp")])
def test_a_compiled_program(axes):
    def local(x):
        return jax.lax.psum(x, axes)

    program = jax.jit(jax.shard_map(local, mesh=MESH.jax_mesh, in_specs=P(axes), out_specs=P()))
    table = collectives_of(program.lower(jnp.ones((8, 4))).compile().as_text(), MESH)
    n = {"dp": 2, "tp": 4, "dptp": 8}["".join(axes)]
    block = 8 * 4 * 4 // n
    assert list(table) == [Collective("all_reduce", axes, 2 * block * (n - 1) // n)]
    assert table.axes() == set(axes) and len(table) == 1


def test_the_table_adds_up():
    one, other = LINES[0], LINES[8]
    text = module(*one[:2]) + module(*other[:2])
    table = collectives_of(text, MESH)
    assert table.counts() == {("all_reduce", ("tp",)): 2}
    assert len(table) == 2 and "│ all_reduce" in repr(table)
