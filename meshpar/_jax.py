"""The one module that touches JAX names outside its documented public API.

`jax.extend` and `jax.interpreters` are where JAX lets others define primitives; they are gathered
here with what is truly private, so that a new JAX version is met in one place.
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeGuard, TypeVar

import jax
import jax.extend.core as jex_core
from jax import lax
from jax._src import array as _array
from jax._src import clusters as _clusters
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import dtypes as _dtypes
from jax._src import source_info_util as _source_info_util
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import partial_eval as _pe
from jax._src.interpreters import pxla as _pxla
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

__all__ = [
    "backend_is_up",
    "is_key_array",
    "is_tracer",
    "is_tracing",
    "linear_primitive",
    "refuse_as_argument",
]

# A primitive's rules pass tracers, avals and MLIR values whose types JAX does not export.
Rule = Callable[..., Any]


def backend_is_up() -> bool:
    """Whether JAX has started its backend, after which the number of host devices is fixed."""
    return _xla_bridge.backends_are_initialized()


def is_tracer(x: object) -> TypeGuard[jax.Array]:
    """Whether `x` stands for a value of a program that is being traced."""
    return isinstance(x, _core.Tracer)


def value_behind(x: Any) -> Any:
    """The array that `jax.grad` follows, of a call that is not compiled; else `x` itself."""
    while isinstance(x, _core.Tracer) and getattr(x, "primal", None) is not None:
        x = x.primal
    return x


def is_tracing() -> bool:
    """Whether a transformation is under way, so that arguments may be tracers."""
    return not _core.trace_state_clean()


def is_key_array(x: object) -> bool:
    """Whether `x` is an array of typed PRNG keys."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and _dtypes.issubdtype(dtype, _dtypes.prng_key)


def varying_axes(x: object) -> frozenset[str]:
    """The mesh axes along which a value of a `shard_map` body may differ, as its type says."""
    aval = jax.typeof(x)
    kind = getattr(aval, "mat", None)  # jax 0.12
    return frozenset(aval.vma if kind is None else kind.varying)


def unreduced_spec(entries: Sequence[Any], axes: Iterable[str], kind: str) -> PartitionSpec | None:
    """A `PartitionSpec` with a pending reduction, or `None` where this JAX has no such kind.

    Args:
      entries: the dims.
      axes: the mesh axes along which it is pending.
      kind: sum, max, min, ...; jax 0.10 knows sums, 0.12 maxima and minima too.
    """
    if kind == "sum":
        return PartitionSpec(*entries, unreduced=frozenset(axes))
    kinds = getattr(jax.sharding, "UnreducedKind", None)
    if not hasattr(kinds, kind):
        return None
    named = {"unreduced": frozenset(axes), "unreduced_kind": getattr(kinds, kind)}
    return PartitionSpec(*entries, **named)


def unreduced_kind(spec: PartitionSpec) -> str:
    """The kind of a spec's pending reduction."""
    kind = getattr(spec, "unreduced_kind", None)
    return "sum" if kind is None else kind.name


def linear_primitive(
    name: str,
    *,
    program: Rule,
    lowers: Callable[[dict[str, Any]], bool],
    transposed: Callable[[dict[str, Any]], dict[str, Any]],
    batched: Callable[[dict[str, Any], int], dict[str, Any]],
) -> Callable[..., jax.Array]:
    """A primitive that leaves its one operand's value, shape and dtype as they are.

    Args:
      name: the name shown in jaxprs.
      program: `(x, **params) -> x`, what it lowers to.
      lowers: whether it can be lowered here, from the parameters.
      transposed: the parameters of the same primitive on the cotangent.
      batched: the parameters on an operand with one more dim, at the position given.

    Returns:
      `(x, **params) -> x`. The equation also holds the program as a jaxpr, `lowering`, because
      `jax.jit` takes its devices from the constraints that it finds in jaxprs.
    """
    primitive = jex_core.Primitive(name)

    def bind(x: Any, **params: Any) -> Any:
        lowering = None
        if lowers(params):
            struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
            lowering = jax.make_jaxpr(lambda y: program(y, **params))(struct)
        return primitive.bind(x, lowering=lowering, **params)

    def again(x: Any, params: dict[str, Any]) -> Any:
        return bind(x, **{k: v for k, v in params.items() if k != "lowering"})

    def run(x: Any, *, lowering: Any, **params: Any) -> Any:
        return program(x, **params)

    primitive.def_abstract_eval(lambda aval, **params: aval)
    primitive.def_impl(lambda x, **params: jax.jit(lambda y: again(y, params))(x))
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))
    ad.deflinear2(primitive, lambda ct, x, **params: [again(ct, transposed(params))])
    batching.primitive_batchers[primitive] = lambda args, dims, **params: (
        again(args[0], batched(params, dims[0])),
        dims[0],
    )
    return bind


