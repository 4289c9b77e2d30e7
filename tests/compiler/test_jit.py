"""`mp.jit` itself: what it takes, what it gives back, and how it composes."""

from __future__ import annotations

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshpar as mp
from meshpar import Partial, Replicate, Shard
from meshpar.compiler import no_rule
from meshpar.rules.registry import RULES
from meshpar.rules.rule import einsum

MESH = mp.ProcessMesh(np.arange(4).reshape(2, 2), ["dp", "tp"])
LINE = mp.ProcessMesh([0, 1], ["x"])
X = np.arange(24, dtype=np.float32).reshape(6, 4) / 8
W = np.arange(20, dtype=np.float32).reshape(4, 5) / 16 - 0.5


def on(mesh, value, *placements):
    return mp.shard_tensor(value, mesh, list(placements))


def dense(x, w):
    return jnp.tanh(x @ w)


def close(got, expected):
    jax.tree.map(
        lambda lhs, rhs: np.testing.assert_allclose(np.asarray(lhs), rhs, rtol=1e-5, atol=1e-6),
        got,
        expected,
    )


@pytest.fixture
def placed():
    return on(MESH, X, Shard(0)), on(MESH, W, Replicate(), Shard(1))


# --- under other transformations ------------------------------------------------------------------


def test_a_gradient_of_a_jitted_function(placed):
    f = mp.jit(dense, out_placements=[Shard(0)], mesh=MESH)
    got = jax.grad(lambda x, w: f(x, w).sum(), (0, 1))
    expected = jax.grad(lambda x, w: dense(x, w).sum(), (0, 1))(X, W)
    close(mp.jit(got)(*placed), expected)
    close(jax.jit(got)(X, W), expected)


def test_vmap_and_jit_of_a_jitted_function():
    f = mp.jit(dense, in_placements=([Shard(0)], None), mesh=MESH)
    xs = np.stack([X, X + 1])
    close(jax.vmap(f, (0, None))(xs, W), jax.vmap(dense, (0, None))(xs, W))
    close(jax.jit(f)(X, W), dense(X, W))


def test_a_jitted_function_inside_another_is_an_annotation(placed):
    inner = mp.jit(dense, out_placements=[Replicate(), Shard(1)], mesh=MESH)
    outer = mp.jit(lambda x, w: inner(x, w) * 2)
    y = outer(*placed)
    close(y, 2 * dense(X, W))
    assert mp.placements_of(y) == [Replicate(), Shard(1)]


# --- arguments ------------------------------------------------------------------------------------


def test_static_arguments_are_constants():
    f = mp.jit(lambda n, x, axis: x.sum(axis) * n, static_argnums=(0, 2), mesh=LINE)
    x = on(LINE, X, Shard(0))
    close(f(2, x, 0), 2 * X.sum(0))
    close(f(3, x, 1), 3 * X.sum(1))
    assert f.compiled_count() == 2
    close(f(2, x, 0), 2 * X.sum(0))
    assert f.compiled_count() == 2


def test_a_donated_argument_is_gone_and_the_others_are_not():
    f = mp.jit(lambda state, x: (state["a"] + x, state["b"] * 2), donate_argnums=0)
    state = {"a": on(LINE, X, Shard(0)), "b": on(LINE, W, Shard(0))}
    x = on(LINE, X, Shard(0))
    a, b = f(state, x)
    close((a, b), (2 * X, 2 * W))
    assert state["a"].is_deleted()
    assert state["b"].is_deleted()
    assert not x.is_deleted()


def test_a_donated_uneven_argument_is_gone():
    uneven = on(LINE, X[:5], Shard(0))
    assert isinstance(uneven, mp.DistTensor)
    f = mp.jit(lambda n, x: x + n, donate_argnums=1, static_argnums=0, out_placements=[Shard(0)])
    close(f(1, uneven), X[:5] + 1)
    assert uneven.storage.is_deleted()


def test_donation_with_static_arguments_counts_as_the_caller_does():
    f = mp.jit(lambda n, x, y: (x + n, y + n), donate_argnums=2, static_argnums=0)
    x, y = on(LINE, X, Shard(0)), on(LINE, X, Shard(0))
    close(f(1, x, y), (X + 1, X + 1))
    assert (x.is_deleted(), y.is_deleted()) == (False, True)


def test_keyword_arguments(placed):
    x, w = placed
    f = mp.jit(dense)
    close(f(x, w=w), dense(X, W))
    close(f(w=w, x=x), dense(X, W))
    assert f.plan(x, w=w).names == ("x", "w")


