"""`mp.pipeline` equals the loop over microbatches, whatever the schedule and the mesh."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar import schedules
from meshpar.schedules.executors.arguments import PipelineError
from tests.schedules.executors.models import mean_of_losses, mlp, mlp_params, normal

RANKS, COUNTS = (1, 2, 4, 8), (1, 3, 4, 8)
NAMES = (*schedules.NAMES, "auto")
CHUNKS = dict.fromkeys(("VPP", "InterleavedZB", "ZBVPP", "DualPipeV", "auto"), 2)
# Every two of schedule, ranks and microbatches meet.
COVERING = [
    (name, P, COUNTS[(i + j) % 4]) for i, name in enumerate(NAMES) for j, P in enumerate(RANKS)
]
ALL = [case for case in itertools.product(NAMES, RANKS, COUNTS) if case not in COVERING]


def mesh_of(**axes):
    return mp.ProcessMesh.create(axes)


def square(y, target):
    return ((y - target) ** 2).mean()


def assert_same(got, expected, rtol=1e-5):
    """Equal up to 1e-5 of the largest element: float32 sums in another order."""

    def check(a, b):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * max(np.abs(b).max(), 1e-3))

    jax.tree.map(check, got, expected)


def check_schedule(name, P, M, executor="program"):
    params = mlp_params(P * CHUNKS.get(name, 1))
    x, targets = normal(3, M, 2, 8), normal(4, M, 2, 8)
    mesh = mesh_of(pp=P)

    def piped(params, x):
        more = {"loss_fn": square, "targets": targets, "executor": executor}
        return mp.pipeline(mlp, params, x, name, mesh, **more)

    def looped(params, x):
        return mean_of_losses(mlp, params, x, loss=square, targets=targets)

    step = jax.value_and_grad(piped, (0, 1))
    got = (step if executor == "mpmd" else jax.jit(step))(params, x)
    assert_same(got, jax.jit(jax.value_and_grad(looped, (0, 1)))(params, x))


@pytest.mark.parametrize("name, P, M", COVERING)
def test_every_schedule_trains_like_the_loop(name, P, M):
    check_schedule(name, P, M)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, P, M", ALL)
def test_every_schedule_trains_like_the_loop_everywhere(name, P, M):
    check_schedule(name, P, M)


def embed(table, tokens):
    return table[tokens]


def head(table, y):
    return y @ table.T


def cross_entropy(logits, labels):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -chosen.mean()


@pytest.mark.parametrize(
    "name, P, V, recompute",
    [("1F1B", 4, 1, False), ("ZBH1", 2, 1, True), ("VPP", 2, 2, True), ("ZBVPP", 2, 2, False)],
)
def test_tied_embeddings(name, P, V, recompute):
    params, table = mlp_params(P * V), normal(5, 12, 8)
    tokens = jax.random.randint(jax.random.key(6), (3, 2, 5), 0, 12)
    labels = jax.random.randint(jax.random.key(7), (3, 2, 5), 0, 12)
    mesh = mesh_of(pp=P)

    def piped(params, table):
        return mp.pipeline(
            mlp,
            params,
            tokens,
            name,
            mesh,
            first_fn=embed,
            first_params=table,
            last_fn=head,
            last_params=table,
            loss_fn=cross_entropy,
            targets=labels,
            recompute=recompute,
        )

    def looped(params, table):
        ends = {"first": (embed, table), "last": (head, table)}
        return mean_of_losses(mlp, params, tokens, loss=cross_entropy, targets=labels, **ends)

    expected = jax.jit(jax.value_and_grad(looped, (0, 1)))(params, table)
    assert_same(jax.jit(jax.value_and_grad(piped, (0, 1)))(params, table), expected)
    # Without a gradient the forward passes run alone.
    assert_same(jax.jit(piped)(params, table), expected[0])


@pytest.mark.parametrize("name", ["1F1B", "ZBH1"])
def test_dropout_draws_the_same_numbers(name):
    """Keys go along as extras; float32 on both sides, so only the masks could differ much."""
    params, x, targets = mlp_params(2), normal(3, 3, 4, 8), normal(4, 3, 4, 8)
    keys = jax.random.split(jax.random.key(0), 3)
    params["layer"] = jnp.arange(2)

    def stage(params, x, key):
        layer = params.pop("layer")
        keep = jax.random.bernoulli(jax.random.fold_in(key, layer), 0.5, x.shape)
        return jnp.where(keep, mlp(params, x), 0.0)

    weights = {k: v for k, v in params.items() if k != "layer"}

    def piped(weights):
        stacked = {**weights, "layer": params["layer"]}
        return mp.pipeline(
            stage,
            stacked,
            x,
            name,
            mesh_of(pp=2),
            loss_fn=square,
            targets=targets,
            extras=keys,
        )

    def looped(weights):
        stacked = {**weights, "layer": params["layer"]}
        return mean_of_losses(stage, stacked, x, loss=square, targets=targets, extras=keys)

    assert_same(jax.jit(jax.value_and_grad(piped))(weights), jax.value_and_grad(looped)(weights))


TENSOR = {
    "up": [mp.Shard(0), mp.Replicate(), mp.Shard(2)],
    "bias": [mp.Shard(0), mp.Replicate(), mp.Shard(1)],
    "down": [mp.Shard(0), mp.Replicate(), mp.Shard(1)],
}
ZERO_3 = {
    "up": [mp.Shard(0), mp.Shard(1), mp.Replicate()],
    "bias": [mp.Shard(0), mp.Replicate(), mp.Replicate()],
    "down": [mp.Shard(0), mp.Shard(2), mp.Replicate()],
}


@pytest.mark.parametrize("name", ["1F1B", "ZBH1"])
@pytest.mark.parametrize("kept", [TENSOR, ZERO_3], ids=["tensor", "zero3"])
def test_other_axes_cut_within_the_stages(name, kept):
    mesh = mesh_of(pp=2, dp=2, tp=2)
    params, x, targets = mlp_params(2), normal(3, 3, 4, 8), normal(4, 3, 4, 8)
    rows = [mp.Replicate(), mp.Shard(1)]
    asked = {"stacked_params": kept, "microbatches": rows, "targets": rows}

    def piped(params, x):
        return mp.pipeline(
            mlp, params, x, name, mesh, loss_fn=square, targets=targets, in_placements=asked
        )

    def looped(params, x):
        return mean_of_losses(mlp, params, x, loss=square, targets=targets)

    got = jax.jit(jax.value_and_grad(piped, (0, 1)))(params, x)
    assert_same(got, jax.jit(jax.value_and_grad(looped, (0, 1)))(params, x))
    gradients = jax.tree.leaves(got[1][0])
    placements = jax.tree.leaves(kept, is_leaf=lambda p: isinstance(p, list))
    for gradient, expected in zip(gradients, placements, strict=True):
        assert mp.placements_of(gradient) == expected


def test_ends_that_lie_cut_over_the_ranks():
    """Embedding and head are gathered once, and their gradients come back cut."""
    mesh = mesh_of(pp=4)
    params, table, weight = mlp_params(4), normal(5, 12, 8), normal(6, 8, 12)
    tokens = jax.random.randint(jax.random.key(6), (3, 5), 0, 12)
    labels = jax.random.randint(jax.random.key(7), (3, 5), 0, 12)

    def project(weight, y):
        return y @ weight

    def piped(params, table, weight):
        return mp.pipeline(
            mlp,
            params,
            tokens,
            "1F1B",
            mesh,
            first_fn=embed,
            first_params=table,
            last_fn=project,
            last_params=weight,
            loss_fn=cross_entropy,
            targets=labels,
            in_placements={"first_params": [mp.Shard(0)], "last_params": [mp.Shard(1)]},
        )

    def looped(params, table, weight):
        ends = {"first": (embed, table), "last": (project, weight)}
        return mean_of_losses(mlp, params, tokens, loss=cross_entropy, targets=labels, **ends)

    got = jax.jit(jax.value_and_grad(piped, (0, 1, 2)))(params, table, weight)
    assert_same(got, jax.jit(jax.value_and_grad(looped, (0, 1, 2)))(params, table, weight))
    assert mp.placements_of(got[1][1]) == [mp.Shard(0)]
    assert mp.placements_of(got[1][2]) == [mp.Shard(1)]


def test_without_a_loss_it_returns_the_outputs():
    params, x = mlp_params(4), normal(3, 3, 2, 8)
    got = jax.jit(lambda p, x: mp.pipeline(mlp, p, x, "VPP", mesh_of(pp=2)))(params, x)
    expected = x
    for s in range(4):
        expected = jax.vmap(lambda x, s=s: mlp(jax.tree.map(lambda p: p[s], params), x))(expected)
    assert_same(got, expected)


def test_a_trees_leaves_go_along():
    """x may be any pytree of floats."""
    params, x = {"w": normal(0, 2, 8, 8)}, {"a": normal(1, 3, 2, 8), "b": normal(2, 3, 2, 8)}

    def stage(params, x):
        return {"a": jnp.tanh(x["a"] @ params["w"]), "b": x["b"] * 0.5 + x["a"]}

    def loss(y, target):
        return (y["a"] * y["b"]).mean()

    def piped(params, x):
        return mp.pipeline(stage, params, x, "ZBH1", mesh_of(pp=2), loss_fn=loss, targets=None)

    def looped(params, x):
        return mean_of_losses(stage, params, x, loss=loss, targets=None)

    got = jax.jit(jax.value_and_grad(piped, (0, 1)))(params, x)
    assert_same(got, jax.jit(jax.value_and_grad(looped, (0, 1)))(params, x))


def test_a_schedule_of_ones_own():
    """Two ranks that do all forwards of even microbatches first."""
    order = [schedules.Action("F", 0, m) for m in (0, 2, 1)]
    order += [schedules.Action("B", 0, m) for m in (2, 0, 1)]
    mine = schedules.Schedule.from_orders([order, order], M=3, name="mine")
    params, x = mlp_params(2), normal(3, 3, 2, 8)

    def loss(params):
        return mp.pipeline(mlp, params, x, mine, mesh_of(pp=2), loss_fn=square, targets=x)

    expected = jax.value_and_grad(lambda p: mean_of_losses(mlp, p, x, loss=square, targets=x))(
        params
    )
    assert_same(jax.jit(jax.value_and_grad(loss))(params), expected)


@pytest.mark.parametrize("executor", ["program", "mpmd"])
def test_gradients_of_narrow_parameters_are_summed_in_float32(executor):
    count, mesh = 64, mesh_of(pp=2)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.uniform(1, 2, (count, 4)), jnp.bfloat16)

    def loss(params):
        more = {"loss_fn": lambda y, _: y.astype(jnp.float32).sum(), "targets": x}
        return mp.pipeline(lambda w, x: w * x, params, x, "1F1B", mesh, executor=executor, **more)

    step = jax.grad(loss)
    got = (step if executor == "mpmd" else jax.jit(step))(jnp.ones((2, 4), jnp.bfloat16))
    # With weights of 1 each microbatch's term is x / 64 to the last bit.
    exact = np.asarray(x, np.float64).sum(0) / count
    np.testing.assert_array_equal(np.asarray(got), np.asarray([exact] * 2).astype(jnp.bfloat16))


@pytest.mark.parametrize("name", ["FThenB", "1F1B", "ZBH1"])
def test_a_weight_used_twice(name):
    """sum(x @ w @ w), whose value and gradient are known by hand."""
    x = jnp.array([[[1.0, -2.0]]])
    w = jnp.array([[[0.5, -1.0], [2.0, 0.25]]])

    def loss(w):
        return mp.pipeline(
            lambda w, x: x @ w @ w,
            w,
            x,
            name,
            mesh_of(pp=1),
            loss_fn=lambda y, _: y.sum(),
            targets=None,
        )

    value, gradient = jax.jit(jax.value_and_grad(loss))(w)
    assert float(value) == -1.625
    assert gradient.tolist() == [[[-4.0, -1.25], [-0.5, -6.0]]]


def run(params=None, x=None, schedule="1F1B", stage=mlp, loss=square, targets=None, **more):
    x = normal(3, 3, 2, 8) if x is None else x
    return mp.pipeline(
        stage,
        mlp_params(2) if params is None else params,
        x,
        schedule,
        mesh_of(pp=2),
        loss_fn=loss,
        targets=x if targets is None else targets,
        **more,
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"params": mlp_params(3)}, r"3 % 2 = 1[\s\S]*stack 4 stages"),
        ({"params": mlp_params(0)}, r"there are no stages"),
        ({"x": normal(3, 0, 2, 8)}, r"there are no microbatches"),
        ({"targets": normal(4, 2, 2, 8)}, r"microbatches: 3, targets: 2"),
        ({"stage": lambda p, x: x @ p["up"]}, r"float32\[2, 8\][\s\S]*float32\[2, 16\]"),
        ({"x": jnp.zeros((3, 2), int), "first_fn": lambda p, t: t}, "int32"),
        # A batch that does not split, and shapes that change from one microbatch to the next.
        (
            {"x": [normal(3, n, 8) for n in (2, 2, 1)]},
            r"microbatch 0 is float32\[2, 8\], microbatch 2 is float32\[1, 8\]"
            r"[\s\S]*jnp\.stack\(each\), \*microbatches\)",
        ),
        ({"params": [mlp_params(), mlp_params()]}, r"a list of 2[\s\S]*\*stacked_params\)"),
        (
            {"stage": lambda p, x, n: x[:n], "extras": jnp.arange(3)},
            r"stage_fn[\s\S]*float32\[2, 8\][\s\S]*jnp\.where\(mask",
        ),
        ({"stage": lambda p, x: x[x > 0]}, r"stage_fn[\s\S]*one shape"),
        ({"loss": lambda y, t: y[t > 0].mean()}, r"loss_fn[\s\S]*one shape"),
        ({"stage": lambda p, x: x if x.sum() > 0 else x[:1]}, r"stage_fn[\s\S]*one shape"),
        ({"loss": lambda y, t: y}, r"not a scalar"),
        ({"schedule": schedules.generate("1F1B", 2, 4)}, r"P=2, M=3, V=1"),
        ({"first_params": jnp.zeros(3)}, "first_fn"),
    ],
)
def test_what_does_not_fit_is_named(arguments, message):
    with pytest.raises(PipelineError, match=message):
        run(**arguments)


def test_an_axis_that_is_not_there():
    with pytest.raises(mp.MeshError, match="stages"):
        run(axis="stages")


def test_an_unknown_schedule():
    with pytest.raises(ValueError, match="1F1B"):
        run(schedule="2F2B")


@pytest.mark.parametrize(
    "asked",
    [{"microbatches": [mp.Shard(0)]}, {"stacked_params": [mp.Shard(1)]}, {"params": []}],
    ids=str,
)
def test_placements_that_do_not_fit(asked):
    with pytest.raises(mp.PlacementError, match="pipeline"):
        run(in_placements=asked)


def test_gradients_that_are_not_there():
    with pytest.raises(NotImplementedError, match="targets"):
        jax.grad(lambda t: run(targets=t))(normal(4, 3, 2, 8))
    with pytest.raises(NotImplementedError, match="outputs"):
        jax.grad(lambda p: run(params=p, loss=None, targets=()).sum())(mlp_params(2))
