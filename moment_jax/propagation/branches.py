"""Linearised dependence of one random array on another, for residual sums and products."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance, Diagonal, Separable
from moment_jax.propagation.moments import Sequence


@dataclasses.dataclass(frozen=True, eq=False)
class Path:
    """The map dx -> ((dx hidden) * gain) output."""

    hidden: Array  # (D, F)
    gain: Array  # (T, F), or (1, F)
    average: Array  # the hidden kernel times the token-averaged gains, (D, F)
    output: Array | None = None  # (F, O); None is the identity

    @classmethod
    def straight(cls, kernel: Array) -> Path:
        """The path of a dense layer."""
        return cls(kernel, jnp.ones((1, kernel.shape[1]), kernel.dtype), kernel)

    def collapsed(self) -> Array:
        """A single kernel with averaged gains, (D, O)."""
        return self.average if self.output is None else self.average @ self.output

    def mapped(self, kernel: Array) -> Path:
        """This path followed by a dense layer."""
        if self.output is None:
            return dataclasses.replace(self, output=kernel)
        return Path.straight(self.collapsed() @ kernel)

    def scaled(self, gain: Array, before: Any) -> Path:
        """This path followed by an elementwise function of this gain, (T, F) or (1, F)."""
        path = self if self.output is None else Path.straight(self.collapsed())
        average = jnp.mean(gain, axis=0)
        if isinstance(before, Separable):
            average = before.average(jnp.broadcast_to(gain, before.shape))
        return Path(path.hidden, path.gain * gain, path.average * average[None, :])

    def columns(self, chosen: Any) -> Path:
        """This path restricted to some outputs."""
        if self.output is not None:
            return dataclasses.replace(self, output=self.output[:, chosen])
        gain = self.gain if self.gain.shape[1] == 1 else self.gain[:, chosen]
        return Path(self.hidden[:, chosen], gain, self.average[:, chosen])


@dataclasses.dataclass(frozen=True, eq=False)
class Branch:
    """A sequence linearised in another, x: an optional normalisation, then paths or attention.

    Arrays serve as identities: x is recognised by the object `mean`.
    """

    mean: Array  # E[x]
    inner: Array  # mean of what enters the paths: x, or x normalised
    entered: Covariance  # of the same
    cross: Any  # Cov[x, inner], as layers carry it
    paths: tuple[Path, ...] = ()  # summed; empty if nothing follows the normalisation
    layer: tuple[Any, Any] | None = None
    """In place of the paths: the covariances of x, and of `inner`, with attention or the like."""

    def returned(self, x: Array) -> Any:
        """Cov[x, f(x)] as layers carry it, given the object E[x]; None if f is of something else."""
        own, inner = x is self.mean, x is self.inner
        if not (own or inner) or not (self.paths or self.layer):
            return None
        if self.layer is not None:
            return self.layer[0 if own else 1]
        cross, cov = self.cross if own else self.entered.with_itself(), self.entered
        if isinstance(cov, Separable):
            return cross.map_features(sum(path.collapsed() for path in self.paths))
        return sum(_through(cov, cross, path) for path in self.paths)


def itself(x: Sequence) -> Branch:
    """The identity as a branch."""
    unit = Path.straight(jnp.eye(x.mean.shape[1], dtype=x.mean.dtype))
    return Branch(x.mean, x.mean, x.cov, x.cov.with_itself(), (unit,))


def _through(cov: Covariance, cross: Array, path: Path) -> Array:
    """Cov[x, path(z)] from Cov[x, z], in `Diagonal` or dense."""
    width = path.hidden.shape[1]
    output = jnp.eye(width, dtype=cross.dtype) if path.output is None else path.output
    gain = jnp.broadcast_to(path.gain, (cov.shape[0], width))
    if isinstance(cov, Diagonal):
        return cross * (gain @ (path.hidden.T * output))
    return jnp.einsum("tdsi,if,sf,fo->tdso", cross, path.hidden, gain, output)


_LONGEST = 4  # branches kept for each array


def through_dense(x: Sequence, kernel: Array) -> tuple[Branch, ...]:
    """The branches of a sequence after a dense layer."""
    straight = (Path.straight(kernel),)

    def step(branch: Branch) -> Branch:
        if not branch.paths:
            return dataclasses.replace(branch, inner=x.mean, entered=x.cov, paths=straight)
        return dataclasses.replace(branch, paths=tuple(p.mapped(kernel) for p in branch.paths))

    return _extended(x, step, straight)


def through_gain(x: Sequence, gain: Array, after: Covariance) -> tuple[Branch, ...]:
    """The branches of a sequence after an elementwise function, from its expected gain."""
    unit = itself(x).paths

    def scaled(paths: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(p.scaled(gain, x.cov) for p in paths)

    def step(branch: Branch) -> Branch:
        if not branch.paths and gain.shape[0] == 1:
            cross = after.rescale_cross(branch.cross, gain[0])
            return dataclasses.replace(branch, cross=cross, entered=after)
        return dataclasses.replace(branch, paths=scaled(branch.paths or unit))

    return _extended(x, step, scaled(unit))


def through_layer(
    x: Sequence, cov: Covariance, layer: Callable[[Any], Any]
) -> tuple[Array, Any, tuple[Branch, ...]]:
    """Mean, covariance and branch of a layer of x, which takes the covariance `cross` to its output's.

    Nothing but sums can follow in a branch. `cov` is the covariance of x as the layer sees it.
    """
    branch = next((b for b in x.branches if not b.paths and b.layer is None), None)
    if branch is None:
        branch = Branch(x.mean, x.mean, cov, cov.with_itself())
    # Covariances with what was normalised, and with what entered, in one call.
    crosses = jax.tree.map(lambda *each: jnp.stack(each), branch.cross, cov.with_itself())
    mean, out, crosses = jax.vmap(layer, out_axes=(None, None, 0))(crosses)
    both = tuple(jax.tree.map(lambda leaf, i=i: leaf[i], crosses) for i in (0, 1))
    return mean, out, (dataclasses.replace(branch, inner=x.mean, entered=cov, layer=both),)


def _extended(
    x: Sequence, step: Callable[[Branch], Branch], paths: tuple[Path, ...]
) -> tuple[Branch, ...]:
    """Every branch extended by `step`, and one that starts at x unless there is one already."""
    known = tuple(step(branch) for branch in x.branches if branch.layer is None)
    if any(branch.inner is x.mean for branch in known):
        return known
    own = Branch(x.mean, x.mean, x.cov, x.cov.with_itself(), paths)
    return (*known, own)[-_LONGEST:]
