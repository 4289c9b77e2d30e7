"""The placement of a value in traced code: an annotation that leaves the value as it is.

`mp_layout` is a primitive, so annotations live in the jaxpr, pass through `grad` and `vmap`, and
every partitioner reads them there. Under plain `jax.jit` it lowers to a sharding constraint, or,
where the layout that the value comes in is known, to the collectives of a reshard.
"""

from __future__ import annotations

import weakref
from typing import Any

import jax

from meshpar._jax import is_tracer, linear_primitive
from meshpar.mesh import ProcessMesh, ranked_devices
from meshpar.placements.blocks import storage_sharding
from meshpar.placements.layout import Layout
from meshpar.placements.reshard_program import reshard_storage
from meshpar.placements.storage import from_storage, to_storage

__all__ = ["PRIMITIVE", "annotate", "annotation_of"]


def annotate(
    x: jax.Array,
    mesh: ProcessMesh,
    layout: Layout,
    source: Layout | None = None,
    priority: int | None = None,
) -> jax.Array:
    """Says that the traced value `x` lies in `layout`, coming from `source` where that is known.

    Where annotations disagree about the values before them, a lower priority is followed first.
    """
    out = _mp_layout(x, mesh=mesh, source=source, layout=layout, priority=priority)
    _annotations.remember(out, mesh, layout)
    return out


def annotation_of(x: object) -> tuple[ProcessMesh, Layout] | None:
    """The mesh and layout that a tracer was annotated with, if it was."""
    return _annotations.of(x) if is_tracer(x) else None


class _Annotations:
    """What was said of live tracers. Tracers do not hash, so they are known by identity."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Any], ProcessMesh, Layout]] = {}

    def remember(self, x: object, mesh: ProcessMesh, layout: Layout) -> None:
        if not is_tracer(x):
            return
        key = id(x)
        self._by_id[key] = (weakref.ref(x, lambda _: self._by_id.pop(key, None)), mesh, layout)

    def of(self, x: object) -> tuple[ProcessMesh, Layout] | None:
        found = self._by_id.get(id(x))
        return (found[1], found[2]) if found is not None and found[0]() is x else None


_annotations = _Annotations()


def _program(
    x: jax.Array,
    *,
    mesh: ProcessMesh,
    source: Layout | None,
    layout: Layout,
    priority: int | None,
) -> jax.Array:
    # XLA's partitioner leaves no reduction pending: the traced value is the reduced one already.
    layout = layout.without_partial()
    source = None if source is None else source.without_partial()
    sizes = mesh.axis_sizes
    first = layout if source is None else source
    stored = jax.lax.with_sharding_constraint(
        to_storage(x, first, sizes), storage_sharding(first, mesh)
    )
    stored = reshard_storage(stored, first, layout, x.shape, mesh)
    return from_storage(stored, x.shape, layout, sizes)


def _transposed(params: dict[str, Any]) -> dict[str, Any]:
    """The cotangent of a constraint is constrained alike; that of a reshard goes the way back."""
    if params["source"] is None:
        return params
    return {**params, "source": params["layout"], "layout": params["source"]}


def _batched(params: dict[str, Any], dim: int) -> dict[str, Any]:
    def grown(old: Layout | None) -> Layout | None:
        return None if old is None else Layout((*old.dims[:dim], (), *old.dims[dim:]), old.partial)

    return {**params, "source": grown(params["source"]), "layout": grown(params["layout"])}


def _lowers(params: dict[str, Any]) -> bool:
    """Planning for devices that are not there never lowers an annotation."""
    return max(params["mesh"].process_ids) < len(ranked_devices())


PRIMITIVE = "mp_layout"
"""The name of the primitive; its parameters are `mesh`, `source`, `layout` and `priority`."""

_mp_layout = linear_primitive(
    PRIMITIVE, program=_program, lowers=_lowers, transposed=_transposed, batched=_batched
)
