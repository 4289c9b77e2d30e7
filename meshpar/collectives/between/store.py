"""What processes tell each other beside their arrays: `jax.distributed`'s key-value store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshpar._jax import key_value_client

__all__ = ["Store"]


@dataclass(frozen=True, slots=True)
class Store:
    """Keys under a prefix; the service lives in process 0.

    Args:
      client: JAX's client of the service.
      prefix: what all keys begin with; another one after each `init_parallel_env`.
    """

    client: Any  # of a type that jaxlib does not export
    prefix: str

    @classmethod
    def of_this_process(cls, prefix: str) -> Store:
        """The store of the job that `jax.distributed` has joined."""
        client = key_value_client()
        assert client is not None, "jax.distributed runs"
        return cls(client, prefix)

    def put(self, key: str, value: bytes) -> None:
        """Sets a key, whatever it held."""
        self.client.key_value_set_bytes(f"{self.prefix}/{key}", value, allow_overwrite=True)

    def under(self, key: str) -> dict[str, bytes]:
        """Name -> value, of the keys `key/name`."""
        start = f"{self.prefix}/{key}/"
        found = self.client.key_value_dir_get_bytes(start)
        return {name.removeprefix(start): value for name, value in found}

    def read_by(self, key: str, count: int) -> None:
        """Notes that one of `count` readers of `key/...` has read it; the last one deletes it."""
        readers = f"{self.prefix}/readers/{key}"
        if self.client.key_value_increment(readers, 1) == count:
            self.client.key_value_delete(f"{self.prefix}/{key}")
            self.client.key_value_delete(readers)
