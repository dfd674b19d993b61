"""Linearised dependence of one random array on another: tangents for residual sums and products."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance, Separable
from moment_jax.covariance.separable_noise import average_gain
from moment_jax.layers.attention.tangent import AttentionTangent
from moment_jax.layers.feed_forward import FeedForwardTangent, average_kernel
from moment_jax.layers.norm_tangent import NormTangent
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

    def scaled(self, gain: Array, before: Any, after: Covariance) -> Path:
        """This path followed by an elementwise function of this gain, (T, F) or (1, F)."""
        path = self if self.output is None else Path.straight(self.collapsed())
        average: Any = None
        if not isinstance(before, Separable):
            average = path.average * jnp.mean(gain, axis=0)[None, :]
        elif path.average is path.hidden:
            average = average_kernel(path.hidden, gain, before, after)
        if average is None:
            shares = average_gain(before, jnp.broadcast_to(gain, before.shape))
            average = path.average * shares[None, :]
        return Path(path.hidden, path.gain * gain, average)

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
    norm: NormTangent | None = None
    paths: tuple[Path, ...] = ()  # summed; empty if nothing follows the normalisation
    attention: AttentionTangent | None = None  # replaces the paths

    def tangent(self, num_tokens: int) -> Any:
        """The tangent for `layers.residual`, or None."""
        if self.attention is not None or not self.paths:
            return self.attention
        hidden, gain, output = [], [], []
        for path in self.paths:
            f = path.hidden.shape[1]
            hidden.append(path.hidden)
            gain.append(jnp.broadcast_to(path.gain, (num_tokens, f)))
            output.append(
                jnp.eye(f, dtype=path.hidden.dtype) if path.output is None else path.output
            )
        collapsed = None
        if isinstance(self.entered, Separable):
            collapsed = functools.reduce(operator.add, (path.collapsed() for path in self.paths))
        joined = _joined(hidden, 1), _joined(gain, 1), _joined(output, 0)
        return FeedForwardTangent(*joined, self.entered, collapsed)


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
    unit = (Path.straight(jnp.eye(x.mean.shape[1], dtype=x.mean.dtype)),)

    def scaled(paths: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(p.scaled(gain, x.cov, after) for p in paths)

    def step(branch: Branch) -> Branch:
        if not branch.paths and branch.norm is not None and gain.shape[0] == 1:
            norm = branch.norm._replace(scale=branch.norm.scale * gain)
            return dataclasses.replace(branch, norm=norm, entered=after)
        return dataclasses.replace(branch, paths=scaled(branch.paths or unit))

    return _extended(x, step, scaled(unit))


def _extended(
    x: Sequence, step: Callable[[Branch], Branch], paths: tuple[Path, ...]
) -> tuple[Branch, ...]:
    """Every branch extended by `step`, and one that starts at x unless there is one already."""
    known = tuple(step(branch) for branch in x.branches if branch.attention is None)
    if any(branch.inner is x.mean for branch in known):
        return known
    return (*known, Branch(x.mean, x.mean, x.cov, paths=paths))[-_LONGEST:]


def _joined(arrays: list[Array], axis: int) -> Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis)
