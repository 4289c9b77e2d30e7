"""Values that a model moves from the mesh of one pipeline rank to that of the next."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from meshpar.compiler.program import Constant, Node, Program, Ref
from meshpar.errors import MeshError
from meshpar.mesh import ProcessMesh
from meshpar.placements.annotate import PRIMITIVE
from meshpar.schedules.executors.evaluate import depending_on, named, values_of

__all__ = ["rank_meshes", "without_transfers"]


def rank_meshes(mesh: ProcessMesh, axis: str) -> dict[ProcessMesh, int]:
    """The part of a mesh that is each pipeline rank's, and the rank."""
    moved = mesh.get_mesh_with_dim(axis)
    return {moved[rank]: rank for rank in range(mesh.axis_sizes[axis])}


def without_transfers(
    program: Program,
    meshes: Mapping[ProcessMesh, int],
    ranks: Mapping[int, int],
    params: Collection[int],
    batch: Collection[int],
) -> Program:
    """The program without the moves between ranks, which are the pipeline's.

    What stays are annotations on the rank where a value is anyway.

    Args:
      program: the forward pass of a model, to its loss or its outputs.
      meshes: the mesh of each rank.
      ranks: trained inputs -> the rank on which they lie.
      params: the inputs that are trained.
      batch: the inputs that are the batch.

    Raises:
      MeshError: values move, and no parameter lies on the mesh of a rank.
    """
    if not any(node.name == PRIMITIVE and node.params["mesh"] in meshes for node in program.nodes):
        return program
    of_params, of_batch = depending_on(program, params), depending_on(program, batch)
    where, names, nodes = dict(ranks), dict[int, Ref](), list[Node]()
    for node in program.nodes:
        rank = meshes.get(node.params["mesh"]) if node.name == PRIMITIVE else None
        if rank is None:
            nodes.append(replace(node, ins=tuple(named(ref, names) for ref in node.ins)))
            _carry(node, where, of_batch)
            continue
        (ref,), (out,) = node.ins, node.outs
        before = None if isinstance(ref, Constant) else where.get(ref)
        where[out] = rank
        # What the batch alone decides is on every rank.
        if out not in of_params or before not in (None, rank):
            if out in of_params and not ranks:
                _refuse(node, rank)
            names[out] = named(ref, names)
            continue
        nodes.append(replace(node, ins=(named(ref, names),)))
    outputs = tuple(named(ref, names) for ref in program.outputs)
    return replace(program, nodes=nodes, outputs=outputs)


def _carry(node: Node, where: dict[int, int], of_batch: set[int]) -> None:
    """What comes of an operation is where its parameters are, else where its other operands are."""
    operands = sorted(values_of(node.ins) & where.keys(), key=lambda value: value in of_batch)
    if operands:
        where.update(dict.fromkeys(node.outs, where[operands[0]]))


def _refuse(node: Node, rank: int) -> None:
    raise MeshError(
        f"a value moves to the mesh of pipeline rank {rank}, where no parameter lies.",
        where=node.where,
        because="stages are known by their parameters",
        instead="mp.shard_tensor(parameter, mesh.get_mesh_with_dim(axis)[rank], ...) for the "
        "layers' parameters, or Strategy.pipeline.split_spec",
    )
