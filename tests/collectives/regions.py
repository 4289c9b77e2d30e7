"""Running a function on each rank of a region, with what each rank gives and gets as lists."""

import jax
import jax.numpy as jnp
import numpy as np

import meshpar as mp

MESHES = {n: mp.ProcessMesh(range(n), ["x"]) for n in (1, 2, 4, 8)}
MESH_2X4 = mp.ProcessMesh(np.arange(8).reshape(2, 4), ["dp", "tp"])


def stacked(mesh):
    """One row of dim 0 on each device, in row-major order."""
    return [mp.Shard(0)] * mesh.ndim


def region(mesh, fn):
    """`fn`, of what a rank gives, as a function of all that the ranks give, stacked."""

    def local(tree):
        own = jax.tree.map(lambda x: x[0], tree)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], fn(own))

    return mp.spmd(local, mesh, [stacked(mesh)], stacked(mesh))


def on_ranks(mesh, fn, given):
    """What `fn(what a rank gives)` gets on each rank, in row-major order."""
    out = region(mesh, fn)(jax.tree.map(lambda *xs: np.stack(xs), *given))
    return [jax.tree.map(lambda x, i=i: np.asarray(x)[i], out) for i in range(mesh.size)]


def lines(mesh, group):
    """The groups of the region that a group stands for, as lists of row-major positions."""
    positions = {rank: i for i, rank in enumerate(mesh.process_ids)}
    if group.mesh is None:
        return [[positions[r] for r in group.ranks]]
    grid = np.arange(mesh.size).reshape(mesh.shape)
    last = [mesh.axis_index(axis) for axis in group.axes]
    moved = np.moveaxis(grid, last, range(-len(last), 0))
    return moved.reshape(-1, group.nranks).tolist()