@pytest.mark.parametrize(
    "asked",
    [
        ([Shard(0)], {"w": [Replicate(), Shard(1)], "b": None}),  # a tree like the arguments
        ([Shard(0)], [Replicate()]),  # a prefix: for all leaves of the second
        {"x": [Shard(0)], "params": {"w": [Replicate(), Shard(1)], "b": None}},  # by name
        [[Shard(0)]],  # the rest is left to the plan
    ],
    ids=["tree", "prefix", "dict", "short"],
)
def test_in_placements(asked):
    def layer(x, params):
        return x @ params["w"] + params["b"][None]

    f = mp.jit(layer, in_placements=asked, mesh=MESH)
    params = {"w": W, "b": np.ones(5, np.float32)}
    close(f(X, params), layer(X, params))
    inputs = json.loads(f.plan(X, params).to_json())["inputs"]
    assert inputs["x"] == "[Shard(0), Replicate()]"
    if isinstance(asked, dict):
        assert inputs["params/w"] == "[Replicate(), Shard(1)]"


def test_arguments_that_lie_otherwise_than_asked_are_moved():
    f = mp.jit(lambda x: x + 1, in_placements=([Shard(1)],), out_placements=[Shard(1)])
    x = on(LINE, X, Shard(0))
    y = f(x)
    close(y, X + 1)
    assert mp.placements_of(y) == [Shard(1)]
    assert f.plan(x).counts() == {"all_to_all": 1}
    assert f.plan(on(LINE, X, Shard(1))).counts() == {}


def test_numpy_lists_and_numbers_need_no_placement():
    f = mp.jit(lambda x, w, n: dense(x, w) * n, mesh=MESH)
    close(f(X, W, 2), dense(X, W) * 2)
    close(f(X, jnp.asarray(W), 2.5), dense(X, W) * 2.5)


def test_arrays_on_an_explicit_mesh():
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("dp")))
    w = jax.device_put(W, NamedSharding(mesh, PartitionSpec("tp")))
    f = mp.jit(dense)
    close(f(x, w), dense(X, W))
    inputs = json.loads(f.plan(x, w).to_json())["inputs"]
    assert inputs == {"x": "[Shard(0), Replicate()]", "w": "[Replicate(), Shard(0)]"}


def test_arrays_on_another_device_or_mesh_are_brought():
    elsewhere = jax.device_put(W, jax.devices()[7])
    other = on(mp.ProcessMesh([4, 5, 6], ["z"]), W, Shard(0))
    f = mp.jit(dense, mesh=MESH)
    close(f(on(MESH, X, Shard(0)), elsewhere), dense(X, W))
    close(f(on(MESH, X, Shard(0)), other), dense(X, W))


def test_a_second_call_plans_nothing(placed, monkeypatch):
    f = mp.jit(dense)
    first = f(*placed)

    def fails(*args):
        raise AssertionError("planned again")

    monkeypatch.setattr("meshpar.compiler.jit.lower_program", fails)
    close(f(*placed), np.asarray(first))
    close(f(on(MESH, X, Shard(0)), on(MESH, W, Replicate(), Shard(1))), np.asarray(first))
    with pytest.raises(AssertionError, match="planned again"):
        f(on(MESH, X, Shard(1)), placed[1])


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "out", [[Partial()], [Shard(0), Partial()], [Shard(1), Shard(1)], [Shard(1), Shard(0)]], ids=str
)
def test_results_lie_as_asked(placed, out):
    y = mp.jit(dense, out_placements=out)(*placed)
    assert mp.placements_of(y) == [*out, *[Replicate()] * (2 - len(out))]
    close(y, dense(X, W))


def test_a_result_that_is_an_argument_or_a_constant():
    f = mp.jit(lambda x: {"x": x, "one": 1, "c": jnp.ones(3)}, out_placements={
        "x": None, "one": None, "c": [Shard(0)]})  # fmt: skip
    out = f(on(LINE, X, Shard(0)))
    close(out, {"x": X, "one": 1, "c": np.ones(3)})
    assert mp.placements_of(out["c"]) == [Shard(0)]


@pytest.mark.parametrize("fn", [dense, lambda x, w: (x.sum(), w.T @ x.T, jnp.sort(x, 0))])
def test_the_other_partitioner_gives_the_same(placed, fn):
    ours, theirs = mp.jit(fn), mp.jit(fn, partitioner="xla")
    close(ours(*placed), jax.tree.map(np.asarray, theirs(*placed)))
    with pytest.raises(NotImplementedError, match="XLA tells what it decided only in"):
        theirs.plan(*placed)


def test_the_other_partitioner_refuses_pending_reductions():
    x = on(LINE, X, Partial())
    with pytest.raises(NotImplementedError, match="no pending reductions"):
        mp.jit(jnp.sin, partitioner="xla")(x)


