"""One rank of a job of either library: `python ranks.py paddle|meshpar FOLDER`.

Runs every collective that PaddlePaddle's CPU build runs, on the same inputs, and writes what this
rank has afterwards to FOLDER/LIBRARY.RANK.npz and .json. It imports one of the two libraries only.
"""

import json
import pathlib
import sys

import numpy as np

DTYPES = ["float32", "float64", "int32", "int64", "int8", "uint8"]
SHAPES = [(2, 3), (1,)]
OPS = ["SUM", "MAX", "MIN", "PROD"]


class Paddle:
    """PaddlePaddle: tensors are changed in place."""

    def __init__(self):
        import paddle
        import paddle.distributed as dist

        dist.init_parallel_env()
        self.dist, self.tensor = dist, paddle.to_tensor

    def in_place(self, name, x, *args):
        tensor = self.tensor(x)
        getattr(self.dist, name)(tensor, *args)
        return tensor.numpy()

    def into_list(self, name, x, *args):
        found = []
        if name == "gather":
            self.dist.gather(self.tensor(x), found, *args)
        else:
            self.dist.all_gather(found, self.tensor(x), *args)
        return [one.numpy() for one in found]

    def scatter(self, like, xs, src, *args):
        tensor = self.tensor(np.zeros_like(like))
        self.dist.scatter(tensor, None if xs is None else [self.tensor(x) for x in xs], src, *args)
        return tensor.numpy()

    def sent(self, x, peer):
        self.dist.send(self.tensor(x), peer)

    def received(self, like, peer):
        return self.in_place("recv", np.zeros_like(like), peer)

    def batch(self, kind, x, peer):
        tensor = self.tensor(x)
        operation = self.dist.P2POp(getattr(self.dist, kind), tensor, peer)
        for task in self.dist.batch_isend_irecv([operation]):
            task.wait()
        return tensor.numpy()

    def task(self, x):
        tensor = self.tensor(x)
        task = self.dist.all_reduce(tensor, sync_op=False)
        task.wait()
        return tensor.numpy()


class Meshpar:
    """meshpar: results are returned."""

    def __init__(self):
        import jax

        jax.config.update("jax_enable_x64", True)
        import meshpar

        meshpar.init_parallel_env()
        self.dist = meshpar

    def in_place(self, name, x, *args):
        return np.asarray(getattr(self.dist, name)(x, *args))

    def into_list(self, name, x, *args):
        found = []
        if name == "gather":
            self.dist.gather(x, found, *args)
        else:
            self.dist.all_gather(found, x, *args)
        return [np.asarray(one) for one in found]

    def scatter(self, like, xs, src, *args):
        return np.asarray(self.dist.scatter(np.zeros_like(like), xs, src, *args))

    def sent(self, x, peer):
        self.dist.send(x, peer)

    def received(self, like, peer):
        return self.in_place("recv", np.zeros_like(like), peer)

    def batch(self, kind, x, peer):
        operation = self.dist.P2POp(getattr(self.dist, kind), x, peer)
        (task,) = self.dist.batch_isend_irecv([operation])
        return np.asarray(task.wait())

    def task(self, x):
        return np.asarray(self.dist.all_reduce(x, sync_op=False).wait())


def arrays_of(lib):
    """Name -> array."""
    dist = lib.dist
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group([1, 0])
    out = {}

    def keep(name, values):
        values = values if isinstance(values, list) else [values]
        out[f"{name} count"] = np.array(len(values))
        out.update({f"{name} {i}": value for i, value in enumerate(values)})

    for dtype in DTYPES:
        for shape in SHAPES:
            x = np.random.default_rng([rank, *shape]).integers(0, 4, shape).astype(dtype)
            xs = [x + i for i in range(size)]
            case = f"{dtype} {shape}"
            for op in OPS:
                member = getattr(dist.ReduceOp, op)
                keep(f"all_reduce {op} {case}", lib.in_place("all_reduce", x, member))
                reduced = lib.in_place("reduce", x, 1, member)
                if rank == 1:  # elsewhere PaddlePaddle leaves part of the sum
                    keep(f"reduce {op} {case}", reduced)
            keep(f"broadcast {case}", lib.in_place("broadcast", x, 1))
            keep(f"all_gather {case}", lib.into_list("all_gather", x))
            keep(f"gather {case}", lib.into_list("gather", x, 1))
            keep(f"scatter {case}", lib.scatter(x, xs if rank == 1 else None, 1))
            keep(f"task {case}", lib.task(x))
            if rank < 2:
                keep(
                    f"all_reduce of a group {case}",
                    lib.in_place("all_reduce", x, dist.ReduceOp.MAX, group),
                )
                keep(f"broadcast of a group {case}", lib.in_place("broadcast", x, 1, group))
                keep(f"all_gather of a group {case}", lib.into_list("all_gather", x, group))
    dist.barrier()
    return out


def messages_of(lib):
    """Name -> array. PaddlePaddle counts messages as calls of all ranks, so nothing may follow."""
    rank, out = lib.dist.get_rank(), {}
    for dtype in DTYPES:
        x = np.arange(6).reshape(2, 3).astype(dtype)
        if rank == 0:
            lib.sent(x, 1)
            lib.batch("isend", x + 1, 1)
        if rank == 1:
            out[f"recv {dtype}"] = lib.received(x, 0)
            out[f"batch {dtype}"] = lib.batch("irecv", np.zeros_like(x), 0)
    return out


def objects_of(lib):
    """Name -> what JSON holds."""
    dist = lib.dist
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered, sent, scattered = [], [rank, "a"], []
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * 1000 * rank})
    dist.broadcast_object_list(sent, 1)
    dist.scatter_object_list(scattered, [[i, "b"] for i in range(size)] if rank == 1 else None, 1)
    group = dist.new_group([1, 0])
    facts = {
        "rank": rank,
        "size": size,
        "initialized": dist.is_initialized(),
        "available": dist.is_available(),
    }
    facts["ranks of the group"] = list(group.ranks)
    facts["members"] = group.nranks
    if rank < 2:  # elsewhere PaddlePaddle says -1
        facts["position"] = [group.get_group_rank(r) for r in (0, 1)]
    facts["ops"] = {op: int(getattr(dist.ReduceOp, op)) for op in [*OPS, "AVG"]}
    facts["backend"] = dist.get_backend()
    facts["rank in the group"] = dist.get_rank(group) if rank < 2 else None
    return {"all_gather": gathered, "broadcast": sent, "scatter": scattered, **facts}


if __name__ == "__main__":
    library = {"paddle": Paddle, "meshpar": Meshpar}[sys.argv[1]]()
    path = pathlib.Path(sys.argv[2], f"{sys.argv[1]}.{library.dist.get_rank()}")
    pathlib.Path(f"{path}.json").write_text(json.dumps(objects_of(library)))
    np.savez(f"{path}.npz", **arrays_of(library), **messages_of(library))
