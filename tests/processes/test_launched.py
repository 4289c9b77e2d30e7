"""Ranks of a job see each other, and hand results to the test."""

import numpy as np


def test_ranks_join_and_compute_together(launched):
    run = launched(
        """
        import jax, jax.numpy as jnp, numpy as np, meshpar as mp
        from tests.processes.ranks import give, start
        start()
        mesh = mp.ProcessMesh(list(range(jax.device_count())), ["x"])
        x = mp.shard_tensor(np.arange(7.0), mesh, [mp.Shard(0)])
        give(rank=jax.process_index(), devices=jax.local_device_count(), total=float(mp.jit(jnp.sum)(x)),
             whole=np.asarray(x))
        print("hello from", jax.process_index())
        """,
        processes=2,
        devices=2,
    ).ok()
    assert [r["rank"] for r in run.results] == [0, 1]
    assert [r["devices"] for r in run.results] == [2, 2]
    for rank, result in enumerate(run.results):
        assert result["total"] == 21.0
        np.testing.assert_array_equal(result["whole"], np.arange(7.0))
        assert f"hello from {rank}" in run.logs[rank]
    assert run.stdout.count("hello from 0") == 1
    assert "hello from 1" not in run.stdout