# --- errors ---------------------------------------------------------------------------------------


def test_no_mesh():
    with pytest.raises(mp.MeshError, match=r"(?s)mp.jit\(dense\): no mesh is known.*mp.set_mesh"):
        mp.jit(dense)(X, W)


def test_two_meshes(placed):
    with pytest.raises(mp.MeshError, match=r"(?s)lie on 2 meshes.*ProcessMesh.*mp.reshard\(x"):
        mp.jit(dense)(placed[0], on(LINE, W))


def test_placements_out_of_range(placed):
    with pytest.raises(mp.PlacementError, match=r"(?s)mp.jit\(dense\).*out_placements.*Shard\(2\)"):
        mp.jit(dense, out_placements=[Shard(2)])(*placed)
    with pytest.raises(
        mp.PlacementError, match=r"(?s)in_placements/0/0.*Shard\(5\).*takes -2 to 1"
    ):
        mp.jit(dense, in_placements=([Shard(5)],), mesh=MESH)(X, W)


def test_a_prefix_that_does_not_fit(placed):
    with pytest.raises(mp.PlacementError, match=r"mp.jit\(dense\).*out_placements does not fit"):
        mp.jit(dense, out_placements=([Shard(0)], [Shard(0)]))(*placed)


def test_an_unknown_partitioner():
    with pytest.raises(ValueError, match="'meshpar' or 'xla'"):
        mp.jit(dense, partitioner="gspmd")


# --- effects, manual regions, missing rules -------------------------------------------------------


def test_effects_happen_once(placed):
    seen, counted = [], []

    def noisy(x, w):
        jax.debug.callback(lambda v: seen.append(np.asarray(v)), x.sum())
        y = io_callback(lambda v: (counted.append(1), v * 2)[1], jax.ShapeDtypeStruct((), X.dtype),
                        w.sum(), ordered=False)  # fmt: skip
        return dense(x, w) + y

    close(mp.jit(noisy)(*placed), dense(X, W) + 2 * W.sum())
    jax.effects_barrier()
    assert len(counted) == 1
    np.testing.assert_allclose(seen, [X.sum()], rtol=1e-6)


def test_a_manual_region_is_taken_as_it_is(placed):
    def manual(x):
        def local(block):
            return lax.psum(block.sum(keepdims=True), "dp")

        spec = PartitionSpec("dp")
        mapped = jax.shard_map(
            local, mesh=MESH.jax_mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False
        )
        return mapped(x * 2) + 1

    f = mp.jit(manual)
    close(f(placed[0]), [[2 * X.sum() + 1]])
    assert f.plan(placed[0]).counts() == {"all_reduce": 1}


def test_a_manual_region_on_another_mesh_is_refused(placed):
    mapped = jax.shard_map(jnp.sin, mesh=LINE.jax_mesh, in_specs=PartitionSpec("x"),
                           out_specs=PartitionSpec("x"))  # fmt: skip
    with pytest.raises(NotImplementedError, match="shard_map over the mesh"):
        mp.jit(lambda x: mapped(x))(placed[0])


@pytest.fixture
def without_a_rule(monkeypatch):
    monkeypatch.delitem(RULES, "tanh")
    monkeypatch.setattr(no_rule, "_told", set())


