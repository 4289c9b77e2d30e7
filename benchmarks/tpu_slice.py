"""Meshes of the TPUs of a slice that is not there, for which XLA compiles on any machine.

It needs the extra `tpu`. JAX makes the slice's devices from its name; nothing runs on them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from jax.experimental import topologies

__all__ = ["tpu_slice"]


@contextmanager
def tpu_slice(name: str) -> Iterator[None]:
    """Within it the ranks of a mesh are those of a slice.

    Args:
      name: its kind and shape, such as "v5e:2x2".
    """
    # No TPU is asked for what it is, and other processes may do the same.
    here = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    with mock.patch.dict(os.environ, here):
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
        ranked = sorted(devices, key=lambda device: (device.process_index, device.id))
        with mock.patch("meshpar.mesh.ranked_devices", lambda: ranked):
            yield
