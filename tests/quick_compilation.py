"""Flags of XLA under which the small programs of tests compile quickly, and run slowly."""

from importlib.metadata import version

FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if version("jaxlib").startswith("0.10."):
    # The older emitters of loops compile three times as fast; later versions of XLA have one kind.
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
