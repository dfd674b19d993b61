"""Attention as a Markov chain and a Brownian motion, on the network of a finished main job.

Draws the attention graph of one image over the image, with its stationary law, and the steps of the
residual stream against normal quantiles. Says whether the steps of the tokens are Brownian. Writes
metrics.json.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import moment_jax as mj
from experiments.brownian import figures as draw
from experiments.brownian.motion import motion_report
from experiments.brownian.stream import residual_stream
from experiments.command_line import Parser, writable_folder
from experiments.data import Digits
from experiments.digits import trained
from experiments.figures import save
from experiments.outputs import aligned, write_json


def add_arguments(parser: Parser) -> None:
    """The options of the experiment."""
    parser.place("--run", "runs/digits", "the --out of a finished main job")
    parser.place("--out", None, "folder for metrics.json and figures (default: brownian/ in --run)")
    what = "test images for the statistics of the steps"
    parser.whole("--images", 300, what, least=20)
    parser.seed()


def run(args: argparse.Namespace) -> None:
    """Load the network, analyse it, and write the results."""
    network, digits = trained(args.run)
    out = writable_folder(args.run / "brownian" if args.out is None else args.out, "--out")
    rng = np.random.default_rng(args.seed)
    test = digits.test.part(rng.permutation(len(digits.test.labels))[: args.images])
    plain = network.at_means()
    metrics = {
        "settings": vars(args),
        "attention": _attention(out, plain, digits),
        "motion": _motion(args, out, residual_stream(plain, jnp.asarray(test.images))),
    }
    write_json(out / "metrics.json", metrics)
    _print(metrics)
    print(f"figures and metrics.json in {out}")


def _attention(out: Path, plain: mj.nn.VisionTransformer, digits: Digits) -> dict[str, Any]:
    """The chain of every head of every block on the first image, and the figure of the first block."""
    image = digits.test.images[0]
    stream = residual_stream(plain, jnp.asarray(image)[None])
    rows, drawn = [], {}
    for i, block in enumerate(plain.encoder.blocks):
        x = stream[i, 0]
        tokens = block.norm1(x) if block.norm_first else x
        layers: list[Any] = [block.attention.query, block.attention.key]
        query, key = kernels = [layer.kernel[...] for layer in layers]
        biases = [layer.bias[...] for layer in layers]
        scores = mj.brownian.attention_scores(tokens, *kernels, *biases)
        shares = jax.vmap(antisymmetric_share, in_axes=1)(query, key)
        chains = {f"head {h}": jax.nn.softmax(s, axis=1) for h, s in enumerate(scores)}
        identity = mj.brownian.transition_matrix(mj.brownian.to_sphere(x))
        for h, (name, chain) in enumerate({**chains, "identity projections": identity}.items()):
            law = mj.brownian.stationary(chain)
            row = {
                "block": i,
                "chain": name,
                "detailed_balance_gap": mj.brownian.detailed_balance_gap(chain, law),
                "spectral_gap": mj.brownian.spectral_gap(chain),
                "mixing_time": mj.brownian.mixing_time(chain),
                "entropy_rate": mj.brownian.entropy_rate(chain, law),
                "largest_stationary": law.max(),
            }
            if name in chains:
                parts = split_scores(scores[h])
                row["form_antisymmetric_share"] = shares[h]
                row["score_symmetric_share"], _, row["score_cyclic_share"] = parts.shares
            rows.append(row)
            if i == 0:
                shown = f"head 1.{h + 1}" if name in chains else name
                drawn[shown] = (np.asarray(chain), np.asarray(law))
    save(draw.attention(image, drawn), out / "attention.png")
    return {"label": int(digits.test.labels[0]), "chains": rows}


def _motion(args: argparse.Namespace, out: Path, stream: jax.Array) -> dict[str, Any]:
    """Statistics of the steps, and the verdict."""
    motion = motion_report(stream, key=jax.random.key(args.seed))
    steps, levels = np.diff(np.asarray(stream), axis=0), (np.arange(200) + 0.5) / 200
    spread = np.maximum(steps.std(axis=1, keepdims=True), 1e-12)
    standard = (steps - steps.mean(axis=1, keepdims=True)) / spread
    found = [np.quantile(step, levels) for step in standard]
    save(draw.increments(stats.norm.ppf(levels), found, motion), out / "increments.png")
    verdict = {"brownian": motion.is_brownian, "sentence": motion.sentence}
    return {**verdict, "blocks": motion.blocks, "growth": motion.growth}


def _print(metrics: dict[str, Any]) -> None:
    print(metrics["motion"]["sentence"])
    table = [["block", "chain", "balance gap", "spectral gap", "mixing time", "entropy"]]
    for row in metrics["attention"]["chains"]:
        numbers = [f"{row[k]:.3f}" for k in ("detailed_balance_gap", "spectral_gap")]
        numbers += [f"{row['mixing_time']:.0f}", f"{row['entropy_rate']:.2f}"]
        table.append([str(row["block"]), row["chain"], *numbers])
    print(aligned(table))


class ScoreParts(NamedTuple):
    """A matrix as symmetric + gradient + cyclic, orthogonal to each other.

    The chain softmax(s) is reversible exactly where the cyclic part is zero.
    """

    symmetric: jax.Array  # (s + s^T)/2
    gradient: jax.Array  # the part g_j - g_i of the antisymmetric rest
    cyclic: jax.Array  # what is left: flow around cycles of tokens

    @property
    def shares(self) -> jax.Array:
        """Of each in the squared norm, (3,); zero where every row of the scores is constant."""
        squares = jnp.stack([jnp.sum(part**2) for part in self])
        return squares / jnp.where(squares.sum() > 0, squares.sum(), 1)


def split_scores(scores: jax.Array) -> ScoreParts:
    """Split scores (T, T) into the parts of a reversible chain and the part that makes it irreversible.

    The rows of scores are centred first: a softmax does not see a constant in its row.
    Detailed balance pi_i P_ij = pi_j P_ji for P = softmax(s) says s_ij - s_ji = g_j - g_i for some
    g, so the antisymmetric part is projected onto such differences; what is left is orthogonal to them.
    """
    scores = scores - jnp.mean(scores, axis=1, keepdims=True)
    symmetric, antisymmetric = (scores + scores.T) / 2, (scores - scores.T) / 2
    height = jnp.mean(antisymmetric, axis=0)
    gradient = height[None, :] - height[:, None]
    return ScoreParts(symmetric, gradient, antisymmetric - gradient)


def antisymmetric_share(query_kernel: jax.Array, key_kernel: jax.Array) -> jax.Array:
    """Antisymmetric share of the squared norm of one head's form Wq Wk^T, of kernels (D, K).

    With identity projections it is 0; with independent random ones about a half. The
    form's antisymmetric part is what can make attention's chain irreversible; how much of it the tokens
    see is `split_scores` of their scores.
    """
    form = query_kernel @ key_kernel.T
    total = jnp.sum(form**2)
    return jnp.sum((form - form.T) ** 2) / 4 / jnp.where(total > 0, total, 1)