def refuse_as_argument(cls: type, refuse: Callable[[Any], NoReturn]) -> None:
    """Makes JAX call `refuse` where an instance of `cls` is an argument of one of its functions."""
    _core.pytype_aval_mappings[cls] = refuse
    _dtypes.register_canonicalize_value_handler(cls, refuse)


BodyT = TypeVar("BodyT")
NewT = TypeVar("NewT")


@dataclass(frozen=True, slots=True)
class SubJaxprs(Generic[BodyT]):
    """The functions that a control-flow equation calls, and how its operands are theirs.

    Args:
      kind: "call", "scan", "while" or "cond".
      bodies: call and scan: the body. while: condition, body. cond: the branches.
      consts: scan: the number of leading operands that do not change. while: those of the
        condition and of the body.
      carry: scan: the number of operands that are carried.
    """

    kind: str
    bodies: tuple[BodyT, ...]
    consts: tuple[int, ...] = ()
    carry: int = 0

    def map(self, fn: Callable[[BodyT], NewT]) -> SubJaxprs[NewT]:
        """The same with `fn` of each body."""
        return SubJaxprs(self.kind, tuple(map(fn, self.bodies)), self.consts, self.carry)


def sub_jaxprs(eqn: Any) -> SubJaxprs[Any] | None:
    """The jaxprs in an equation's parameters, in the form that all supported JAX versions share."""
    params, name = eqn.params, eqn.primitive.name
    if name == "scan":
        if "num_consts" in params:
            consts, carry = params["num_consts"], params["num_carry"]
        else:  # jax 0.12 keeps the trees of (consts, carry, xs)
            trees = (
                params["ft_in"].unpack() if hasattr(params["ft_in"], "unpack") else params["ft_in"]
            )
            consts, carry = (len(tree) for tree in tuple(trees)[:2])
        return SubJaxprs("scan", (params["jaxpr"],), (consts,), carry)
    if name == "while":
        counts = (params["cond_nconsts"], params["body_nconsts"])
        return SubJaxprs("while", (params["cond_jaxpr"], params["body_jaxpr"]), counts)
    if name == "cond":
        return SubJaxprs("cond", tuple(params["branches"]))
    # The jaxprs of these are scalar functions, or programs of one device.
    if name in ("shard_map", "pallas_call", "reduce", "reduce_window"):
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in params:
            return SubJaxprs("call", (params[key],))
    return None


def inlined_call(eqn: Any) -> tuple[Any, list[Any]] | None:
    """The jaxpr that a call comes to once it is differentiated, and its operands, if it is one.

    So does a batched loop, whose condition is an array, to one that runs while any of it is true.
    """
    params, name = eqn.params, eqn.primitive.name
    if name == "custom_linear_solve":
        lengths = params["const_lengths"]
        first = lengths.matvec + lengths.vecmat
        own = eqn.invars[first : first + lengths.solve]
        return params["jaxprs"].solve, [*own, *eqn.invars[sum(lengths) :]]
    if name == "while" and params["cond_jaxpr"].out_avals[0].ndim:
        return jax.make_jaxpr(_scalar_while(params))(*(v.aval for v in eqn.invars)), [*eqn.invars]
    if name == "call_hi_primitive":  # jax 0.12: an operation that says what it comes to
        operation = params["_prim"]

        def expanded(*flat: Any) -> list[Any]:
            return jax.tree.leaves(operation.expand(*jax.tree.unflatten(operation.in_tree, flat)))

        return jax.make_jaxpr(expanded)(*(v.aval for v in eqn.invars)), [*eqn.invars]
    if name in _INLINED:
        bodies = sub_jaxprs(eqn)
        return None if bodies is None else (bodies.bodies[0], list(eqn.invars))
    return None


