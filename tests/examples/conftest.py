"""Compiles without optimizing machine code, which takes longer than the few steps of a test."""

import os

# Before the backend starts.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
).strip()
