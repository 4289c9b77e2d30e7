"""The flag that makes one CPU appear as several devices, among the other flags of `XLA_FLAGS`."""

from __future__ import annotations

import re

__all__ = ["HOST_DEVICES", "with_host_devices"]

HOST_DEVICES = "--xla_force_host_platform_device_count"


def with_host_devices(flags: str, count: int) -> str:
    """`XLA_FLAGS` with another number of CPU devices; all other flags stay.

    Example:
      >>> with_host_devices("--a=1 --xla_force_host_platform_device_count=2", 4)
      '--a=1 --xla_force_host_platform_device_count=4'
    """
    others = re.sub(rf"{HOST_DEVICES}=\S*", "", flags)
    return " ".join([*others.split(), f"{HOST_DEVICES}={count}"])
