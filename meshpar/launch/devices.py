"""Which devices a launched process sees."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from glob import glob

from meshpar.xla_flags import with_host_devices

__all__ = ["device_variables", "gpus", "parse_devices", "platform_of", "shared_out"]

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}
_FILES = {"cuda": "/dev/nvidia[0-9]*", "rocm": "/dev/dri/renderD*"}


def parse_devices(text: str) -> tuple[int, ...]:
    """The numbers in `0,1,4-7`.

    Raises:
      ValueError: not such a list, or a number that occurs twice.

    Example:
      >>> parse_devices("0,4-6")
      (0, 4, 5, 6)
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.strip().isdecimal() or not (last or first).strip().isdecimal():
            raise ValueError(f"{text!r} is no list of device numbers such as 0,1 or 0-3")
        numbers += range(int(first), int(last or first) + 1)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"{text!r} names no device, or one of them twice")
    return tuple(numbers)


def platform_of(environ: Mapping[str, str]) -> str:
    """Where JAX will run, found out without starting it: "cuda", "rocm", "tpu" or "cpu"."""
    asked = environ.get("JAX_PLATFORMS", "").split(",")[0]
    if asked:
        return "cuda" if asked == "gpu" else asked
    if glob("/dev/nvidia[0-9]*") and _has("jax_cuda12_plugin", "jax_cuda13_plugin"):
        return "cuda"
    if glob("/dev/kfd") and _has("jax_rocm60_plugin", "jax_rocm7_plugin"):
        return "rocm"
    if (glob("/dev/accel[0-9]*") or glob("/dev/vfio/[0-9]*")) and _has("libtpu"):
        return "tpu"
    return "cpu"


def _has(*modules: str) -> bool:
    return any(importlib.util.find_spec(name) is not None for name in modules)


def gpus(platform: str, environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """The numbers of the GPUs that are visible here; `None` on other platforms."""
    if platform not in _VISIBLE:
        return None
    names = environ.get(_VISIBLE[platform])
    count = len(glob(_FILES[platform])) if names is None else len(names.split(","))
    return tuple(range(count))


def shared_out(
    devices: tuple[int, ...] | None, processes: int
) -> list[tuple[int, ...]] | list[None]:
    """Equal shares of the devices, neighbours together, one a process; `None` for all of them.

    Raises:
      ValueError: they cannot be shared out equally.

    Example:
      >>> shared_out((0, 1, 2, 3), 2)
      [(0, 1), (2, 3)]
    """
    if devices is None:
        return [None] * processes
    share, rest = divmod(len(devices), processes)
    if rest or not share:
        raise ValueError(
            f"{len(devices)} device(s), {', '.join(map(str, devices))}, cannot be shared out "
            f"equally to {processes} processes"
        )
    return [devices[i * share : (i + 1) * share] for i in range(processes)]


def device_variables(
    devices: tuple[int, ...], platform: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """The environment variables that leave a process only these devices.

    Args:
      devices: numbers among the devices that are visible here.
      platform: as of `platform_of`.
      environ: the environment that the process would have.

    Raises:
      NotImplementedError: on TPUs, whose processes share a host's chips by its topology.
    """
    # Numbered anew: the process sees no others.
    own = {"PADDLE_LOCAL_DEVICE_IDS": ",".join(map(str, range(len(devices))))}
    if platform == "cpu":
        flags = with_host_devices(environ.get("XLA_FLAGS", ""), len(devices))
        return {**own, "XLA_FLAGS": flags}
    if platform == "tpu":
        raise NotImplementedError(
            "--devices on TPUs: a process that drives part of a host's chips is not supported; "
            "leave it out, and one process drives them all"
        )
    if platform not in _VISIBLE:
        raise NotImplementedError(f"--devices on {platform}: only CPUs and GPUs can be shared out")
    name = _VISIBLE[platform]
    return {**own, name: ",".join(_visible(devices, name, environ))}


def _visible(devices: tuple[int, ...], name: str, environ: Mapping[str, str]) -> list[str]:
    there = environ.get(name)
    if there is None:
        return [str(number) for number in devices]
    names = there.split(",")
    if max(devices) >= len(names):
        raise ValueError(f"device {max(devices)} is not there: {name}={there} has {len(names)}")
    return [names[number] for number in devices]
