"""Regions over the devices of several processes: ranks are devices there too."""

import numpy as np


def test_a_region_over_two_processes_is_one_over_eight_devices(launched):
    run = launched(
        """
        import jax, jax.numpy as jnp, numpy as np, meshpar as mp
        from meshpar import Replicate, Shard
        from tests.processes.ranks import give, start
        start()
        mesh = mp.ProcessMesh(np.arange(8).reshape(2, 4), ["dp", "tp"])
        dp, tp = mesh.group("dp"), mesh.group("tp")

        def fn(x, w):
            # Each process names the ranks of its own line, and all lines do likewise.
            after = {r: tp.ranks[(i + 1) % 4] for i, r in enumerate(tp.ranks)}
            before = {r: tp.ranks[i - 1] for i, r in enumerate(tp.ranks)}
            ring = [mp.P2POp(mp.isend, x, after, tp), mp.P2POp(mp.irecv, x, before, tp)]
            return {
                "total": mp.all_reduce(x.sum()),
                "sent": mp.broadcast(x, tp.ranks[1], tp)[None],
                "shifted": mp.batch_isend_irecv(ring)[1].wait(),
                "columns": mp.all_reduce(x, group=dp),
                "rank": mp.get_rank()[None],
                "gradient": mp.grad(lambda w: mp.all_reduce((w * w * x).sum()))(w),
            }

        both = [Shard(0), Shard(0)]
        out = {"total": None, "sent": both, "shifted": both, "columns": [Replicate(), Shard(0)],
               "rank": both, "gradient": None}
        got = mp.spmd(fn, mesh, [both, None], out)(np.arange(16, dtype=np.float32), np.float32(3))
        give(ranks=tp.ranks, **{k: np.asarray(mp.unshard_dtensor(v)) for k, v in got.items()})
        try:
            mp.get_rank(tp)
        except mp.CollectiveError as error:
            give(error=str(error))
        give(outside=(mp.get_rank(), mp.get_rank(dp), mp.get_world_size(dp)))
        """,
        processes=2,
        devices=4,
    ).ok()
    x = np.arange(16).reshape(2, 4, 2)
    for process, result in enumerate(run.results):
        assert result["ranks"] == tuple(range(4 * process, 4 * process + 4))
        assert result["total"] == x.sum() and result["gradient"] == 6 * x.sum()
        sent = np.repeat(x[:, 1:2], 4, 1).reshape(8, 2)
        np.testing.assert_array_equal(result["sent"], sent)
        np.testing.assert_array_equal(result["shifted"], np.roll(x, 1, 1).ravel())
        np.testing.assert_array_equal(result["columns"], x.sum(0).ravel())
        np.testing.assert_array_equal(result["rank"], range(8))
        assert "one process owns several devices" in result["error"]
        assert result["outside"] == (process, process, 2)
