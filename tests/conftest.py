"""Eight CPU devices and strict settings for every test."""

import os

from tests.quick_compilation import FLAGS

# Before the backend starts: the count is read once.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", *FLAGS]
).strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from hypothesis import settings

from meshpar.compiler.propagate import AFTER_EACH_PASS
from meshpar.compiler.verify import verify

jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples in every run, so that a failure is the change's; `make fuzz` draws new ones.
settings.register_profile("same", derandomize=True, print_blob=True)
settings.register_profile("new", print_blob=True)
settings.load_profile("same")

AFTER_EACH_PASS.append(verify)
