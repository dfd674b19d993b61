"""Train a small Bayesian network on digits over many processes and devices, through crashes.

A supervisor starts the processes, and starts them again from the latest checkpoint when one is lost.
SIGTERM (or Ctrl-C) saves and leaves; the same command then goes on, bit for bit on the same layout.
Exit status: 0 finished, 75 asked to leave by SIGTERM or --stop-at and to be started again, 130 Ctrl-C,
1 not finite or lost too often, 2 bad input.
"""

import argparse

import moment_jax as mj
from experiments.command_line import InputError, Parser, writable_folder
from experiments.loop import Layout, Order, supervise
from experiments.loop.layout import check_batch
from experiments.loop.records import METRICS, read_lines
from experiments.outputs import write_json
from experiments.resilience.job import NETWORKS, REFERENCE

SETTINGS = (
    "seed", "steps", "network", "structure", "blocks", "batch_size", "accumulate", "learning_rate",
)  # fmt: skip


def add_arguments(parser: Parser) -> None:
    """The options of the experiment."""
    parser.seed("random seed of weights, order, noise, and moments of kills")
    parser.whole("--steps", 200, "updates")
    parser.choice("--structure", mj.STRUCTURES, "Diagonal", "covariance structure")
    parser.choice("--network", NETWORKS, "transformer", "network (an MLP starts faster)")
    parser.whole("--blocks", 1, "blocks, or hidden layers")
    parser.whole("--batch-size", 32, "images for each update, over all devices")
    parser.whole("--accumulate", 1, "parts of a batch whose gradients are averaged, in turn")
    parser.real("--learning-rate", 3e-3, "peak of the cosine schedule")
    parser.whole("--processes", 2, "processes")
    what = "devices of each process, virtual on CPU, which is taken unless JAX_PLATFORMS says otherwise"
    parser.whole("--devices", 2, what)
    what = "devices along which batches and rows of parameters are split (default: all)"
    parser.whole("--data", None, what)
    parser.whole("--model", 1, "devices along which heads and hidden units are split")
    parser.add_argument(
        "--fsdp",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="split parameters and optimiser over --data too: less memory, more messages",
    )
    parser.out(
        "runs/resilience",
        "the run. A checkpoint in it is gone on from, by any processes and devices; one of another "
        "model, other settings or another version is refused",
    )
    parser.whole("--save-every", 50, "updates between checkpoints")
    parser.whole("--stop-at", None, "save and leave after this update, with the exit status 75")
    what = "how often all processes are started again after one is lost"
    parser.whole("--restarts", 3, what, least=0)
    parser.whole(
        "--check",
        None,
        "train undisturbed, then again with N SIGKILLs at random moments (a worker, the "
        "coordinator, all workers, the supervisor, everything; while starting, training and saving) and "
        "one SIGTERM, and compare bit for bit; --out must be empty",
    )
    parser.flag(
        "--topologies",
        "train undisturbed, then half on 4 devices and half on 1, and half on 2 x 2 and half on "
        "1 x 4, and compare; --out must be empty",
    )
    parser.json()


def run(args: argparse.Namespace) -> None:
    """Check the options, then train, or run the checks asked for."""
    layout = Layout(args.processes, args.devices, args.data, args.model, args.fsdp)
    check_batch(args.batch_size, args.accumulate, {"data": layout.rows})
    if args.stop_at is not None and args.stop_at > args.steps:
        raise InputError(f"--stop-at {args.stop_at} is beyond --steps {args.steps}")
    folder = writable_folder(args.out, "--out")
    if args.check is not None or args.topologies:
        from experiments.resilience.check import check

        check(args, layout)
        return
    settings = {name: getattr(args, name) for name in SETTINGS}
    saving = folder.absolute(), args.save_every, args.stop_at
    supervise(Order(REFERENCE, settings, layout, *saving, args.restarts))
    last = read_lines(folder / METRICS)[-1]
    write_json(args.json, {"metrics": last})
    print(f"{last['step']} updates, loss {last['loss']:.4f}; checkpoints and metrics in {folder}")
