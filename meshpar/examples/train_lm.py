"""Trains a byte-level language model on the sources of Python's standard library.

    python -m meshpar.examples.train_lm

Data parallel over `dp`, tensor parallel over `tp`, optimizer state cut over `dp` (ZeRO stage 1), on
all GPUs or TPUs that are visible, else on 8 CPU devices. Ctrl-C ends a run with a checkpoint, and
`--resume` goes on bit for bit. Over several processes, and again after one of them died:

    python -m meshpar.launch --nproc_per_node 2 --devices 0-7 --max_restart 3 \\
        -m meshpar.examples.train_lm --save runs/two --resume auto
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import meshpar as mp
from meshpar import models
from meshpar.examples.corpus import Corpus, batches, load_corpus
from meshpar.examples.losses import Losses
from meshpar.examples.stop_request import StopRequest

_OF_ONE_RUN = ("save", "resume", "losses")  # options that a run that goes on does not take over


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example.

    Args:
      argv: the command line, by default that of the process; `--help` lists the options.

    Returns:
      The exit status: 0, 1 after a loss that is not finite, 130 after Ctrl-C.
    """
    alone = mp.ParallelEnv().world_size == 1
    if alone and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        mp.set_host_device_count(8)  # of no effect where there are GPUs or TPUs
    mp.init_parallel_env()
    options = parse(argv)
    number = jax.device_count()
    tp = math.gcd(number, 4)  # the model has 4 heads
    mesh = mp.ProcessMesh.create({"dp": number // tp, "tp": tp})
    say(f"{number} {jax.devices()[0].platform} device(s): {mesh}")
    corpus = load_corpus()
    say(f"{len(corpus.train):,} bytes to train on, {len(corpus.validation):,} to validate")
    dm = make_model(mesh, options)
    done = restore(dm, options.resume) if options.resume else 0
    if done >= options.steps:
        say(f"{options.resume} has {done} steps already; a larger --steps trains longer.")
        return 0
    say(f"steps {done + 1} to {options.steps}, checkpoints in {options.save}")
    try:
        with StopRequest() as stop:
            done = train(dm, corpus, done, options, stop)
        if done < options.steps:
            say(f"Ctrl-C: stopped after {done} of {options.steps} steps.")
            say(f"Go on: python -m meshpar.examples.train_lm --resume {options.save}")
            return 130
        report(dm, corpus, options)
    except FloatingPointError as error:
        say(f"{error}. --nan=continue would go on. Checkpoints are in {options.save}.")
        return 1
    except KeyboardInterrupt:
        say(f"Ctrl-C: the newest checkpoint in {options.save} is whole.")
        return 130
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; those of a run that is resumed are the defaults of the one that goes on."""
    parser = argparse.ArgumentParser(
        prog="python -m meshpar.examples.train_lm",
        description="Trains a byte-level language model on Python's standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--steps", type=int, default=500, help="training steps in all")
    add("--batch-size", type=int, default=16, help="windows per step")
    add("--seq-len", type=int, default=128, help="bytes per window, at most 128")
    add("--learning-rate", type=float, default=3e-3, help="of AdamW, after the warm-up")
    add("--warmup", type=int, default=50, help="steps in which the learning rate rises")
    add("--clip", type=float, default=1.0, help="largest global norm of the gradient")
    add("--seed", type=int, default=0, help="of parameters, batches and the sample")
    add("--eval-batches", type=int, default=20, help="batches of the validation loss")
    add("--sample", type=int, default=200, help="bytes to generate at the end")
    add("--nan", choices=["stop", "continue"], default="stop", help="at a loss that is not finite")
    add("--save", metavar="DIR", help="folder of the checkpoints (default: runs/<time>)")
    add("--save-every", type=int, default=200, help="steps between checkpoints")
    add("--losses", metavar="FILE", help="add a line to it for each step: its number and loss")
    add(
        "--resume",
        metavar="DIR",
        help="go on from the newest checkpoint in this folder; auto: in that of --save, if any",
    )
    options = parser.parse_args(argv)
    starts_anew = options.resume == "auto"
    if starts_anew:
        if options.save is None:
            parser.error("--resume auto: --save says in which folder the checkpoints are")
        there = any(path.name.isdecimal() for path in Path(options.save).glob("*"))
        options.resume = options.save if there else None
    if options.resume:
        contents = mp.checkpoint_contents(options.resume)
        saved = {k.removeprefix("options."): v for k, v in contents.items() if "options." in k}
        parser.set_defaults(**saved, save=options.resume)
        folder, options = options.resume, parser.parse_args(argv)
        options.resume = folder
    elif options.save is None:
        folder = [str(Path("runs", time.strftime("%Y-%m-%d-%H%M%S")))]
        mp.broadcast_object_list(folder, src=0)  # all ranks save into one
        (options.save,) = folder
    elif not starts_anew and any(Path(options.save).glob("*")):
        parser.error(f"--save: {options.save} is not empty; --resume {options.save} goes on there")
    return options


def make_model(mesh: mp.ProcessMesh, options: argparse.Namespace) -> mp.DistModel:
    """Model, loss and optimizer on the mesh; no parameter is ever whole on one device."""

    def build() -> models.Decoder:
        model = models.Decoder(models.tiny_lm(), rngs=nnx.Rngs(options.seed))
        return mp.shard_by_rules(model, mesh)

    warmup, peak = max(options.warmup, 1), options.learning_rate
    rate = optax.linear_schedule(peak / warmup, peak, warmup)
    return mp.to_static(
        mp.create_sharded(build, mesh),
        mp.Strategy({"sharding": {"enable": True, "stage": 1}}),
        loss=models.cross_entropy,
        optimizer=optax.chain(optax.clip_by_global_norm(options.clip), optax.adamw(rate)),
    )


def train(
    dm: mp.DistModel, corpus: Corpus, done: int, options: argparse.Namespace, stop: StopRequest
) -> int:
    """Trains from step `done` until the last step or until a stop is asked for.

    Returns:
      How many steps are done; the state after them is saved.

    Raises:
      FloatingPointError: a loss is not finite.
    """
    # The batch of a step depends on its number alone: a run that goes on sees the same ones.
    source = batches(corpus.train, options.batch_size, options.seq_len, options.seed, done)
    loader = mp.shard_dataloader(source, dm.mesh, shard_dims="dp")
    dm.train()
    path = options.losses if jax.process_index() == 0 else None
    losses = Losses(stop_at_nan=options.nan == "stop", path=path)
    start, first = time.perf_counter(), done
    quiet = jax.process_index() > 0
    with tqdm(
        total=options.steps, initial=done, unit="step", file=sys.stdout, disable=quiet
    ) as bar:
        for step, batch in zip(range(done, options.steps), loader, strict=False):
            losses.add(step + 1, dm(batch["tokens"], batch["labels"]))
            done = step + 1
            value = losses.read(keep=1)  # that of this step is not there yet
            if value is None:
                start, first = time.perf_counter(), done  # the first step compiles
            else:
                tokens = (step - first) * options.batch_size * options.seq_len
                speed = tokens / (time.perf_counter() - start)
                bar.set_postfix_str(f"loss {value:.3f}, {speed:,.0f} tokens/s", refresh=False)
            bar.update()
            stops = stop.agreed()
            if stops or done == options.steps or done % options.save_every == 0:
                losses.read()
                save(dm, done, options)
            if stops:
                break
    return done


def save(dm: mp.DistModel, done: int, options: argparse.Namespace) -> None:
    """Writes a checkpoint: all state, how many steps are done, and the options."""
    kept = {f"options.{k}": v for k, v in vars(options).items() if k not in _OF_ONE_RUN}
    mp.save_state_dict({**dm.state_dict(), "done": done, **kept}, options.save, unique_id=done)


def restore(dm: mp.DistModel, path: str) -> int:
    """Puts the newest checkpoint of a folder into the model; returns how many steps it has done."""
    state: dict[str, object] = {**dm.state_dict(), "done": 0}
    mp.load_state_dict(state, path)
    done = state.pop("done")
    assert isinstance(done, int), "save() writes a number"
    dm.set_state_dict(state)
    return done


def report(dm: mp.DistModel, corpus: Corpus, options: argparse.Namespace) -> None:
    """Prints the validation loss, where everything lies, what is sent, and a sample."""
    text = jnp.array([list(b"def ")], jnp.int32)
    key = jax.random.key(options.seed)
    sample = models.generate(dm.model, text, options.sample, key, temperature=0.8)
    table = Table("parameter", "shape", *dm.mesh.dim_names, title="Placements of the parameters")
    for name, value in dm.state_dict("param").items():
        table.add_row(name, str(value.shape), *map(str, mp.placements_of(value) or []))
    console = Console(quiet=jax.process_index() > 0)
    console.print(table, "Collectives of the compiled step", dm.collectives(), sep="\n")
    say(bytes(np.asarray(sample[0], np.uint8)).decode(errors="replace"))
    say(f"\nvalidation loss {validation_loss(dm, corpus, options):.3f} nats per byte")
    say(f"checkpoint in {options.save}")


def say(text: str) -> None:
    """Prints, on one rank of a job."""
    if jax.process_index() == 0:
        print(text)


def validation_loss(dm: mp.DistModel, corpus: Corpus, options: argparse.Namespace) -> float:
    """The mean loss of some windows of files that are not trained on."""
    source = batches(corpus.validation, options.batch_size, options.seq_len, options.seed)
    loader = mp.shard_dataloader(
        itertools.islice(source, options.eval_batches), dm.mesh, shard_dims="dp"
    )
    dm.eval()
    return float(np.mean([float(dm(batch["tokens"], batch["labels"])) for batch in loader]))


if __name__ == "__main__":
    sys.exit(main())
