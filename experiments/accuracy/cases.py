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
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import moment_jax as mj
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


def read_folder(folder: Path) -> list[Case]:
    """Read and check every `.npz` file of a folder, by name."""
    if not folder.is_dir():
        raise InputError(f"--cases {folder} is no folder; name one with .npz case files")
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise InputError(f"--cases {folder} holds no .npz file; name a folder with case files")
    return [read_case(file) for file in files]


def read_case(path: Path) -> Case:
    """Read and check one case file."""
    return _Reader(path).case()


class _Reader:
    """The arrays of one file, checked as they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                stored = np.load(file, allow_pickle=False)
                if not isinstance(stored, np.lib.npyio.NpzFile):
                    raise ValueError("a single array")
                self.arrays = {name: stored[name] for name in stored.files}
        except BROKEN as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(
                f"cannot read case file {path} ({reason}); it is truncated or no .npz of plain "
                "arrays: copy it anew"
            ) from error

    def wrong(self, what: str, fix: str) -> InputError:
        return InputError(f"case file {self.path}: {what}; {fix}")

    def array(self, name: str, *shape: int | None) -> np.ndarray:
        """A finite float32 array of this shape; None is any length."""
        if name not in self.arrays:
            raise self.wrong(f"{name} is missing", "write it, or remove the file")
        array = self.arrays[name]
        fits = len(array.shape) == len(shape) and all(
            want in (None, have) for want, have in zip(shape, array.shape, strict=True)
        )
        if not fits or 0 in array.shape:
            wanted = ", ".join("any" if want is None else str(want) for want in shape)
            raise self.wrong(f"{name} has the shape {array.shape}", f"it needs ({wanted})")
        if array.dtype.kind not in "fiu":
            raise self.wrong(f"{name} is of type {array.dtype}", "it needs real numbers")
        # Numbers that overflow float32 count as infinite.
        with np.errstate(over="ignore"):
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
        shape = shape or mean.T.shape
        centre = jnp.asarray(mean.T.reshape(shape))
        if not sd.any():
            return mj.posterior.Point(centre)
        return mj.posterior.Factorized(centre, jnp.asarray(sd.T.reshape(shape)) ** 2)

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

    def case(self) -> Case:
        if MLP in self.arrays:
            return self.mlp()
        if BLOCKS in self.arrays:
            return self.encoder()
        raise self.wrong(f"neither {MLP} nor {BLOCKS} is in it", "write an MLP's or a block's keys")

    def mlp(self) -> Case:
        inputs = self.array("X", None, None)
        layers: dict[int, Any] = {}
        widths = [inputs.shape[1]]
        while f"W{len(layers)}" in self.arrays:
            i = len(layers)
            layers[i] = self.dense(f"W{i}", f"Ws{i}", f"b{i}", f"bs{i}", widths[-1])
            widths.append(layers[i]["bias"].shape[0])
        truth = self.truth("mc_mean", "mc_std", None, widths[-1], most=len(inputs))
        rows = inputs[: len(truth.mean), None, :]
        truth = Truth(*(part[:, None, :] for part in truth))
        network = mj.nn.MLP(widths, rngs=nnx.Rngs(0))
        model = mj.Bayesian(network, beliefs={"layers": layers})
        return Case(self.path.stem, model, rows, truth, None)

    def encoder(self) -> Case:
        inputs = self.array("X", None, None, None)
        _, tokens, width = inputs.shape
        heads = int(self.array("heads")) if "heads" in self.arrays else DEFAULT_HEADS
        if heads < 1 or width % heads:
            raise self.wrong(
                f"{heads} heads do not divide a width of {width}", "write `heads`, a divisor"
            )
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
        model = mj.Bayesian(Blocks(*sizes, rngs=nnx.Rngs(0)), beliefs=beliefs)
        return Case(self.path.stem, model, rows, truth, logits)

    def dense(
        self, mean: str, sd: str, bias: str, bias_sd: str, width: int, out: int | None = None,
        shape: tuple[int, ...] = (), bias_shape: tuple[int, ...] = (),
    ) -> dict[str, Any]:  # fmt: skip
        kernel = self.array(mean, out, width)
        vector = self.array(bias, kernel.shape[0])
        return {
            "kernel": self.belief(kernel, sd, *shape),
            "bias": self.belief(vector, bias_sd, *bias_shape),
        }

    def block(self, prefix: str, width: int, heads: int) -> dict[str, Any]:
        def dense(name: str, into: int, out: int | None, *shapes: tuple[int, ...]) -> Any:
            weight, bias = f"{prefix}W{name}", f"{prefix}b{name}"
            return self.dense(weight, f"{weight}_s", bias, f"{bias}_s", into, out, *shapes)

        def norm(name: str) -> Any:
            names = {"scale": f"{prefix}{name}_g", "bias": f"{prefix}{name}_b"}
            return {k: self.belief(self.array(n, width), f"{n}_s") for k, n in names.items()}

        own = heads, width // heads
        parts = {"query": "q", "key": "k", "value": "v"}
        attention = {k: dense(n, width, width, (width, *own), own) for k, n in parts.items()}
        attention["out"] = dense("o", width, width, (*own, width))
        hidden = dense("f1", width, None)
        return {
            "attention": attention, "norm1": norm("ln1"), "hidden": hidden,
            "output": dense("f2", hidden["bias"].shape[0], width), "norm2": norm("ln2"),
        }  # fmt: skip
