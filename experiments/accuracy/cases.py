"""Case files: a posterior with its sampled truth in one `.npz`, of an MLP or of encoder blocks.

    MLP       W0, Ws0, b0, bs0, W1, ...: means and standard deviations, kernels (out, in); ReLU between.
    blocks    L0_Wq, L0_Wq_s, L0_bq, ... with q, k, v, o, f1, f2, and L0_ln1_g, L0_ln1_b, ...: pre-norm
              blocks, exact GELU, epsilon 1e-5; `heads` (4 where it is missing).
    both      X, (N, features) or (N, T, D), certain; mc_mean and mc_std of its first rows.
    head      head_W, head_b, certain, on the mean over tokens; logit_mean, logit_std its truth.

A standard deviation of exactly zero is a certain weight, as the files that vary one matrix alone have
it; a negative one is an error, and so is a truth whose standard deviation is not positive.
"""

import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import moment_jax as mj
from experiments import draws
from experiments.command_line import InputError

DEFAULT_HEADS = 4
EPSILON = 1e-5  # of the normalisations
MLP, BLOCKS = "W0", "L0_Wq"  # the keys that tell the kinds apart
BROKEN = OSError, EOFError, ValueError, AttributeError, zipfile.BadZipFile, zlib.error

READS: dict[str, Callable[[Array], Array]] = {
    "mean": lambda x: x.mean(axis=-2),
    "class token": lambda x: x[..., 0, :],
    "last token": lambda x: x[..., -1, :],
    "every token": lambda x: x,
}
CAUSAL = "last token", "every token"


class Truth(NamedTuple):
    """Sampled mean and standard deviation of an output."""

    mean: np.ndarray
    sd: np.ndarray


