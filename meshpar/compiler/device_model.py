"""What communication and computation cost, in seconds, on the device that is planned for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshpar.placements.steps import Step

__all__ = ["DeviceModel"]


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Rates of one device; they decide between layouts and are shown in plans as estimates.

    The defaults are those of a TPU v5e chip's data sheet: 197 TFLOP/s in bfloat16, 819 GB/s of
    memory, 4 links of 45 GB/s of which one axis of a mesh uses two. `of` has those of other
    devices.

    Args:
      flops: floating-point operations a second.
      memory_bandwidth: bytes a second between the device and its memory.
      link_bandwidth: bytes that a device sends a second over one mesh axis.
      latency: seconds that a collective takes without data.
    """

    flops: float = 197e12
    memory_bandwidth: float = 819e9
    link_bandwidth: float = 90e9
    latency: float = 1e-6

    @classmethod
    def of(cls, platform: str) -> DeviceModel:
        """The model of a platform as JAX names it; that of the defaults for an unknown one.

        The CPU's figures are orders of magnitude for host devices that share a few cores; the
        GPU's are those of an H100's data sheet, NVLink included.
        """
        known = {
            "cpu": cls(flops=1e10, memory_bandwidth=5e9, link_bandwidth=2e9, latency=2e-5),
            "gpu": cls(flops=989e12, memory_bandwidth=3.35e12, link_bandwidth=450e9, latency=5e-6),
        }
        return known.get(platform, cls())

    def collective_seconds(self, sent: float) -> float:
        """The time of one collective in which each device sends so many bytes."""
        return self.latency + sent / self.link_bandwidth

    def reshard_seconds(self, steps: Iterable[Step], share: float = 1.0) -> float:
        """The time of the steps of a reshard, or of a share of its bytes; local ones take none."""
        sent = [step.bytes for step in steps if step.is_collective]
        return sum(self.collective_seconds(each * share) for each in sent)

    def compute_seconds(self, operations: float, moved: float) -> float:
        """The time of a local operation: that of its arithmetic or of its memory traffic."""
        return max(operations / self.flops, moved / self.memory_bandwidth)
