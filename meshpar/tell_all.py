"""Small values that processes tell each other, such as shapes, before they compute together.

They go through the key-value store, and so need no `init_parallel_env` and no collective.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from meshpar.store import Store

__all__ = ["Json", "tell_all"]

Json = Any  # what the json module takes and gives back

_SPEAK_AFTER = 30  # seconds until a process says whom it waits for
_GIVE_UP_AFTER = 1800  # seconds, the time that collectives have as well
_turns: Counter[str] = Counter()  # topic -> how often it came up


def tell_all(topic: str, value: Json, processes: Sequence[int] | None = None) -> list[Json]:
    """What each process says; every one of them calls this, in the same order per topic.

    Args:
      topic: what it is about, in words; they are shown when a process does not come.
      value: what this process says.
      processes: the numbers of those that take part, in the same order everywhere; all of them
        where it is left out.

    Returns:
      The values, in the order of `processes`.

    Raises:
      TimeoutError: a process did not come in 30 minutes.

    Example:
      >>> tell_all("sizes", [3, 4])
      [[3, 4]]
    """
    me, members = jax.process_index(), processes or range(jax.process_count())
    store = Store.of_this_process("meshpar/told")
    if len(members) == 1 or store is None:
        return [json.loads(json.dumps(value))]
    name = f"{topic}/{'-'.join(map(str, members))}"
    turn = _turns[name]
    _turns[name] += 1
    store.put(f"{name}/{turn}/{me}", json.dumps(value).encode())
    texts = _collected(store, f"{name}/{turn}", members, topic)
    if turn:  # whoever has come to this turn has read the last one
        store.delete(f"{name}/{turn - 1}/{me}")
    return [json.loads(texts[p]) for p in members]


def _collected(store: Store, folder: str, members: Sequence[int], topic: str) -> dict[int, bytes]:
    began, spoken = time.monotonic(), False
    while True:
        found = {int(process): text for process, text in store.under(folder).items()}
        missing = [p for p in members if p not in found]
        if not missing:
            return found
        waited = time.monotonic() - began
        if waited > _GIVE_UP_AFTER:
            raise TimeoutError(
                f"process(es) {missing} did not come to tell of {topic} in {_GIVE_UP_AFTER} s"
            )
        if waited > _SPEAK_AFTER and not spoken:
            spoken = True
            print(
                f"meshpar: process {jax.process_index()} waits for process(es) {missing}, "
                f"which have not told of {topic}",
                file=sys.stderr,
                flush=True,
            )
        store.wait(f"{folder}/{missing[0]}", 1)