class Blocks(nnx.Module):
    """Pre-norm blocks with exact GELU, and a head on the tokens of `READS` where there are classes."""

    def __init__(
        self, num_blocks: int, num_features: int, num_heads: int, hidden_features: int,
        num_classes: int | None, read: str = "mean", *, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        self.read = read
        options: dict[str, Any] = {"norm_first": True, "activation": "gelu", "epsilon": EPSILON}
        options |= {"hidden_features": hidden_features, "rngs": rngs}
        self.blocks = nnx.List(
            mj.nn.EncoderBlock(num_features, num_heads, **options) for _ in range(num_blocks)
        )
        head = None if num_classes is None else nnx.Linear(num_features, num_classes, rngs=rngs)
        self.head: Any = nnx.data(head)

    def __call__(self, x: Array, *, logits: bool = False) -> Array:
        """The tokens, or the logits."""
        tokens = x.shape[-2]
        mask = jnp.tril(jnp.ones((tokens, tokens), bool)) if self.read in CAUSAL else None
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(READS[self.read](x)) if logits else x


class Case(NamedTuple):
    """A network of random weights, an input, and the sampled truth of the output."""

    name: str  # the file's
    model: mj.Bayesian  # of a `Blocks`, or of an MLP
    inputs: np.ndarray  # (N, T, D), T = 1 for an MLP; those whose truth is known
    truth: Truth  # of the output, (N, T, O)
    logits: Truth | None  # of the head's output, (N, C) or (N, T C); None where there is no head

    def outputs(self, network: Any, x: Array) -> tuple[Any, Any]:
        """Output and logits, or None, of the model or of a plain network like it."""
        return network(x), None if self.logits is None else network(x, logits=True)


Outputs = tuple[Any, Any]
"""Mean and sd of the output, (N, T, O), and of the logits, (N, C) or (N, T C); None without a head."""
Forward = Callable[[], Any]

BYTES = 4  # float32


def moments(case: Case, structure: type[mj.Covariance]) -> Forward:
    """The moment pass over the case's inputs: `Outputs`."""

    def batch(model: mj.Bayesian, inputs: Array) -> Outputs:
        def of(x: Array) -> Outputs:
            output, logits = case.outputs(model, x)
            return (output.mean, output.sd), logits and _rows(logits)

        if structure is not mj.Full:
            return of(inputs)
        # One sequence at a time: its memory is T^4 and (T D)^2.
        return jax.tree.map(lambda part: part[:, 0], jax.lax.map(of, inputs[:, None]))

    return _compiled(batch, case, case.model.replace(structure=structure))


def plain(case: Case) -> Forward:
    """The plain network at the mean weights, to compare times with."""
    return _compiled(case.outputs, case, case.model.at_means())


def linearised(case: Case, which: int) -> Forward:
    """Mean and sd of the output (0) or the logits (1) of the network linearised at its means."""

    def batch(model: mj.Bayesian, x: Array) -> tuple[Array, Array]:
        found = model(x, logits=bool(which))
        return _rows(found) if which else (found.mean, found.sd)

    model = case.model.replace(structure=mj.Diagonal, linearised=True)
    return _compiled(batch, case, model)


def sampled(case: Case, count: int, key: Array) -> Forward:
    """`Outputs` by so many sampled networks, each for all inputs."""

    def batch(model: mj.Bayesian, x: Array) -> Outputs:
        apply = draws.function_of(model.at_means())

        def outputs(arrays: Any) -> Array:
            both = [out.reshape(len(x), -1) for out in case.outputs(partial(apply, arrays), x)]
            return jnp.concatenate(both, axis=1)  # of one array

        found = mj.monte_carlo(outputs, model.beliefs, key, count, batch_size=1)
        size, both = x[0].size, (found.mean, found.standard_deviation)
        output = [part[:, :size].reshape(x.shape) for part in both]
        return output, [part[:, size:] for part in both]

    return _compiled(batch, case, case.model)


def _rows(found: Any) -> tuple[Array, Array]:
    """Mean and sd, each token's logits beside the others'."""
    return found.mean.reshape(len(found.mean), -1), found.sd.reshape(len(found.mean), -1)


def _compiled(fn: Callable[..., Any], case: Case, network: nnx.Module) -> Forward:
    """`fn(network, inputs)`, the network's weights given."""
    graph, state = nnx.split(network)
    arguments = state, jnp.asarray(case.inputs)
    program = jax.jit(lambda state, x: fn(nnx.merge(graph, state), x)).lower(*arguments).compile()
    return lambda: jax.block_until_ready(program(*arguments))


def full_gib(case: Case) -> float:
    """The largest arrays that `Full` needs for one sequence, in GiB.

    They are the covariances of all scores, H^2 T^4, and of all hidden units, (T F)^2.
    """
    network = case.model.at_means()
    blocks = getattr(network, "blocks", [])
    heads = blocks[0].attention.num_heads if blocks else 0
    layers = [block.hidden for block in blocks] or network.layers
    widest = max(layer.out_features for layer in layers)
    tokens = case.inputs.shape[1]
    return max(heads**2 * tokens**4, (tokens * widest) ** 2) * BYTES / 2**30


def read_folder(folder: Path) -> list[Case]:
    """Read and check every `.npz` file of a folder, by name."""
    files = sorted(folder.glob("*.npz"))
    if not files:
        what = "holds no .npz file" if folder.is_dir() else "is no folder"
        raise InputError(f"--cases {folder} {what}; name a folder with case files")
    return [read_case(file) for file in files]


def read_case(path: Path) -> Case:
    """Read and check one case file."""
    try:
        with path.open("rb") as file:
            stored = np.load(file, allow_pickle=False)
            if not isinstance(stored, np.lib.npyio.NpzFile):
                raise ValueError("a single array")
            reader = _Reader(path, {name: stored[name] for name in stored.files})
    except BROKEN as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"cannot read case file {path} ({reason}); it is truncated or no .npz of plain arrays: copy "
            "it anew"
        ) from error
    if MLP in reader.arrays:
        return reader.mlp()
    if BLOCKS in reader.arrays:
        return reader.encoder()
    raise reader.wrong(f"neither {MLP} nor {BLOCKS} is in it", "write an MLP's or a block's keys")


