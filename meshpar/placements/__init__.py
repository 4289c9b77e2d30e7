"""What a layout is, and how one becomes another.

`types` has the placements, `layout` their internal form, `blocks` who holds what of a tensor,
`dist_tensor` what a `jax.Array` cannot hold, `shard` the functions that place data, `reshard` those
that change placements.
"""
