"""One rank of `benchmarks.collectives`: `collectives_rank.py meshpar|torch|mpi4py MOST FOLDER`."""

import json
import os
import pathlib
import statistics
import sys
import time

import numpy as np

ENOUGH = 0.3  # seconds for each measurement


def median(call, barrier):
    """The median time of a call: of as many as fit, but at least three."""
    call()
    call()
    start = time.perf_counter()
    call()
    count = max(3, min(100, int(ENOUGH / (time.perf_counter() - start + 1e-6))))
    count = barrier(count)  # all ranks make as many calls
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def of_meshpar():
    import jax
    import jax.numpy as jnp

    import meshpar as mp
    from meshpar.collectives.between import bodies
    from meshpar.collectives.between.programs import program_of
    from meshpar.collectives.between.world import here

    mp.init_parallel_env()
    rank, n = mp.get_rank(), mp.get_world_size()

    def agreed(count):
        return int(mp.broadcast(np.array(count, np.int32), 0))

    def message(x):
        if rank == 0:
            mp.send(x, 1)
        elif rank == 1:
            mp.recv(x, 0)

    def own_part(x):
        """The processor time of a call beyond that of its compiled program, called in turns.

        Time on the clock would hold what other programs of the machine take.
        """
        program = program_of(here(), bodies.combined, (mp.ReduceOp.SUM,), tuple(range(n)), x)
        struct = program.plain.structs[0]
        whole = jax.make_array_from_single_device_arrays(struct.shape, struct.sharding, [x])

        def bare():
            program.plain.jitted(whole).block_until_ready()

        times = {bare: [], (lambda: mp.all_reduce(x)): []}
        for turn in range(600):
            for call, found in times.items():
                start = time.thread_time()
                call()
                if turn >= 100:
                    found.append(time.thread_time() - start)
        alone, whole_call = (statistics.median(found) for found in times.values())
        return whole_call - alone

    def array(size):
        return jnp.ones(size, jnp.uint8) if size < 4 else jnp.ones(size // 4, jnp.float32)

    calls = {
        "all_reduce": lambda x, xs: mp.all_reduce(x),
        "broadcast": lambda x, xs: mp.broadcast(x, 0),
        "all_gather": lambda x, xs: mp.all_gather([], x),
        "reduce_scatter": lambda x, xs: mp.reduce_scatter(xs),
        "alltoall": lambda x, xs: mp.alltoall([], xs),
        "send_recv": lambda x, xs: message(x),
        "barrier": lambda x, xs: mp.barrier(),
    }
    return rank, calls, array, agreed, own_part


def of_torch():
    import torch
    import torch.distributed as dist

    rank, n = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
    dist.init_process_group("gloo", rank=rank, world_size=n)

    def agreed(count):
        tensor = torch.tensor(count)
        dist.broadcast(tensor, 0)
        return int(tensor)

    def message(x):
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(x, 0)

    def array(size):
        return torch.ones(size, dtype=torch.uint8) if size < 4 else torch.ones(size // 4)

    calls = {
        "all_reduce": lambda x, xs: dist.all_reduce(x),
        "broadcast": lambda x, xs: dist.broadcast(x, 0),
        "all_gather": lambda x, xs: dist.all_gather([torch.empty_like(x) for _ in range(n)], x),
        "reduce_scatter": lambda x, xs: dist.reduce_scatter(torch.empty_like(xs[0]), xs),
        "alltoall": lambda x, xs: dist.all_to_all_single(torch.empty_like(x), x),
        "send_recv": lambda x, xs: message(x),
        "barrier": lambda x, xs: dist.barrier(),
    }
    return rank, calls, array, agreed, None


def of_mpi4py():
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, n = comm.rank, comm.size

    def message(x):
        if rank == 0:
            comm.Send(x, 1)
        elif rank == 1:
            comm.Recv(x, 0)

    def array(size):
        return np.ones(size, np.uint8) if size < 4 else np.ones(size // 4, np.float32)

    calls = {
        "all_reduce": lambda x, xs: comm.Allreduce(x, np.empty_like(x)),
        "broadcast": lambda x, xs: comm.Bcast(x),
        "all_gather": lambda x, xs: comm.Allgather(x, np.empty((n, *x.shape), x.dtype)),
        "reduce_scatter": lambda x, xs: comm.Reduce_scatter_block(
            np.stack(xs), np.empty_like(xs[0])
        ),
        "alltoall": lambda x, xs: comm.Alltoall(np.stack(xs), np.empty((n, *xs[0].shape), x.dtype)),
        "send_recv": lambda x, xs: message(x),
        "barrier": lambda x, xs: comm.Barrier(),
    }
    return rank, calls, array, comm.bcast, None


def main(kind, most, folder):
    of = {"meshpar": of_meshpar, "torch": of_torch, "mpi4py": of_mpi4py}[kind]
    rank, calls, array, agreed, own_part = of()
    n = int(os.environ["PADDLE_TRAINERS_NUM"])
    found = {name: {} for name in calls}
    for size in (n for n in (1, 64, 4096, 65536, 1 << 20, 16 << 20, 64 << 20) if n <= most):
        x = array(size)
        xs = [array(max(1, size // n)) for _ in range(n)]  # the list as a whole is of that size
        for name, call in calls.items():
            if name == "barrier" and size > 1:
                continue
            try:
                found[name][size] = median(lambda call=call, x=x, xs=xs: call(x, xs), agreed)
            except (RuntimeError, ValueError) as error:
                if kind == "meshpar":
                    raise
                print(f"{kind} {name}: {error}", file=sys.stderr)
    if own_part is not None:
        small = [size for size in (4, 4096, 65536) if size <= most]
        found["own part"] = {size: own_part(array(size)) for size in small}
    pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