def _scalar_while(params: dict[str, Any]) -> Callable[..., Any]:
    test = jex_core.jaxpr_as_fun(params["cond_jaxpr"])
    body = jex_core.jaxpr_as_fun(params["body_jaxpr"])
    first, second = params["cond_nconsts"], params["body_nconsts"]

    def run(*operands: jax.Array) -> Any:
        of_test, of_body = operands[:first], operands[first : first + second]

        def turn(carry: Sequence[jax.Array]) -> list[jax.Array]:
            (goes_on,) = test(*of_test, *carry)
            return [
                lax.select(lax.broadcast_in_dim(goes_on, x.shape, range(goes_on.ndim)), y, x)
                for x, y in zip(carry, body(*of_body, *carry), strict=True)
            ]

        def some(carry: Sequence[jax.Array]) -> jax.Array:
            return test(*of_test, *carry)[0].any()

        return lax.while_loop(some, turn, list(operands[first + second :]))

    return run


_INLINED = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_lin"}
)


def without_dead_code(jaxpr: Any, used: Sequence[bool]) -> Any:
    """A jaxpr that makes those of its results that are used, as JAX lowers it."""
    inner, _ = closed(jaxpr)
    return _pe.dce_jaxpr(inner, list(used))[0]


def closed(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """An open jaxpr and its constants, of a closed or an open one."""
    if hasattr(jaxpr, "consts"):
        return getattr(jaxpr, "jaxpr", jaxpr), jaxpr.consts
    return jaxpr, ()


# An annotation's line is the user's, not the one in meshpar that binds the primitive.
for _room in ("_jax.py", "collectives", "compiler", "placements"):
    _source_info_util.register_exclusion(os.path.join(os.path.dirname(__file__), _room))


def source_line(eqn: Any) -> str:
    """The user's line that an equation comes from, or an empty string.

    It reads `file.py:41`, and `In[7]:3` for the third line of a notebook's cell 7.
    """
    frame = _source_info_util.user_frame(eqn.source_info.traceback)
    return "" if frame is None else f"{_shown(frame.file_name)}:{frame.start_line}"


def _shown(file_name: str) -> str:
    # IPython puts `get_ipython` among the builtins while a cell runs; its cells have no file name
    # that a person knows.
    shell = getattr(builtins, "get_ipython", lambda: None)()
    label = None if shell is None else shell.compile.format_code_name(file_name)
    return os.path.basename(file_name) if label is None else label[1]


def bind_at(eqn: Any, *operands: Any, **params: Any) -> list[Any]:
    """Binds an equation's primitive, keeping its name stack and the user's source line."""
    primitive = eqn.primitive
    params = params or eqn.params
    context = _source_info_util.user_context(
        eqn.source_info.traceback, name_stack=eqn.source_info.name_stack
    )
    with context:
        out = primitive.bind(*operands, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def bind_call(eqn: Any, body: Callable[..., list[Any]], operands: Sequence[Any]) -> list[Any]:
    """Binds a call equation, such as `remat2`, on another body.

    A re-emitted `jax.checkpoint` would lose the optimization barrier that keeps its values apart
    from the forward pass's, so the primitive itself is bound, with an open jaxpr.
    """
    traced = jax.make_jaxpr(body)(*operands)
    inner, consts = closed(traced)
    if consts:
        inner = _pe.convert_constvars_jaxpr(inner)
    params = {**eqn.params, "jaxpr": inner}
    return bind_at(eqn, *consts, *operands, **params)


def eval_manual(eqn: Any, blocks: Sequence[Any]) -> list[Any]:
    """Runs the body of a `shard_map` equation on local blocks, inside one over the same mesh.

    The body may have been traced with replication checks, which have collectives of their own;
    they are bound as the plain ones.
    """
    inner, consts = closed(eqn.params["jaxpr"])
    return _eval_unchecked(inner, consts, blocks)


def _eval_unchecked(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jex_core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        bodies = sub_jaxprs(eqn)
        if name in _UNCHECKED:
            out = _UNCHECKED[name](eqn.params, operands)
        elif bodies is not None and bodies.kind == "call" and name != "remat2":
            body, captured = closed(bodies.bodies[0])
            out = _eval_unchecked(body, captured, operands)
        else:
            out = bind_at(eqn, *operands)
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


_UNCHECKED: dict[str, Callable[[Any, Sequence[Any]], Sequence[Any]]] = {
    "pvary": lambda params, xs: xs,
    "pcast": lambda params, xs: xs,
    "psum_invariant": lambda params, xs: [jax.lax.psum(x, params["axes"]) for x in xs],
    "all_gather_invariant": lambda params, xs: [
        jax.lax.all_gather(
            x, params["axis_name"], axis=params["all_gather_dimension"], tiled=params["tiled"]
        )
        for x in xs
    ],
}


def is_backward(eqn: Any) -> bool:
    """Whether an equation belongs to the backward pass of `jax.grad`."""
    return "transpose" in scope_names(eqn)


def scope_names(eqn: Any) -> list[str]:
    """The scopes and transformations that an equation was traced in, outermost first."""
    return [str(getattr(part, "name", "")) for part in eqn.source_info.name_stack.stack]


@dataclass(frozen=True, slots=True)
class Cluster:
    """What `jax.distributed` reads from a cluster's environment.

    Args:
      name: the kind of cluster, as JAX calls it.
      coordinator_address: `host:port` of process 0.
      num_processes: the number of processes.
      process_id: the number of this one.
      local_process_id: its number on its node, where the cluster tells it.
      local_device_ids: the devices that it may use; `None` means all.
    """

    name: str
    coordinator_address: str
    num_processes: int
    process_id: int
    local_process_id: int | None
    local_device_ids: tuple[int, ...] | None


def detected_cluster() -> Cluster | None:
    """The cluster that this process runs in: Slurm, Open MPI, Kubernetes, Cloud TPU, or none."""
    kinds = _clusters.ClusterEnv._cluster_types
    kind = next((k for k in kinds if not k.opt_in_only_method and k.is_env_present()), None)
    if kind is None:
        return None
    address, size, rank, devices = kind.auto_detect_unset_distributed_params(
        None, None, None, None, None, 300
    )
    assert address is not None and size is not None and rank is not None, f"{kind} knows no place"
    local = kind.get_local_process_id()
    return Cluster(
        kind.__name__, address, size, rank, local, None if devices is None else tuple(devices)
    )


def key_value_client() -> Any:
    """The client of `jax.distributed`'s key-value store; `None` where it is not running."""
    return _distributed.global_state.client


def coordinator_address() -> str | None:
    """`host:port` of `jax.distributed`'s service; `None` where it is not running."""
    return _distributed.global_state.coordinator_address


def array_type(shape: tuple[int, ...], dtype: Any) -> Any:
    """The type that JAX gives to arrays of a shape and dtype."""
    return _core.ShapedArray(shape, dtype)


def is_ready(x: jax.Array) -> bool:
    """Whether an array is computed; JAX's stubs do not show the method."""
    array: Any = x
    return array.is_ready()


def assembled(aval: Any, sharding: Any, blocks: Sequence[jax.Array]) -> jax.Array:
    """The array of a known type of which this process has these blocks, one on each device.

    What `jax.make_array_from_single_device_arrays` gives, in a quarter of its time, as it checks.
    """
    own: Any = list(blocks)
    return _array.ArrayImpl(aval, sharding, own, committed=True, _skip_checks=True)


def run_on_own(executable: Any, blocks: Sequence[jax.Array]) -> list[jax.Array]:
    """Runs a program of one device of every process on this process's blocks of its arguments.

    As calling it with arrays made of the blocks, and taking the blocks of its results, without
    making any of these: that takes longer than all else around a small program. Nothing is checked.

    Args:
      executable: what `jax.stages.Compiled.runtime_executable` gives.
      blocks: of all its arguments, on its device, and laid out as of `layouts_of`.

    Returns:
      Blocks that are bound to their device, as JAX does with what it calls committed.
    """
    results = executable.execute_sharded(blocks).disassemble_into_single_device_arrays()
    return [own[0] for own in results]


def unbinder(x: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """What makes, of arrays like one of a single device, ones that may move to another device."""
    array: Any = x
    made: Any = _pxla.global_aval_to_result_handler(array.aval, array.sharding, False)
    return made


def layouts_of(executable: Any) -> list[object]:
    """How the memory of each argument of a program is ordered; equal to `layout_of` its arrays."""
    return executable.get_parameter_layouts()


def layout_of(x: jax.Array) -> object:
    """How an array's memory is ordered."""
    array: Any = x
    return array._pjrt_layout
