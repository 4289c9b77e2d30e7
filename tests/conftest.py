"""Eight CPU devices and strict settings for every test."""

import os

# Before the backend starts: the count is read once.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
