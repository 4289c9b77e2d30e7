"""`shard_layer` and `shard_by_rules`: placing the variables of a flax nnx module, in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from flax import nnx

from meshpar.errors import MeshError, MeshparError
from meshpar.mesh import ProcessMesh
from meshpar.models.sharding import ParamRule, axes_for, rules_for
from meshpar.placements.shard import shard_tensor
from meshpar.placements.types import Placement, Replicate, Shard
from meshpar.placements.values import mesh_of

__all__ = ["shard_by_rules", "shard_layer"]

ModuleT = TypeVar("ModuleT", bound=nnx.Module)
ShardFn = Callable[[str, nnx.Module, ProcessMesh], object]
# Inputs and outputs are whatever the user's module takes and gives.
Hook = Callable[[Any, ProcessMesh], Any]
Variable = nnx.Variable[Any]  # of any value


def shard_layer(
    layer: ModuleT,
    process_mesh: ProcessMesh,
    shard_fn: ShardFn | None = None,
    input_fn: Hook | None = None,
    output_fn: Hook | None = None,
) -> ModuleT:
    """Places the variables of a module, and of the modules in it, on a mesh, in place.

    Args:
      layer: a flax `nnx.Module`.
      process_mesh: the mesh.
      shard_fn: called as `shard_fn(name, module, process_mesh)` for the module itself (its name
        is "") and each module in it ("layers.0.attention"), outer ones first. It places variables,
        as in `module.kernel = mp.shard_tensor(module.kernel, mesh, [mp.Shard(1)])`. What it leaves
        alone is replicated.
      input_fn: called as `input_fn(inputs, process_mesh)` before each forward pass with the tuple
        of positional inputs; returns the inputs to use.
      output_fn: called as `output_fn(outputs, process_mesh)` after it; returns the outputs to use.

    Returns:
      The same module. A variable that several modules share stays shared. With hooks its class is
      a subclass of the one that it had.

    Raises:
      MeshError: `process_mesh` is not a `ProcessMesh`.
      TypeError: `layer` is not an nnx module.
      PlacementError: a placement that does not fit.

    Example:
      >>> import meshpar as mp
      >>> mesh = mp.ProcessMesh([0], ["tp"])
      >>> def by_column(name, module, mesh):
      ...     if isinstance(module, nnx.Linear):
      ...         module.kernel = mp.shard_tensor(module.kernel, mesh, [mp.Shard(1)])
      >>> linear = shard_layer(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), mesh, by_column)
      >>> mp.placements_of(linear.kernel.get_value()), mp.placements_of(linear.bias.get_value())
      ([Shard(1)], [Replicate()])

    Follows `paddle.distributed.shard_layer` (3.3.1).
    """
    _check(layer, process_mesh, "shard_layer")
    if shard_fn is not None:
        # iter_modules gives inner modules first, and Paddle's order is outer first.
        modules = sorted(nnx.iter_modules(layer), key=lambda found: len(found[0]))
        before = [(module, dict(_variables(module))) for _, module in modules]
        for path, module in modules:
            shard_fn(".".join(map(str, path)), module, process_mesh)
        _keep_variables(before)
    for _, variable in _all_variables(layer):
        value = variable.get_value()
        if hasattr(value, "shape") and mesh_of(value) is None:
            variable.set_value(shard_tensor(value, process_mesh, []))
    if input_fn is not None or output_fn is not None:
        _hook(layer, process_mesh, input_fn, output_fn)
    return layer


def shard_by_rules(
    layer: ModuleT, process_mesh: ProcessMesh, rules: tuple[ParamRule, ...] | None = None
) -> ModuleT:
    """Places the variables of a module as rules of parameter paths say, in place.

    Inside `create_sharded` the values are made where the rules put them.

    Args:
      layer: a flax `nnx.Module`. Modules below "layers." without a number are stacked, and the
        first dim of their variables is that of the stack.
      process_mesh: the mesh; axes of the rules that it does not have are skipped.
      rules: at most one matches a variable; what none matches is replicated. `None`: those of
        `meshpar.models.rules_for`, which knows the reference models.

    Returns:
      The same module.

    Raises:
      MeshError: `process_mesh` is not a `ProcessMesh`.
      TypeError: not an nnx module; or no rules, and not one of the reference models.
      ValueError: two rules for one variable, or a dim that it does not have.

    Example:
      >>> import meshpar as mp
      >>> mesh = mp.ProcessMesh([[0]], ["dp", "tp"])
      >>> rules = (ParamRule(r"kernel", ((0, "fsdp"), (1, "tp"))),)
      >>> linear = shard_by_rules(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), mesh, rules)
      >>> mp.placements_of(linear.kernel.get_value())
      [Replicate(), Shard(1)]
    """
    _check(layer, process_mesh, "shard_by_rules")
    rules = rules_for(layer) if rules is None else rules
    for path, variable in _all_variables(layer):
        value = variable.get_value()
        if not hasattr(value, "shape"):
            continue
        name = ".".join(map(str, path))
        scanned = len(path) > 1 and not str(path[1]).isdigit()
        axes = axes_for(name, len(value.shape), rules, scanned=scanned)
        placements: list[Placement] = [
            Shard(axes.index(axis)) if axis in axes else Replicate()
            for axis in process_mesh.axis_names
        ]
        try:
            variable.set_value(shard_tensor(value, process_mesh, placements))
        except MeshparError as error:
            raise error.within("shard_by_rules(layer)", variable=name) from None
    return layer


def _check(layer: object, mesh: object, call: str) -> None:
    if not isinstance(mesh, ProcessMesh):
        raise MeshError(
            f"{call}(process_mesh): a {type(mesh).__name__} is no mesh.",
            instead='ProcessMesh([0, 1], ["tp"]), or ProcessMesh.from_jax of a jax.sharding.Mesh',
        )
    if not isinstance(layer, nnx.Module):
        raise TypeError(
            f"{call}(layer): a {type(layer).__name__} is no flax nnx.Module; the variables of a "
            "linen module are a pytree, whose leaves shard_tensor places"
        )


def _all_variables(layer: nnx.Module) -> list[tuple[tuple[Any, ...], Variable]]:
    """Path and variable of each variable in a module; a shared one occurs once."""
    return [(path, node) for path, node in nnx.iter_graph(layer) if isinstance(node, nnx.Variable)]


def _variables(module: nnx.Module) -> list[tuple[str, Variable]]:
    return [
        (name, value) for name, value in vars(module).items() if isinstance(value, nnx.Variable)
    ]


def _keep_variables(before: Iterable[tuple[nnx.Module, dict[str, Variable]]]) -> None:
    """Moves the values of new variables into the old ones, which other modules may hold too."""
    for module, variables in before:
        for name, old in variables.items():
            new = getattr(module, name)
            if new is old:
                continue
            old.set_value(new.get_value() if isinstance(new, nnx.Variable) else new)
            setattr(module, name, old)


def _hook(
    layer: nnx.Module, mesh: ProcessMesh, input_fn: Hook | None, output_fn: Hook | None
) -> None:
    """Puts the functions around `layer.__call__`.

    nnx has no hooks, and Python looks `__call__` up in the class: the module gets one of its own.
    A module around it would change every parameter's path, and whoever holds the inner one would
    go past the hooks.
    """
    base = type(layer)
    forward: Callable[..., Any] = base.__call__

    @functools.wraps(forward)
    def call(self: nnx.Module, *inputs: Any, **named: Any) -> Any:
        if input_fn is not None:
            changed = input_fn(inputs, mesh)
            inputs = tuple(changed) if isinstance(changed, (tuple, list)) else (changed,)
        outputs = forward(self, *inputs, **named)
        return outputs if output_fn is None else output_fn(outputs, mesh)

    layer.__class__ = type(
        base.__name__, (base,), {"__call__": call, "__module__": base.__module__}
    )
