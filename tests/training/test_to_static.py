"""Every model trains alike on every mesh, and its state lies as its placements promise."""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from numpy.testing import assert_allclose

import meshpar as mp
from meshpar.models import cross_entropy, rules_for

# name -> mesh axes, ZeRO stage, axes of the collectives that the layout needs
LAYOUTS = {
    "dp8": ({"dp": 8}, 0, {"dp"}),
    "tp8": ({"tp": 8}, 0, {"tp"}),
    "dp2tp4": ({"dp": 2, "tp": 4}, 0, {"dp", "tp"}),
    "zero1": ({"dp": 8}, 1, {"dp"}),
    "zero2": ({"dp": 8}, 2, {"dp"}),
    "zero3": ({"dp": 8}, 3, {"dp"}),
    "dp2fsdp2tp2": ({"dp": 2, "fsdp": 2, "tp": 2}, 0, {"dp", "fsdp", "tp"}),
}


def trained(case, mesh, stage=0, **options):
    """Five steps of `to_static`: the model on the mesh, its losses, and the last placed batch."""
    axes = None if "dp" in mesh.dim_names else ()
    strategy = mp.Strategy({"data_axes": axes})
    if stage:
        strategy.sharding.enable, strategy.sharding.stage = True, stage
    dm = mp.to_static(case.placed(mesh), strategy, loss=cross_entropy, optimizer=case.tx, **options)
    dm.train()
    losses = [float(dm(x, y)) for x, y in case.batches]
    return dm, losses


def local_bytes(value):
    """What the placements promise that one device holds: `ceil(d / n)` of each dim cut n times."""
    mesh, shape = mp.mesh_of(value), list(value.shape)
    for dim in range(len(shape)):
        cuts = math.prod(
            size
            for size, placement in zip(mesh.shape, mp.placements_of(value), strict=True)
            if placement.is_shard(dim)
        )
        shape[dim] = -(-shape[dim] // cuts)
    return math.prod(shape) * value.dtype.itemsize


def held_bytes(value):
    storage = value.storage if isinstance(value, mp.DistTensor) else value
    return {shard.data.nbytes for shard in storage.addressable_shards}


def zero_placements(placements, shape, mesh, axis):
    """The parameter's placements with a cut over `axis` on the first dim that it divides."""
    at = mesh.dim_names.index(axis)
    for dim, size in enumerate(shape):
        cuts = math.prod(n for n, p in zip(mesh.shape, placements, strict=True) if p.is_shard(dim))
        if size % (cuts * mesh.shape[at]) == 0:
            return [*placements[:at], mp.Shard(dim), *placements[at + 1 :]]
    return placements


def check_lies_as_promised(dm, case, mesh, stage):
    rules = rules_for(case.build())
    moments = 0
    for name, value in dm.state_dict().items():
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            continue
        assert held_bytes(value) == {local_bytes(value)}, name
        param = name.split(".mu.")[-1].split(".nu.")[-1]
        if value.ndim == 0:  # counters
            assert mp.placements_of(value) == [mp.Replicate()] * mesh.ndim
            continue
        expected = case.placements(param, value.ndim, rules, mesh)
        if name.endswith((".mean", ".var")):
            expected = [mp.Replicate()] * mesh.ndim  # running statistics were not placed
        elif stage >= (1 if name.startswith("opt.") else 3):
            expected = zero_placements(expected, value.shape, mesh, "dp")
        assert mp.placements_of(value) == expected, name
        moments += name.startswith("opt.")
    assert moments or case.name == "resnet-sgd"
    for leaf in dm.place_batch(*case.batches[0]):
        cuts = [
            mp.Shard(0) if axis in ("dp", "fsdp") else mp.Replicate() for axis in mesh.dim_names
        ]
        assert mp.placements_of(leaf) == cuts
        assert held_bytes(leaf) == {local_bytes(leaf)}


def check(cases, reference, mesh_of_shape, name, layout, **options):
    axes, stage, needed = LAYOUTS[layout]
    case, mesh = cases(name), mesh_of_shape(**axes)
    dm, losses = trained(case, mesh, stage, **options)
    assert_allclose(losses, reference(name), rtol=1e-5)
    assert len(set(losses)) == len(losses)
    check_lies_as_promised(dm, case, mesh, stage)
    assert needed <= dm.collectives().axes()
    assert dm.compile_counts == {"train": 1, "eval": 0, "predict": 0}


@pytest.mark.parametrize(
    "name, layout",
    [
        *itertools.product(["decoder", "gpt2", "mlp", "resnet"], LAYOUTS),
        ("decoder-scanned", "dp2fsdp2tp2"),
        ("decoder-scanned", "zero3"),
        ("resnet-sgd", "dp2tp4"),
        ("resnet-sgd", "zero2"),
    ],
)
def test_five_losses_equal_one_device(cases, reference, mesh_of_shape, name, layout):
    check(cases, reference, mesh_of_shape, name, layout)


@pytest.mark.parametrize("name, layout", [("decoder", "zero3"), ("gpt2", "dp2tp4")])
def test_xla_s_partitioner_trains_alike(cases, reference, mesh_of_shape, name, layout):
    check(cases, reference, mesh_of_shape, name, layout, partitioner="xla")
