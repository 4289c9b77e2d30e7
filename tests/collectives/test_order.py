"""Programs with collectives start in the order of the calls, whoever waits for them and when.

gloo tells two collectives of the same devices apart by nothing but their order: where a process
started them in another one, it gave wrong numbers or ended the process.
"""

import pytest

SCRIPT = """
import random, time
import jax, numpy as np
import meshpar as mp
from jax.sharding import NamedSharding, PartitionSpec
from tests.processes.ranks import give
mp.init_parallel_env()
rank, n, local = mp.get_rank(), mp.get_world_size(), jax.local_device_count()
mesh = mp.ProcessMesh(np.arange(n * local).reshape(n, local), ["out", "in"]).jax_mesh
spec = PartitionSpec(("out", "in"))

def step(x):  # four reductions between the processes, over the devices of the eager collectives
    def body(x):
        for _ in range(4):
            x = jax.lax.psum(x @ x.T, "out") / (32 * n)
        return jax.lax.ppermute(x, "out", [(i, (i + 1) % n) for i in range(n)])
    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

step = jax.jit(step)
state = jax.make_array_from_callback(
    (n * local * 32, 32), NamedSharding(mesh, spec), lambda _: np.ones((32, 32), np.float32))
sizes = [1, 3, 500, 20_000]
for size in sizes:
    mp.all_reduce(np.ones(size, np.float32))
state = step(state).block_until_ready()
common, own = random.Random(0), random.Random(rank)
waiting, wrong, messages = [], [], []

def check(size, i, task):
    total = np.asarray(task.wait())
    if total.shape != (size,) or (total != n * i + sum(range(n))).any():
        wrong.append((size, i, total[:3]))

for i in range(ITERATIONS):
    kind, size = common.random(), common.choice(sizes)
    time.sleep(own.random() * 0.002 if own.random() < 0.3 else 0)
    if kind < 0.45:
        state = step(state)
    elif kind < 0.9:
        x = np.full(size, i + rank, np.float32)
        waiting.append((size, i, mp.all_reduce(x, sync_op=kind > 0.85)))
        if kind > 0.85:
            size, i, total = waiting.pop()
            waiting.append((size, i, mp.Task(total)))
    elif rank == 0:
        messages.append((mp.isend(np.full(7, i, np.float32), 1), i))
    elif rank == 1:
        messages.append((mp.irecv(np.zeros(7, np.float32), 0), i))
    if len(waiting) > 6:
        for task in waiting:
            check(*task)
        waiting = []
for task in waiting:
    check(*task)
for task, i in messages:
    got = task.wait()
    if rank == 1 and (np.asarray(got) != i).any():
        wrong.append((i, got))
ones = bool((np.asarray(state.addressable_shards[0].data) == 1).all())
give(wrong=wrong, ones=ones, messages=len(messages))
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_collectives_that_are_not_waited_for_keep_their_place_among_steps(launched, devices):
    script = SCRIPT.replace("ITERATIONS", "150")
    run = launched(script, 2, devices=devices, timeout=60).ok()
    for given in run.results:
        assert not given["wrong"] and given["ones"] and given["messages"] > 5
