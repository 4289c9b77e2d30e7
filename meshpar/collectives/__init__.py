"""The collective API of `paddle.distributed`, in the two places where code runs as ranks.

Inside a region (`spmd`) a rank is a device, and a collective becomes one of `jax.lax`, in `inside`.
Between processes, after `init_parallel_env()`, a rank is a process, and a collective is a small
compiled program of its own, in `between`. The public functions (`operations`, `point_to_point`,
`objects`, `synchronize`, `stream`) check their arguments and call the one or the other.
"""