class _Reader(NamedTuple):
    """The arrays of one file, checked as they are read."""

    path: Path
    arrays: dict[str, np.ndarray]

    def wrong(self, what: str, fix: str) -> InputError:
        return InputError(f"case file {self.path}: {what}; {fix}")

    def array(self, name: str, *shape: int | None) -> np.ndarray:
        """A finite float32 array of this shape; None is any length."""
        if name not in self.arrays:
            raise self.wrong(f"{name} is missing", "write it, or remove the file")
        array = self.arrays[name]
        wanted = [have if want is None else want for want, have in zip(shape, array.shape)]  # noqa: B905
        if array.ndim != len(shape) or [*array.shape] != wanted or 0 in array.shape:
            words = ", ".join("any" if want is None else str(want) for want in shape)
            raise self.wrong(f"{name} has the shape {array.shape}", f"it needs ({words})")
        if array.dtype.kind not in "fiu":
            raise self.wrong(f"{name} is of type {array.dtype}", "it needs real numbers")
        with np.errstate(over="ignore"):  # numbers that overflow float32 count as infinite
            array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise self.wrong(f"{name} holds NaN or infinity", "write finite numbers")
        return array

    def belief(self, mean: np.ndarray, name: str, *shape: int) -> mj.posterior.Posterior:
        """A belief with the standard deviations `name`.

        Kernels are transposed to (in, out), and reshaped where a shape is given.
        """
        sd = self.array(name, *mean.shape)
        if (sd < 0).any():
            raise self.wrong(
                f"{name} holds a negative standard deviation ({sd.min():g})",
                "write standard deviations, 0 for a certain weight",
            )
        centre, spread = (jnp.asarray(x.T.reshape(shape or x.T.shape)) for x in (mean, sd))
        return (
            mj.posterior.Factorized(centre, spread**2) if sd.any() else mj.posterior.Point(centre)
        )

    def truth(self, mean: str, sd: str, *shape: int | None, most: int) -> Truth:
        first = self.array(mean, *shape)
        second = self.array(sd, *first.shape)
        if (second <= 0).any():
            raise self.wrong(
                f"{sd} holds a standard deviation that is not positive ({second.min():g})",
                "sample the truth of outputs that vary",
            )
        if len(first) > most:
            raise self.wrong(f"{mean} is of {len(first)} inputs, X holds {most}", "write them all")
        return Truth(first, second)

    def mlp(self) -> Case:
        inputs = self.array("X", None, None)
        layers: dict[int, Any] = {}
        widths = [inputs.shape[1]]
        while f"W{len(layers)}" in self.arrays:
            i = len(layers)
            layers[i] = self.dense(("W{}", "Ws{}", "b{}", "bs{}"), str(i), widths[-1])
            widths.append(layers[i]["bias"].shape[0])
        truth = self.truth("mc_mean", "mc_std", None, widths[-1], most=len(inputs))
        inputs, *parts = (x[: len(truth.mean), None, :] for x in (inputs, *truth))
        model = mj.Bayesian(
            mj.nn.MLP(widths, rngs=nnx.Rngs(0)), beliefs={"layers": layers}, verify=False
        )
        return Case(self.path.stem, model, inputs, Truth(*parts), None)

    def encoder(self) -> Case:
        inputs = self.array("X", None, None, None)
        _, tokens, width = inputs.shape
        heads = int(self.array("heads")) if "heads" in self.arrays else DEFAULT_HEADS
        if heads < 1 or width % heads:
            wrong = f"{heads} heads do not divide a width of {width}"
            raise self.wrong(wrong, "write `heads`, a divisor")
        beliefs: dict[str, Any] = {"blocks": {}}
        while f"L{len(beliefs['blocks'])}_Wq" in self.arrays:
            number = len(beliefs["blocks"])
            beliefs["blocks"][number] = self.block(f"L{number}_", width, heads)
        truth = self.truth("mc_mean", "mc_std", None, tokens, width, most=len(inputs))
        rows = inputs[: len(truth.mean)]
        classes, logits = None, None
        if "head_W" in self.arrays:
            kernel = self.array("head_W", None, width)
            classes = len(kernel)
            bias = self.array("head_b", classes)
            beliefs["head"] = {"kernel": jnp.asarray(kernel.T), "bias": jnp.asarray(bias)}
            logits = self.truth("logit_mean", "logit_std", len(rows), classes, most=len(rows))
        hidden = beliefs["blocks"][0]["hidden"]["bias"].shape[0]
        sizes = len(beliefs["blocks"]), width, heads, hidden, classes
        model = mj.Bayesian(Blocks(*sizes, rngs=nnx.Rngs(0)), beliefs=beliefs, verify=False)
        return Case(self.path.stem, model, rows, truth, logits)

    def dense(
        self, keys: tuple[str, ...], name: str, into: int, out: int | None = None,
        shape: tuple[int, ...] = (), bias_shape: tuple[int, ...] = (),
    ) -> dict[str, Any]:  # fmt: skip
        """Of the keys of a kernel, its standard deviations, a bias and its own, with {} for the name."""
        weight, weight_sd, bias, bias_sd = (key.format(name) for key in keys)
        kernel = self.array(weight, out, into)
        vector = self.array(bias, kernel.shape[0])
        belief = self.belief(vector, bias_sd, *bias_shape)
        return {"kernel": self.belief(kernel, weight_sd, *shape), "bias": belief}

    def block(self, prefix: str, width: int, heads: int) -> dict[str, Any]:
        keys = tuple(prefix + key for key in ("W{}", "W{}_s", "b{}", "b{}_s"))
        own = heads, width // heads

        def norm(name: str) -> Any:
            names = {"scale": f"{prefix}{name}_g", "bias": f"{prefix}{name}_b"}
            return {k: self.belief(self.array(n, width), f"{n}_s") for k, n in names.items()}

        attention = {
            part: self.dense(keys, part[0], width, width, (width, *own), own)
            for part in ("query", "key", "value")
        }
        attention["out"] = self.dense(keys, "o", width, width, (*own, width))
        hidden = self.dense(keys, "f1", width)
        return {
            "attention": attention, "norm1": norm("ln1"), "norm2": norm("ln2"), "hidden": hidden,
            "output": self.dense(keys, "f2", hidden["bias"].shape[0], width),
        }  # fmt: skip
