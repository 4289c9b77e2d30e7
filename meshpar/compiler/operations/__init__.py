"""Paddle's operations as JAX functions, a family a file: what `infer_forward` traces.

To add one, write its form under `@operation("its_name")` in the file of its family: tensors first,
attributes by Paddle's names after them. Its rule follows from the rules of the primitives that it
traces to.
"""

from meshpar.compiler.operations import (
    contraction,
    elementwise,
    indexing,
    normalization,
    optimizers,
    reductions,
    shapes,
    windows,
)
from meshpar.compiler.operations.registry import OPERATIONS, Operation, infer_reference

__all__ = [
    "OPERATIONS",
    "Operation",
    "contraction",
    "elementwise",
    "indexing",
    "infer_reference",
    "normalization",
    "optimizers",
    "reductions",
    "shapes",
    "windows",
]
