"""Placements of activations inside the stages, whether or not they leave rows on the data axes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar as mp
from meshpar.compiler.annotations import Surroundings
from meshpar.compiler.program import program_of
from meshpar.schedules.executors.moved_rows import moves_rows
from tests.training.small_pipeline import (
    Net,
    PlacedNet,
    batch,
    losses,
    piped,
    placements,
    single,
)

PLACES = [
    {},
    {"dp": 0},
    {"tp": 1},
    {"dp": 0, "tp": 1},
    {"dp": 0, "tp": 0},
]
# Placements inside a layer, placements of its result, executor, schedule, rows, scanned.
CASES = [
    ({}, {"dp": 0}, "program", "1F1B", 10, True),
    ({"tp": 1}, {}, "mpmd", "ZBH1", 12, False),
    ({"tp": 1}, {"tp": 1}, "program", "ZBH1", 12, False),
    ({"dp": 0}, {"dp": 1}, "mpmd", "1F1B", 10, True),
]
ALL = [
    (inside, after, executor, ("1F1B", "ZBH1")[k % 2], (12, 10)[k // 2 % 2], bool(k // 4 % 2))
    for k, (inside, after, executor) in enumerate(
        itertools.product(PLACES, PLACES, ("program", "mpmd"))
    )
]


class Placed(PlacedNet):
    """Tensor parallel layers that place what is inside them and what they return."""

    def __init__(self, mesh, inside, after, scanned):
        super().__init__(mesh, {"up": -1, "down": -2}, scanned)
        self.inside, self.after = inside, after

    def layer(self, layer, x):
        h = jnp.tanh(layer.up(x))
        h = mp.shard_tensor(h, self.mesh, placements(self.mesh, self.inside))
        return mp.shard_tensor(x + layer.down(h), self.mesh, placements(self.mesh, self.after))


def check(inside, after, executor, schedule, rows, scanned):
    mesh = mp.ProcessMesh.create({"pp": 2, "dp": 2, "tp": 2})
    model, (x, _) = Placed(mesh, inside, after, scanned), batch(rows)
    dm, one = piped(model, mesh, executor=executor, schedule_mode=schedule), single(Net(4))
    np.testing.assert_allclose(losses(dm, rows), losses(one, rows), rtol=1e-5)
    for each in (dm, one):
        each.predict()
    np.testing.assert_allclose(np.asarray(dm(x)), np.asarray(one(x)), atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_equals_that_of_one_device(case):
    check(*case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_step_equals_that_of_one_device_everywhere(case):
    check(*case)


def test_rows_that_go_from_one_axis_to_another_are_refused():
    """Every device would send its block to another one: a ring, which a stage cannot have."""
    mesh = mp.ProcessMesh.create({"pp": 2, "dp": 2, "tp": 2})
    dm = piped(Placed(mesh, {"dp": 1, "tp": 0}, {"tp": 0}, True), mesh)
    dm.predict()
    with pytest.raises(NotImplementedError, match="around a ring"):
        dm(batch()[0])


@pytest.mark.parametrize(
    "cut, moves",
    [({"dp": 0}, False), ({"dp": 0, "tp": 0}, False), ({"dp": 1}, True), ({"tp": 1}, True)],
    ids=str,
)
def test_which_annotations_move_rows(cut, moves):
    mesh = mp.ProcessMesh.create({"dp": 2, "tp": 2})

    def outside_of_loops(x, w):
        return mp.shard_tensor(x, mesh, placements(mesh, cut)) @ w

    def of_parameters(x, w):
        return x @ mp.shard_tensor(w, mesh, placements(mesh, cut))

    def in_loops(x, w):
        def turn(x, _):
            return outside_of_loops(x, w), None

        return jax.lax.scan(jax.checkpoint(turn), x, None, 3)[0]

    def found(fn):
        program = program_of(jax.make_jaxpr(fn)(jnp.ones((4, 4)), jnp.ones((4, 4))))
        sizes = dict(mesh.axis_sizes)
        return moves_rows(program, program.inputs[:1], ("dp",), sizes, Surroundings())

    assert [found(fn) for fn in (outside_of_loops, in_loops, of_parameters)] == [
        moves,
        moves,
        False,
    ]