def test_an_operation_without_a_rule_is_replicated_with_one_warning(placed, without_a_rule):
    f = mp.jit(dense)
    with pytest.warns(
        mp.NoRuleWarning, match=r"mp.jit\(dense\): no rule for 'tanh' at test_jit.py"
    ):
        y = f(*placed)
    close(y, dense(X, W))
    plan = f.plan(*placed)
    assert [op.name for op in plan.replicated] == ["tanh"]
    assert "tanh" in str(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mp.jit(lambda x: jnp.tanh(x))(placed[0])  # told once


def test_check_finds_a_wrong_rule(placed, monkeypatch):
    # Sorting is no elementwise operation.
    monkeypatch.setitem(RULES, "sort", lambda x, **_: einsum("ij->ij", [x]))
    found = mp.check(lambda x, w: jnp.sort(x[::-1], 0) @ w, *placed)
    assert found is not None
    assert found.operation == "sort"
    assert "test_jit.py" in found.where
    assert found.largest > 0
    monkeypatch.undo()
    assert mp.check(lambda x, w: jnp.sort(x[::-1], 0) @ w, *placed) is None


# --- plans ----------------------------------------------------------------------------------------


def test_what_a_plan_tells(placed):
    x, w = placed
    plan = mp.jit(dense, out_placements=[]).plan(x, w)
    assert plan.counts() == {"all_gather": sum(plan.counts().values())}
    assert "all_gather" in repr(plan)
    assert "all_gather" in plan._repr_html_()
    assert plan._repr_html_().count("<tr") == 1 + len(plan.collectives)
    told = json.loads(plan.to_json())
    assert told["mesh"] == {"dp": 2, "tp": 2}
    assert told["outputs"] == ["[Replicate(), Replicate()]"]
    assert [op["name"] for op in told["operations"]] == ["dot_general", "tanh"]
    assert sum(c["bytes"] * c["count"] for c in told["collectives"]) == plan.bytes
    why = plan.why("out/0")
    assert why.startswith("out/0:")
    assert "tanh" in why
    with pytest.raises(KeyError):
        plan.why("nothing")


def test_plans_differ_by_what_they_send(placed):
    x, w = placed
    cut = mp.jit(dense, out_placements=[Shard(0), Shard(1)]).plan(x, w)
    whole = mp.jit(dense, out_placements=[]).plan(x, w)
    assert cut.diff(cut) == "the same collectives"
    assert "all_gather" in cut.diff(whole)
    assert f"{whole.bytes:+d} bytes" in cut.diff(whole) or whole.bytes != cut.bytes


def test_planning_and_lowering_for_4096_devices_that_are_not_there():
    mesh = mp.ProcessMesh(np.arange(4096).reshape(256, 16), ["dp", "tp"])
    f = mp.jit(dense, in_placements=([Shard(0)], [Replicate(), Shard(0)]), mesh=mesh)
    x = jax.ShapeDtypeStruct((8192, 64), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    plan = f.plan(x, w)
    assert set(plan.counts()) == {"reduce_scatter"} or set(plan.counts()) == {"all_reduce"}
    text = f.lowering(x, w).lowered(["tpu"]).as_text()
    assert any(f"stablehlo.{kind}" in text for kind in plan.counts())
    with pytest.raises(mp.MeshError):
        f(np.ones((8192, 64), jnp.bfloat16), np.ones((64, 128), jnp.bfloat16))


def test_a_plan_names_the_users_lines(placed):
    def asked(x):
        y = x + 1
        return mp.shard_tensor(y, MESH, [])  # the annotation's line, not meshpar's own

    plan = mp.jit(asked).plan(placed[0])
    first = asked.__code__.co_firstlineno
    (gather,) = plan.collectives
    assert gather.where == f"test_jit.py:{first + 2}"
    assert gather.why.endswith(f"made by add at test_jit.py:{first + 1}")
    (output,) = mp.jit(lambda x: x * 2, out_placements=[]).plan(placed[0]).collectives
    assert output.where.startswith("test_jit.py:")
    (given,) = mp.jit(lambda x: x, out_placements=[]).plan(placed[0]).collectives
    assert given.why.endswith("the argument x")


# --- calls after the first ------------------------------------------------------------------------


def test_arguments_of_other_shapes_and_layouts_get_their_own_program():
    f = mp.jit(lambda x: jnp.cumsum(x * 2, 0))
    rows, columns = on(MESH, X, Shard(0)), on(MESH, X, Shard(1))
    for value in (
        rows,
        columns,
        rows,
        on(MESH, X[:4], Shard(0)),
        columns,
        X,
        on(MESH, X[:5], Shard(0)),
    ):
        close(f(value), np.cumsum(2 * np.asarray(value), 0))
    assert f.compiled_count() == 4


def test_what_lies_nowhere_takes_the_program_of_the_last_call():
    f = mp.jit(lambda x, w: dense(x, w))
    x, w = on(MESH, X, Shard(0)), on(MESH, W, Replicate(), Shard(1))
    before = f.plan(x, w)
    close(f(x, w), dense(X, W))
    close(f(X, w), dense(X, W))
    assert f.compiled_count() == 1
    assert f.plan(X, w) is before


def test_a_number_stays_one_whatever_it_was_before():
    x = on(LINE, X.astype(jnp.bfloat16), Shard(0))
    f = mp.jit(lambda x, n: x * n)
    numbers = [2.0, jnp.float32(2), 3.0, jnp.asarray(2.0), np.float32(2), 3, True]
    assert [f(x, n).dtype for n in numbers] == [(x * n).dtype for n in numbers]


def test_a_donated_argument_is_alive_where_the_call_was_not_taken():
    f = mp.jit(lambda x: x + 1, donate_argnums=0)
    rows, columns = on(MESH, X, Shard(0)), on(MESH, X, Shard(1))
    f(on(MESH, X, Shard(0)))
    close(f(columns), X + 1)
    close(f(rows), X + 1)
    assert rows.is_deleted()
