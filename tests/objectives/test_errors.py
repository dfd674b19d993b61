"""Each error states the rule, the value and the fix; labels out of range are NaN in compiled code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moment_jax as mj
from moment_jax import objectives as o
from moment_jax.objectives import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian

ell = o.expected_log_likelihood
ONES, INTS = np.ones(3), np.ones(3, int)
INTEGERS = r"int64. Use .astype\(jnp.float32\)"
PAIRS = r"\(3,\) or \(3, 3\)"
# Each case: a function and its arguments, in which a tuple stands for ones of this shape, and words.
BAD_VALUES = [
    (ell, Gaussian(1.0), (2,), (3,), (3,), "target.shape == mean.shape"),
    (ell, Gaussian(1.0), (5, 3, 2), (5, 3, 2), (5, 3, 2), "jax.vmap"),
    (ell, Gaussian(1.0), (3,), (3,), (3, 2), PAIRS),
    (ell, Gaussian(np.ones(2)), (3,), (3,), (3,), "scalar"),
    (ell, Gaussian(-1.0), (2,), (2,), (2,), "not negative. Got -1"),
    (ell, HeteroscedasticGaussian(), (2,), (2,), (2,), "2 D outputs"),
    (ell, Categorical(), 0, (5, 3), (5, 3), "jax.vmap"),
    (ell, Categorical(), (3,), (3,), (3,), "one-hot"),
    (ell, Categorical(num_points=0), 0, (3,), (3,), "num_points >= 1"),
    (ell, Bernoulli(), (2,), (2, 2), (2, 2), "target"),
    (ell, Bernoulli(), 2 * ONES, ONES, ONES, "from 0 to 1. Got 2.0 to 2.0"),
    (ell, Categorical(), (), (3,), (3,), "integer class"),
    (o.class_probabilities, (3,), (2, 2), PAIRS),
    (o.class_probabilities, (2, 3), (3,), r"\(2, 3\) or \(2, 3, 3\)"),
    (lambda: HeteroscedasticGaussian()(mj.Moments(ONES, mj.Diagonal(ONES[None]))), "2 D outputs"),
    (o.kl_warmup, 0, 10, -1.0, "final >= 0. Got 10, -1"),
    (o.kl_warmup, 0, -1, "num_steps >= 0"),
    (o.elbo, np.zeros(0), 0.0, r"of shape \(N,\)"),
    (lambda: o.elbo(ONES, 0.0, dataset_size=2), "the 3 examples of the mini-batch. Got 2"),
    (o.elbo, ONES, (5,), r"kl and kl_weight as scalars. Got \(5,\) and \(\)"),
    (lambda: o.elbo(ONES, 1.0, dataset_size=3, kl_weight=-1.0), "kl_weight >= 0. Got -1"),
]
BAD_TYPES = [
    (ell, Gaussian(1.0), (3,), (3,), 1.0, "Got float"),
    (ell, "gaussian", (3,), (3,), (3,), "Got str"),
    (ell, Gaussian(1.0), (3,), ONES, INTS, INTEGERS),
    (ell, Categorical(), 0, INTS, ONES, INTEGERS),
    (ell, Bernoulli(), (3,), [1.0, 1.0, 1.0], ONES, "Got list. Use jnp.asarray"),
    (o.class_probabilities, ONES, mj.Diagonal.zeros((1, 3)), "Got Diagonal. Take moments.var"),
    (o.elbo, INTS, 1.7, INTEGERS),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "case"),
    [*((ValueError, case) for case in BAD_VALUES), *((TypeError, case) for case in BAD_TYPES)],
)
def test_bad_input(error, case):
    call, *args, match = case
    with pytest.raises(error, match=match):
        call(*(np.ones(x) if isinstance(x, tuple) else x for x in args),
             **({"dataset_size": 20} if call is o.elbo else {}))  # fmt: skip


def test_a_label_out_of_range():
    """An error if it is known; NaN in compiled code, for the default with a gradient of NaN."""
    mean, cov = np.arange(4.0), np.ones(4)

    def predicted(mean):
        return Categorical()(mj.Moments(mean, mj.Diagonal(cov[None])))

    scores = (
        lambda label, mean: ell(Categorical(), label, mean, cov),
        lambda label, mean: predicted(mean).log_prob(label),
    )
    for score in scores:
        for known in (4, np.asarray(-1), jnp.asarray(4)):
            with pytest.raises(ValueError, match=f"classes from 0 to 3. Got {known}"):
                jax.eval_shape(lambda m, score=score, known=known: score(known, m), mean)

    @jax.jit
    @jax.vmap
    def compiled(label):
        return jax.grad(scores[0], 1)(label, mean), *(score(label, mean) for score in scores)

    slopes, *values = compiled(np.array([0, 4, -1]))
    for missing in (np.isnan(slopes).all(axis=1), *map(np.isnan, values)):
        assert list(missing) == [False, True, True]
