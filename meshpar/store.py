"""What processes tell each other beside their arrays: `jax.distributed`'s key-value store.

Nothing in it waits for what the devices are doing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

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
    def of_this_process(cls, prefix: str) -> Store | None:
        """The store of the job that `jax.distributed` has joined, if it has."""
        client = key_value_client()
        return None if client is None else cls(client, prefix)

    def put(self, key: str, value: bytes) -> None:
        """Sets a key, whatever it held."""
        self.client.key_value_set_bytes(f"{self.prefix}/{key}", value, allow_overwrite=True)

    def get(self, key: str) -> bytes | None:
        """The value of a key, if it is there.

        Raises:
          jax.errors.JaxRuntimeError: the service has gone.
        """
        try:
            return self.client.key_value_try_get_bytes(f"{self.prefix}/{key}")
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None

    def under(self, key: str) -> dict[str, bytes]:
        """Name -> value, of the keys `key/name`."""
        start = f"{self.prefix}/{key}/"
        found = self.client.key_value_dir_get_bytes(start)
        return {name.removeprefix(start): value for name, value in found}

    def wait(self, key: str, seconds: float) -> bool:
        """Waits for a key; whether it is there.

        Raises:
          jax.errors.JaxRuntimeError: the service has gone.
        """
        try:
            self.client.blocking_key_value_get_bytes(f"{self.prefix}/{key}", int(1000 * seconds))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return False
        return True

    def delete(self, key: str) -> None:
        """Forgets a key."""
        self.client.key_value_delete(f"{self.prefix}/{key}")

    def read_by(self, key: str, count: int) -> None:
        """Notes that one of `count` readers of `key/...` has read it; the last one deletes it."""
        readers = f"{self.prefix}/readers/{key}"
        if self.client.key_value_increment(readers, 1) == count:
            self.delete(key)
            self.client.key_value_delete(readers)
