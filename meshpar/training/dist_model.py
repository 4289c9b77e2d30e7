"""`DistModel`: a model on a mesh with the state of its training and its compiled programs."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import jax
from jax.stages import Lowered

from meshpar.compiler.plan import Plan
from meshpar.errors import MeshparError
from meshpar.mesh import ProcessMesh
from meshpar.placements.values import Value
from meshpar.training.arguments import argument_names
from meshpar.training.batch import BatchPlacer
from meshpar.training.collective_table import CollectiveTable, collectives_of
from meshpar.training.programs import Program, Programs, whole_program
from meshpar.training.state import Arrays, Slots
from meshpar.training.step import Recipe, State

__all__ = ["DistModel"]

# XLA on CPU aborts the process when about a hundred executions with collectives are queued.
_MAX_IN_FLIGHT = 16


class DistModel:
    """A model on a mesh: `mp.to_static` makes it.

    Choose a mode with `train()`, `eval()` or `predict()`, then call it with a batch: the inputs,
    then the labels. A training step is one program that takes over the state and gives it back.
    Calls return before the devices are done; the loss is a `jax.Array`, and `float(loss)` waits.

    Follows `paddle.distributed.DistModel` (3.3.1). Deviation: the loss stays on the devices until
    it is read.
    """

    def __init__(self, recipe: Recipe, state: State, placer: BatchPlacer) -> None:
        self._recipe, self._state, self._placer = recipe, state, placer
        self._mode: str | None = None
        self._programs = Programs(recipe)
        # The results of each step; pyright does not know of jax.Array.is_ready.
        self._in_flight: deque[list[Any]] = deque()
        # Somebody outside holds arrays of the state, which the next training step must not donate.
        self._lent = False

    def __repr__(self) -> str:
        return f"DistModel({self._recipe.adapter.name}, {self.mesh!s}, mode={self._mode!r})"

    @property
    def mesh(self) -> ProcessMesh:
        """The mesh that everything lies on."""
        return self._placer.mesh

    # --- modes ------------------------------------------------------------------------------------

    @property
    def mode(self) -> str | None:
        """ "train", "eval", "predict", or `None` before one is chosen."""
        return self._mode

    def train(self) -> None:
        """Chooses training: a call updates the state and returns the loss.

        Raises:
          ValueError: there is no optimizer.
        """
        if self._recipe.tx is None:
            raise ValueError(
                "train(): this DistModel has no optimizer; give one, as in "
                "to_static(model, strategy, loss=..., optimizer=optax.adamw(1e-3))"
            )
        self._mode = "train"

    def eval(self) -> None:
        """Chooses evaluation: a call returns the loss and changes nothing.

        Dropout is off and batch norm uses its running statistics.
        """
        self._mode = "eval"

    def predict(self) -> None:
        """Chooses prediction: a call takes the inputs without labels and returns the outputs."""
        self._mode = "predict"

    # --- a step -----------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        """Runs one step of the current mode.

        Args:
          *args: the inputs, then the labels (none in mode "predict"); pytrees of arrays of any
            global shape. A placed leaf stays where it is; see `to_static` for the others.

        Returns:
          The loss, a float scalar that every device holds; in mode "predict" the outputs.

        Raises:
          ValueError: no mode is chosen, or another number of arguments is expected.
          PlacementError: a leaf that the data axes do not divide; the message names it.
          MeshError: a leaf lies on another mesh.
        """
        mode = self._chosen_mode()
        batch, arrays = self._place(mode, args)
        step = self._programs.of(mode, batch, self._state, arrays)
        self._drain(_MAX_IN_FLIGHT - 1)
        if mode == "train":
            self._state, result = step(self._own_state(), arrays)
        else:
            result = step(self._state, arrays)
        self._in_flight.append(jax.tree.leaves(result))
        return step.finish(result)

    def wait(self) -> None:
        """Waits until all steps that were started are done."""
        self._drain(0)

    def place_batch(self, *args: Any) -> Any:
        """The arguments of a call, placed as the call would place them.

        Returns:
          A tuple of the arguments' structure; leaves are `jax.Array`s or `DistTensor`s.
        """
        batch, arrays = self._place(self._chosen_mode(), args)
        return batch.wrapped(arrays)

    # --- the programs -----------------------------------------------------------------------------

    @property
    def compile_counts(self) -> dict[str, int]:
        """Mode -> how many programs were compiled for it."""
        return self._programs.counts()

    def lower(self, *args: Any) -> Lowered:
        """The lowered program of the current mode.

        Args:
          *args: a batch, or `jax.ShapeDtypeStruct`s for it; none for that of the last call.

        Raises:
          NotImplementedError: it is many programs (`Strategy.pipeline.executor`).
        """
        return self._inspected("lower", args).lowered

    def compiled_text(self, *args: Any) -> str:
        """The compiled program of the current mode as HLO text; arguments as of `lower`."""
        return self._inspected("compiled_text", args).compiled.as_text() or ""

    def memory_analysis(self, *args: Any) -> Any:
        """XLA's account of the memory of the current mode's program; arguments as of `lower`."""
        return self._inspected("memory_analysis", args).compiled.memory_analysis()

    def collectives(self, *args: Any) -> CollectiveTable:
        """The collectives of the current mode's compiled program; arguments as of `lower`."""
        return collectives_of(self.compiled_text(*args), self.mesh)

    def plan(self, *args: Any) -> Plan:
        """What the current mode's program does, before it runs; arguments as of `lower`.

        Raises:
          NotImplementedError: XLA partitions it, and tells what it decided in `compiled_text()`;
            or it is many programs (`Strategy.pipeline.executor`).
        """
        plan = self._inspected("plan", args).plan
        if plan is None:
            raise NotImplementedError(
                "DistModel.plan with partitioner='xla': XLA tells what it decided only in "
                "compiled_text(); collectives() lists what is there"
            )
        return plan

    def planned_call(self, *args: Any) -> tuple[Plan, list[jax.Array]]:
        """The plan of a call and the storages of the state and the batch, for `mp.check`."""
        mode = self._chosen_mode()
        _, arrays = self._place(mode, args)
        state = (*self._state.params, *self._state.rest)
        opt = self._state.opt if mode == "train" else ()
        return self.plan(*args), [*state, *opt, *arrays]

    def dist_main_program(self, mode: str | None = None) -> str:
        """The partitioned program of a mode that has run, as HLO text.

        Raises:
          ValueError: no such mode, or it has not run.

        Follows `paddle.distributed.DistModel.dist_main_program` (3.3.1).
        """
        found = self._programs.last(self._chosen_mode() if mode is None else mode)
        return whole_program(found, "dist_main_program").compiled.as_text() or ""

    def serial_main_program(self, mode: str | None = None) -> str:
        """The program of a mode that has run, before partitioning, as StableHLO text.

        Raises:
          ValueError: no such mode, or it has not run.

        Follows `paddle.distributed.DistModel.serial_main_program` (3.3.1).
        """
        found = self._programs.last(mode or self._chosen_mode())
        return whole_program(found, "serial_main_program").lowered.as_text()

    # --- the state --------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """A model of the user's form that holds the current state.

        For flax nnx a new module, in training mode; for linen (module, variables); for a function
        (apply, params). Parameters with uneven dims are `DistTensor`s. The next training step
        leaves its arrays alone, and so costs one copy of the state.
        """
        self._lent = True
        recipe = self._recipe
        return recipe.adapter.merge(
            recipe.params.wrapped(self._state.params), recipe.rest.wrapped(self._state.rest)
        )

    def sync(self) -> None:
        """Writes the current state into the user's nnx module.

        Raises:
          TypeError: the model is not an nnx module.
        """
        self._lent = True
        recipe = self._recipe
        recipe.adapter.write_back(
            recipe.params.wrapped(self._state.params), recipe.rest.wrapped(self._state.rest)
        )

    def state_dict(self, mode: str = "all") -> dict[str, Value]:
        """Name -> placed value.

        Args:
          mode: "param" for parameters and other state of the model, "opt" for that of the
            optimizer (names begin with "opt."), "all" for both.

        Raises:
          ValueError: another mode.

        The next training step leaves the arrays alone, and so costs one copy of the state.

        Follows `paddle.distributed.DistModel.state_dict` (3.3.1).
        """
        if mode not in ("param", "opt", "all"):
            raise ValueError(f"state_dict(mode={mode!r}): the modes are 'param', 'opt' and 'all'")
        self._lent = True
        recipe, out = self._recipe, dict[str, Value]()
        if mode != "opt":
            out |= recipe.params.named(self._state.params) | recipe.rest.named(self._state.rest)
        if mode != "param" and recipe.opt is not None:
            out |= recipe.opt.named(self._state.opt)
        return out

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replaces parts of the state; nothing compiles anew.

        Args:
          state_dict: name -> value, as `state_dict` gives it. Values may be placed otherwise, on
            another mesh, or not at all; they are copied to where the state lies.

        Raises:
          ValueError: a name that the state does not have.
          PlacementError: a value of another shape.

        Follows `paddle.distributed.DistModel.set_state_dict` (3.3.1).
        """
        recipe = self._recipe
        groups = [(recipe.params, self._state.params), (recipe.rest, self._state.rest)]
        if recipe.opt is not None:
            groups.append((recipe.opt, self._state.opt))
        known = {slot.name for slots, _ in groups for slot in slots.leaves}
        unknown = sorted(set(state_dict) - known)
        if unknown:
            raise ValueError(
                f"set_state_dict(state_dict): the state has no {', '.join(map(repr, unknown))}; "
                f"its names are {', '.join(sorted(known))}"
            )
        new: list[Arrays] = [slots.replaced(arrays, state_dict) for slots, arrays in groups]
        self._state = State(new[0], new[1], new[2] if len(new) > 2 else ())

    # --- inside -----------------------------------------------------------------------------------

    def _chosen_mode(self) -> str:
        if self._mode is None:
            raise ValueError(
                "DistModel: choose a mode before the first call: train(), eval() or predict()"
            )
        return self._mode

    def _place(self, mode: str, args: tuple[Any, ...]) -> tuple[Slots, Arrays]:
        labels = 0 if mode == "predict" else self._recipe.num_labels
        names = argument_names(self._recipe.adapter, mode, args, labels)
        try:
            return self._placer(args, names)
        except MeshparError as error:
            raise error.within(f"DistModel in mode {mode!r}") from None

    def _inspected(self, asked: str, args: tuple[Any, ...]) -> Program:
        mode = self._chosen_mode()
        if not args:
            return whole_program(self._programs.last(mode), asked)
        batch, arrays = self._place(mode, args)
        return whole_program(self._programs.of(mode, batch, self._state, arrays), asked)

    def _drain(self, most: int) -> None:
        """Forgets the steps that are done, and waits until at most so many are not."""
        while self._in_flight:
            # The caller may have donated a result to a program of theirs.
            left = [x for x in self._in_flight[0] if not x.is_deleted()]
            if len(self._in_flight) <= most and not all(x.is_ready() for x in left):
                return
            jax.block_until_ready(left)
            self._in_flight.popleft()

    def _own_state(self) -> State:
        """The state in arrays that nobody outside holds: a copy, if any were handed out."""
        if not self._lent:
            return self._state
        self._lent = False
        return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), self._state)
