"""Masked heads are heads of zeros, and importance is what the ELBO itself says."""

from __future__ import annotations

import copy
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from tests.builders import assert_close, tiny_vision

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("orbax.checkpoint")

from experiments.brownian.heads import head_curve, head_importance, head_predictions, mask_heads

IMAGES = jax.random.normal(jax.random.key(1), (3, 4, 4))
LABELS = jnp.array([0, 2, 1])


@pytest.fixture(scope="module")
def model():
    own = {"dtype": jnp.float64, "relative_scale": 0.4, "structure": mj.Diagonal}
    return tiny_vision(num_blocks=2, **own)


@nnx.jit
def moments(model, images):
    return model(images)


def without_head(model, block, columns):
    """The model with certain zeros in these columns of the queries, keys and values of a block."""
    copied = copy.deepcopy(model)
    attention = copied.encoder.blocks[block].attention
    for dense in (attention.query, attention.key, attention.value):
        for belief in (dense.kernel, dense.bias):
            belief.mean.set_value(belief.mean[...].at[..., columns].set(0))
            raw = belief.raw["scale"]
            raw.set_value(raw[...].at[..., columns].set(-60.0))
    return copied


@pytest.mark.slow
def test_importance_is_the_change_of_the_elbo(model):
    found = head_importance(model, IMAGES, LABELS, dataset_size=6, kl_weight=0.3)
    fit = partial(mj.objectives.expected_log_likelihood, mj.objectives.Categorical())

    def data_term(model):
        return 2 * jnp.sum(jax.vmap(fit)(LABELS, *moments(model, IMAGES)))

    width = model.encoder.blocks[1].attention.query.kernel.mean.shape[1] // 2
    change = data_term(without_head(model, 1, slice(0, width))) - data_term(model)
    assert_close(found.fit_change[1][0], change)
    assert_close(found.elbo_change[1][0], change + 0.3 * found.kl_saved[1][0])
    attention = model.encoder.blocks[1].attention
    parts = [attention.out.kernel, *(b for d in (attention.query, attention.key, attention.value)
                                     for b in (d.kernel, d.bias))]  # fmt: skip
    whole = sum(belief.posterior.kl(belief.prior) for belief in parts)
    assert_close(found.kl_saved[1].sum(), whole)


@pytest.mark.slow
def test_curve_removes_the_least_worthy_first(model):
    curve = head_curve(model, IMAGES, LABELS, [np.array([2.0, 1.0]), np.array([4.0, 3.0])])
    assert curve.order == [(0, 1), (0, 0), (1, 1), (1, 0)]
    assert curve.kept.tolist() == [4, 3, 2, 1, 0]
    p = jax.vmap(mj.objectives.class_probabilities)(*moments(model, IMAGES))
    assert_close(curve.nll[0], mj.objectives.negative_log_likelihood(p, LABELS))
    assert np.isfinite(curve.nll).all()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: mask_heads(m.encoder.blocks[0].params.attention, jnp.ones(3)),
         ValueError, "divisor of 4"),
        (lambda m: head_predictions(m.encoder, IMAGES, np.ones((1, 4))), TypeError, "logits"),
        (lambda m: head_predictions(m, IMAGES, np.ones((2, 2))), ValueError, r"\(M, 4\)"),
        (lambda m: head_importance(m, IMAGES, LABELS, dataset_size=2), ValueError, "N=3"),
    ],
)  # fmt: skip
def test_bad_input(call, error, words, model):
    with pytest.raises(error, match=words):
        call(model)
