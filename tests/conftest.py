"""Eight CPU devices and strict settings for every test."""

import os

# Before the backend starts: the count is read once. Half of a small program's compile time goes
# into optimizing machine code that then runs a few milliseconds.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
).strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from hypothesis import settings

jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples in every run, so that a failure is the change's; `make fuzz` draws new ones.
settings.register_profile("same", derandomize=True, print_blob=True)
settings.register_profile("new", print_blob=True)
settings.load_profile("same")
