"""Checkpoints: global values, written shard by shard by orbax, read onto any mesh.

A checkpoint is the folder `path/<id>`: the arrays in orbax's format, and one JSON file that says
what is there and holds the plain numbers and texts. Padding and pending reductions are never
written. A folder gets its name when it is complete.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping, MutableMapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from meshpar.tell_all import tell_all
from meshpar.training.leaves import Entry, Plain, array_of, entry_of, reading_of, restored
from meshpar.training.paths import named_leaves

__all__ = ["checkpoint_contents", "load_state_dict", "save_state_dict"]

_COMM_METHODS = (
    "send_recv",
    "broadcast",
    "multi_group_broadcast",
    "grouped_send_recv",
    "parallel_broadcast",
)


def save_state_dict(
    state_dict: Mapping[str, Any],
    path: str | PathLike[str],
    process_group: object = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    async_save: bool = False,
    safetensors: bool = False,
    save_replicas: bool = False,
) -> None:
    """Writes a state as the checkpoint `path/<unique_id>`.

    Each device's shards are written by the process that has them, and replicas once.

    Args:
      state_dict: name -> value: `jax.Array`s, `DistTensor`s, typed random keys and numpy arrays of
        any global shape, Python numbers, truth values and texts; or pytrees of these, whose leaves
        are named by their path ("opt.0.mu"). Counters and the position in the data go in as they
        are.
      path: a folder, which all processes see; made where it is missing.
      process_group: `None`; all processes take part.
      coordinator_rank: 0.
      unique_id: a number, such as the step; an existing checkpoint of this number is replaced once
        the new one is complete. `None`: the largest there is, or 0.
      async_save: not supported.
      safetensors: not supported.
      save_replicas: not supported.

    Raises:
      TypeError: `state_dict` is not a dict, or a leaf is none of the above.
      ValueError: two leaves have one name, or processes save different things.
      NotImplementedError: an option that does not act.

    Example:
      >>> import tempfile, meshpar as mp
      >>> mesh = mp.ProcessMesh([0], ["dp"])
      >>> state = {"w": mp.shard_tensor([1.0, 2.0], mesh, [mp.Shard(0)]), "step": 7}
      >>> with tempfile.TemporaryDirectory() as path:
      ...     save_state_dict(state, path)
      ...     checkpoint_contents(path)
      {'step': 7, 'w': ShapeDtypeStruct(shape=(2,), dtype=float32)}

    Follows `paddle.distributed.save_state_dict` (3.3.1). Deviation: the files are orbax's.
    """
    _check_options(
        "save_state_dict",
        process_group=(process_group, None),
        coordinator_rank=(coordinator_rank, 0),
        async_save=(async_save, False),
        safetensors=(safetensors, False),
        save_replicas=(save_replicas, False),
    )
    leaves = _leaves(state_dict, "save_state_dict")
    try:
        entries = {name: entry_of(leaf) for name, leaf in leaves.items()}
        arrays = {name: array_of(leaf) for name, leaf in leaves.items() if entries[name].is_stored}
    except TypeError as error:
        raise TypeError(f"save_state_dict(state_dict): {error}") from None
    items: dict[str, Any] = {
        "contents": ocp.args.JsonSave({name: entry.to_json() for name, entry in entries.items()})
    }
    if arrays:
        items["arrays"] = ocp.args.PyTreeSave(arrays)
    root = Path(path).absolute()
    target = root / str(max(_ids(root), default=0) if unique_id is None else int(unique_id))
    replaces = _agreed(target, items["contents"].item)
    _write(target, replaces, ocp.args.Composite(**items))


def load_state_dict(
    state_dict: MutableMapping[str, Any],
    path: str | PathLike[str],
    process_group: object = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    offload: bool = False,
    mw_name_compatibility: bool = True,
    aoa_config: object = None,
    safetensors: bool = False,
    worker_groups: object = None,
    comm_method: str = "broadcast",
) -> None:
    """Fills a state from a checkpoint, each value in the placements that it has in `state_dict`.

    The mesh and placements of the checkpoint play no part: each device reads its own blocks.

    Args:
      state_dict: name -> value or pytree of values, as of `save_state_dict`; arrays may also be
        `jax.ShapeDtypeStruct`s, with a sharding. Its entries are replaced by the loaded ones: an
        array by one that lies as it does, a numpy array by a numpy array. Names of the
        checkpoint that it lacks are not read.
      path: the folder that was given to `save_state_dict`.
      process_group: `None`; all processes take part.
      coordinator_rank: 0.
      unique_id: the number of the checkpoint; `None` for the largest.
      offload: all arrays come as numpy arrays.
      mw_name_compatibility: of no effect: there is one kind of names.
      aoa_config: not supported.
      safetensors: not supported.
      worker_groups: not supported.
      comm_method: one of Paddle's names, of no effect: nothing is sent, every process reads.

    Raises:
      FileNotFoundError: no such checkpoint.
      TypeError: `state_dict` is not a dict.
      ValueError: a leaf has another shape or dtype than the saved one, or another kind.
      NotImplementedError: an option that does not act.

    Warns:
      UserWarning: the checkpoint lacks some names; these entries stay as they are.

    Example:
      >>> import tempfile, meshpar as mp
      >>> state = {"w": jax.numpy.arange(3.0), "step": 7}
      >>> with tempfile.TemporaryDirectory() as path:
      ...     save_state_dict(state, path)
      ...     state = {"w": jax.numpy.zeros(3), "step": 0}
      ...     load_state_dict(state, path)
      >>> state
      {'w': Array([0., 1., 2.], dtype=float32), 'step': 7}

    Follows `paddle.distributed.load_state_dict` (3.3.1). Deviation: arrays are immutable, so the
    entries of `state_dict` are replaced.
    """
    _check_options(
        "load_state_dict",
        process_group=(process_group, None),
        coordinator_rank=(coordinator_rank, 0),
        aoa_config=(aoa_config, None),
        safetensors=(safetensors, False),
        worker_groups=(worker_groups, None),
    )
    if comm_method not in _COMM_METHODS:
        raise ValueError(
            f"load_state_dict(comm_method={comm_method!r}): Paddle's are {', '.join(_COMM_METHODS)}"
        )
    leaves = _leaves(state_dict, "load_state_dict")
    folder = _folder(path, unique_id, "load_state_dict")
    entries = _read_contents(folder)
    missing = [name for name in leaves if name not in entries]
    if missing:
        warnings.warn(
            f"load_state_dict: {folder} lacks {', '.join(map(repr, missing))}, which stay as they "
            "are",
            stacklevel=2,
        )
    wanted = {name: leaf for name, leaf in leaves.items() if name in entries}
    for name, leaf in wanted.items():
        problem = entries[name].misfit(leaf)
        if problem:
            raise ValueError(f"load_state_dict(state_dict): {name!r} {problem}, in {folder}")
    readings = {
        name: reading_of(leaf, entries[name], offload=offload)
        for name, leaf in wanted.items()
        if entries[name].is_stored
    }
    read = _read_arrays(folder, readings)
    done = {
        name: restored(leaf, entries[name], read.get(name), offload=offload)
        for name, leaf in wanted.items()
    }
    treedef = jax.tree.structure(dict(state_dict))
    names = [name for name, _ in named_leaves(dict(state_dict))]
    state_dict.update(treedef.unflatten([done.get(name, leaves[name]) for name in names]))


def checkpoint_contents(
    path: str | PathLike[str], unique_id: int | None = None
) -> dict[str, jax.ShapeDtypeStruct | Plain]:
    """What is in a checkpoint, without reading an array and without any mesh.

    Args:
      path: the folder that was given to `save_state_dict`.
      unique_id: the number of the checkpoint; `None` for the largest.

    Returns:
      Name -> global shape and dtype of an array, or the value of a plain entry.

    Raises:
      FileNotFoundError: no such checkpoint.
    """
    folder = _folder(path, unique_id, "checkpoint_contents")
    return {name: entry.shown() for name, entry in _read_contents(folder).items()}


def _check_options(call: str, **options: tuple[object, object]) -> None:
    for name, (value, only) in options.items():
        if value is not only and value != only:
            raise NotImplementedError(f"{call}({name}={value!r}) does not act yet; leave it {only}")


def _leaves(state_dict: object, call: str) -> dict[str, Any]:
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"{call}(state_dict): a {type(state_dict).__name__} is no dict of name -> value"
        )
    leaves = named_leaves(dict(state_dict))
    by_name = dict(leaves)
    if len(by_name) < len(leaves):
        names = [name for name, _ in leaves]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{call}(state_dict): two leaves are named {', '.join(map(repr, twice))}")
    return by_name


def _ids(root: Path) -> list[int]:
    """The numbers of the checkpoints in a folder; an unfinished one has another kind of name."""
    if not root.is_dir():
        return []
    return [int(folder.name) for folder in root.iterdir() if folder.name.isdecimal()]


def _folder(path: str | PathLike[str], unique_id: int | None, call: str) -> Path:
    root = Path(path).absolute()
    ids = sorted(_ids(root))
    if unique_id is None and ids:
        unique_id = ids[-1]
    if unique_id not in ids:
        there = f"its numbers are {ids}" if ids else "there is none"
        asked = "no checkpoint" if unique_id is None else f"no checkpoint {unique_id}"
        raise FileNotFoundError(f"{call}(path={str(path)!r}): {asked}; {there}")
    return root / str(unique_id)


def _agreed(target: Path, contents: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is to be replaced; all processes write the same one, or all raise."""
    sides = {name: _side(entry) for name, entry in contents.items()}
    told = tell_all("a checkpoint", [str(target), sides, target.exists()])
    for process, (path, others, _) in enumerate(told):
        if path != str(target):
            raise ValueError(
                f"save_state_dict: process {process} writes {path}, process {jax.process_index()} "
                f"{target}; all processes write one checkpoint"
            )
        apart = sorted(
            name for name in sides.keys() | others if sides.get(name) != others.get(name)
        )
        if apart:
            theirs, ours = (side.get(apart[0], "missing") for side in (others, sides))
            raise ValueError(
                f"save_state_dict(state_dict): {apart[0]!r} is {theirs} on process {process} and "
                f"{ours} on process {jax.process_index()}"
            )
    return told[0][2]


