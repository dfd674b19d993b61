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


@dataclasses.dataclass(frozen=True, eq=False)
class Path:
    """The map dx -> ((dx hidden) * gain) output."""

    hidden: Array  # (D, F)
    gain: Array  # (T, F), or (1, F)
    average: Array  # the hidden kernel times the token-averaged gains, (D, F)
    output: Array | None = None  # (F, O); None is the identity

    def collapsed(self) -> Array:
        """A single kernel with averaged gains, (D, O)."""
        return self.average if self.output is None else self.average @ self.output

    def mapped(self, kernel: Array) -> Path:
        """This path followed by a dense layer."""
        if self.output is None:
            return dataclasses.replace(self, output=kernel)
        return straight(self.collapsed() @ kernel)

    def scaled(self, gain: Array, before: Covariance, after: Covariance) -> Path:
        """This path followed by an elementwise function of this gain, (T, F) or (1, F)."""
        path = self if self.output is None else straight(self.collapsed())
        average = path.average
        if isinstance(before, Separable):
            known = average_kernel(path.hidden, gain, before, after) if path.plain else None
            shares = average_gain(before, jnp.broadcast_to(gain, before.shape))
            average = average * shares[None, :] if known is None else known
        else:
            average = average * jnp.mean(gain, axis=0)[None, :]
        return Path(path.hidden, path.gain * gain, average)

    @property
    def plain(self) -> bool:
        """Whether the path is just its hidden kernel."""
        return self.average is self.hidden

    def columns(self, chosen: Any) -> Path:
        """This path restricted to some outputs."""
        if self.output is not None:
            return dataclasses.replace(self, output=self.output[:, chosen])
        gain = self.gain if self.gain.shape[1] == 1 else self.gain[:, chosen]
        return Path(self.hidden[:, chosen], gain, self.average[:, chosen])


def straight(kernel: Array) -> Path:
    """The path of a dense layer."""
    return Path(kernel, jnp.ones((1, kernel.shape[1]), kernel.dtype), kernel)


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

        def output(path: Path) -> Array:
            f = path.hidden.shape[1]
            return jnp.eye(f, dtype=path.hidden.dtype) if path.output is None else path.output

        def gain(path: Path) -> Array:
            return jnp.broadcast_to(path.gain, (num_tokens, path.hidden.shape[1]))

        collapsed = None
        if isinstance(self.entered, Separable):
            collapsed = functools.reduce(operator.add, (path.collapsed() for path in self.paths))
        return FeedForwardTangent(
            _joined([path.hidden for path in self.paths], 1),
            _joined([gain(path) for path in self.paths], 1),
            _joined([output(path) for path in self.paths], 0),
            self.entered,
            collapsed,
        )


_LONGEST = 4  # branches kept for each array


def through_dense(
    branches: tuple[Branch, ...], mean: Array, cov: Covariance, kernel: Array
) -> tuple[Branch, ...]:
    """The branches after a dense layer."""

    def step(branch: Branch) -> Branch:
        if not branch.paths:
            return dataclasses.replace(branch, inner=mean, entered=cov, paths=(straight(kernel),))
        return dataclasses.replace(branch, paths=tuple(p.mapped(kernel) for p in branch.paths))

    return _begun(branches, step, Branch(mean, mean, cov, None, (straight(kernel),)))


def through_gain(
    branches: tuple[Branch, ...], gain: Array, before: Covariance, after: Covariance, mean: Array
) -> tuple[Branch, ...]:
    """The branches after an elementwise function, from its expected gain and its input's mean."""
    unit = straight(jnp.eye(mean.shape[1], dtype=mean.dtype))

    def step(branch: Branch) -> Branch:
        if not branch.paths and branch.norm is not None and gain.shape[0] == 1:
            scaled = branch.norm._replace(scale=branch.norm.scale * gain)
            return dataclasses.replace(branch, norm=scaled, entered=after)
        paths = branch.paths or (unit,)
        return dataclasses.replace(
            branch, paths=tuple(p.scaled(gain, before, after) for p in paths)
        )

    new = Branch(mean, mean, before, None, (unit.scaled(gain, before, after),))
    return _begun(branches, step, new)


def _begun(
    branches: tuple[Branch, ...], step: Callable[[Branch], Branch], new: Branch
) -> tuple[Branch, ...]:
    """Extend every branch by `step`, and add a new one unless its start is in a branch already."""
    known = tuple(step(branch) for branch in branches if branch.attention is None)
    if any(branch.inner is new.mean for branch in known):
        return known
    return (*known, new)[-_LONGEST:]


def _joined(arrays: list[Array], axis: int) -> Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis)
