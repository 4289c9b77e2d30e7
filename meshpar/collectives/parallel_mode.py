"""`ParallelMode`: Paddle's numbers for kinds of parallelism."""

from __future__ import annotations

import enum

__all__ = ["ParallelMode"]


class ParallelMode(enum.IntEnum):
    """How a model is spread over devices.

    Example:
      >>> ParallelMode.PIPELINE_PARALLEL == 2
      True

    Follows `paddle.distributed.ParallelMode` (3.3.1).
    """

    DATA_PARALLEL = 0
    TENSOR_PARALLEL = 1
    PIPELINE_PARALLEL = 2
    SHARDING_PARALLEL = 3
    SEGMENT_PARALLEL = 4