def _side(entry: Mapping[str, Any]) -> str:
    """What processes must agree on; process 0 writes the plain values."""
    return f"{entry['dtype']}{entry['shape']}" if "shape" in entry else "plain"


def _write(target: Path, replaces: bool, items: ocp.args.Composite) -> None:
    new = target.with_name(f"{target.name}.new") if replaces else target
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(new, items, force=True)
    if new is target:
        return
    # Replacing takes two renames, and between them an older folder is the newest whole one.
    if jax.process_index() == 0:
        old = target.with_name(f"{target.name}.old")
        target.rename(old)
        new.rename(target)
        shutil.rmtree(old)
    ocp.multihost.sync_global_processes("meshpar_save_state_dict")


def _read_contents(folder: Path) -> dict[str, Entry]:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        items = ocp.args.Composite(contents=ocp.args.JsonRestore())
        saved = checkpointer.restore(folder, items)["contents"]
    return {name: Entry.from_json(entry) for name, entry in saved.items()}


def _read_arrays(folder: Path, readings: dict[str, ocp.RestoreArgs]) -> dict[str, Any]:
    if not readings:
        return {}
    # The item says which names to read; its leaves are of no meaning beside the arguments.
    chosen = ocp.args.PyTreeRestore(
        dict.fromkeys(readings, 0), restore_args=readings, partial_restore=True
    )
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(folder, ocp.args.Composite(arrays=chosen))["arrays"]
