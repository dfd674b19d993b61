"""A pass beside its network, and beside sampled networks; or refused, with a way out."""

from typing import NamedTuple

import jax
import numpy as np
import pytest

import moment_jax as mj
from moment_jax.posterior import Posterior


class Figures(NamedTuple):
    off: float  # the pass with next to no noise beside the network: largest, over the mean size
    ratio: float  # of the sds, mean over the outputs
    error: float  # mean |ratio - 1|
    shift: float  # |mean - sampled mean|, in sampled sds


def beside_sampled(model, network, inputs, draws: int, output=lambda out: out) -> Figures:
    """Figures of the model's pass; `network` is its linen module, bound.

    The weights are drawn here, from the means and variances of the beliefs, which is a check of
    `model.sample` too, and needs no program.
    """
    module, random = network.unbind()[0], np.random.default_rng(7)

    def values(belief):
        """The means, then draws."""
        z = random.standard_normal((1 + draws, *belief.mean.shape), np.float32)
        z[0] = 0
        return np.asarray(belief.mean) + np.sqrt(np.asarray(belief.variance)) * z

    weights = jax.tree.map(values, model.beliefs, is_leaf=lambda x: isinstance(x, Posterior))
    run = jax.jit(jax.vmap(lambda weights: output(module.apply(weights, *inputs))))
    y, *outputs = np.asarray(run(weights), float)
    mean, sd = np.mean(outputs, axis=0), np.std(outputs, axis=0)
    quiet, noisy = model.scaled(1e-5)(*inputs), model(*inputs)
    off = np.abs(np.asarray(quiet.mean) - y).max() / np.abs(y).mean()
    ratio, shift = np.asarray(noisy.sd) / sd, np.abs(np.asarray(noisy.mean) - mean) / sd
    figures = off, ratio.mean(), np.abs(ratio - 1).mean(), shift.mean()
    return Figures(*map(float, figures))


def assert_refused(model, inputs, words: str) -> None:
    """The message has these words, and the way out that it names runs."""
    with pytest.raises(mj.PropagationError, match=words) as stop:
        model.explain(*inputs)
    assert "mj.Bayesian(network, linearised=True)" in str(stop.value)
    moments = model.replace(linearised=True)(*inputs)
    assert np.isfinite(np.asarray(moments.mean)).all()
    assert (np.isfinite(np.asarray(moments.sd)) & (np.asarray(moments.sd) > 0)).all()
