"""Priors of any form are one value, means and variances; copies with other beliefs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from moment_jax.posterior import Factorized, GaussianPrior, KroneckerEigen
from tests.builders import KERNEL_FAMILIES, assert_close

pytestmark = pytest.mark.usefixtures("ranks_of_a_user")

NET = nnx.Sequential(
    nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(4, 2, rngs=nnx.Rngs(1))
)
WEIGHTS = nnx.to_pure_dict(nnx.state(NET, nnx.Param))
OTHER = mj.Bayesian(NET, relative_scale=0.7)
HEAD = nnx.PathContains(2)
X, Y = np.linspace(-1, 1, 15).reshape(5, 3), np.arange(5) % 2


def relative(w):
    return 0.5 * max(np.sqrt(np.mean(np.square(w))), 0.1)


def gaussian(w):
    return GaussianPrior(2 * w, 1 + w**2)


FORMS = [  # what is given, and the prior of an array
    ({}, lambda w: GaussianPrior(0.0, 1.0)),
    ({"prior_scale": 0.5}, lambda w: GaussianPrior(0.0, 0.25)),
    ({"prior": "network", "prior_scale": 0.5}, lambda w: GaussianPrior(w, relative(w) ** 2)),
    ({"prior": jax.tree.map(gaussian, WEIGHTS)}, gaussian),
    ({"prior": jax.tree.map(lambda w: Factorized(w, 1 + w**2), WEIGHTS)},
     lambda w: GaussianPrior(w, 1 + w**2)),
]  # fmt: skip


@pytest.mark.parametrize("family", KERNEL_FAMILIES[1:])
def test_every_form_of_a_prior_is_its_means_and_variances(family):
    def parts(tree):
        return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, mj.posterior.Posterior))

    for options, of_array in FORMS:
        model = mj.Bayesian(NET, family=family, **options)
        pairs = zip(parts(model.beliefs), parts(WEIGHTS), strict=True)
        assert_close(model.kl(), sum(x.kl(of_array(np.asarray(w))) for x, w in pairs), 1e-5)
    own = mj.Bayesian(NET, family=family, prior=OTHER)
    assert_close(own.kl(), mj.Bayesian(NET, family=family, prior=OTHER.as_prior()).kl(), 1e-6)


def test_a_posterior_is_its_own_prior_and_what_a_tree_omits_has_the_scalar_one():
    assert abs(mj.Bayesian(NET, beliefs=OTHER.beliefs, prior=OTHER).kl()) < 1e-4
    wide = mj.Bayesian(NET, beliefs=OTHER.beliefs, prior=OTHER.as_prior(4.0))
    assert_close(wide.kl(), 26 * 0.5 * (0.25 - 1 + np.log(4)), 1e-4)
    head = {"layers": {2: OTHER.as_prior()["layers"][2]}}
    part = mj.Bayesian(NET, prior=head, prior_scale=0.3, random=nnx.PathContains("bias"))
    priors = {path: belief.prior for path, belief in part.owned.items()}
    assert_close(priors["layers", 0, "bias"].variance, 0.09, 1e-6)
    assert_close(priors["layers", 2, "bias"].mean, WEIGHTS["layers"][2]["bias"])


def test_a_learned_factor_is_the_best_one():
    model = mj.Bayesian(NET, prior=jax.tree.map(gaussian, WEIGHTS), learn_prior=True)
    first = model.kl()
    for belief in model.owned.values():
        belief.fit_prior()
    slopes = nnx.grad(lambda m: m.kl(), argnums=nnx.DiffState(0, mj.nn.PriorScale))(model)
    assert model.kl() < first
    assert max(abs(x) for x in jax.tree.leaves(slopes)) < 1e-4
    assert "its scale learned" in repr(model.owned["layers", 0, "kernel"])


def test_a_copy_has_other_means_standard_deviations_and_priors():
    model = mj.Bayesian(NET, family=KroneckerEigen, learn_prior=True)
    kernel, bias = ("layers", 2, "kernel"), ("layers", 2, "bias")
    wide = model.with_beliefs(HEAD, sds=0.3, relative=True, prior="network", prior_scale=2.0)
    size = relative(WEIGHTS["layers"][2]["kernel"]) / 0.5
    assert_close(wide.owned[kernel].posterior.variance, np.full((4, 2), (0.3 * size) ** 2), 1e-6)
    assert_close(wide.owned[kernel].prior.variance, (2 * size) ** 2, 1e-6)
    assert wide.owned["layers", 0, "kernel"].family is KroneckerEigen
    assert wide.owned[kernel].prior_log_scale is not None
    doubled = jax.tree.map(lambda w: 2 * w, WEIGHTS)
    moved = wide.with_beliefs(means=doubled, sds={"layers": {2: {"bias": jnp.array([0.1, 0.2])}}})
    jax.tree.map(assert_close, moved.at_means()(X), model.with_beliefs(means=doubled).at_means()(X))
    assert_close(moved.owned[bias].posterior.variance, [0.01, 0.04], 1e-6)
    assert_close(moved.owned[kernel].prior.mean, WEIGHTS["layers"][2]["kernel"])
    named = moved.with_beliefs(prior={"layers": {2: {"bias": GaussianPrior(5.0)}}})
    assert_close(named.owned[bias].prior.mean, 5.0)
    assert_close(named.owned[kernel].prior.variance, (2 * size) ** 2, 1e-6)
    assert_close(model.at_means()(X), NET(X))
    part = mj.Bayesian(NET, random=HEAD).with_beliefs(means=doubled)  # certain weights too
    assert_close(part.at_means()(X), moved.at_means()(X))


def test_copies_and_merged_models_work_in_differentiated_code():
    """And the size of the data and the weight of the KL may be traced."""
    model = mj.Bayesian(NET, mj.Categorical(), structure=mj.Diagonal)
    graph, state = nnx.split(model)

    def loss(model, size=7, weight=0.5):
        return -model.elbo(X, Y, dataset_size=size, kl_weight=weight)

    @jax.jit
    def gradients(state, means, size, weight):
        of_state = jax.grad(lambda state: loss(nnx.merge(graph, state), size, weight))(state)
        copy = lambda means: nnx.merge(graph, state).with_beliefs(means=means, sds=0.1)  # noqa: E731
        return of_state, jax.grad(lambda means: loss(copy(means)))(means)

    of_state, of_means = gradients(state, WEIGHTS, 7, 0.5)
    gradient = nnx.jit(nnx.grad(loss))
    known = gradient(model)
    assert_close(of_state["weights"]["layers"][0]["kernel"]["mean"][...],
                 known["weights"]["layers"][0]["kernel"]["mean"][...], 1e-6)  # fmt: skip
    known = gradient(model.with_beliefs(sds=0.1))
    assert_close(of_means["layers"][0]["kernel"],
                 known["weights"]["layers"][0]["kernel"]["mean"][...], 1e-6)  # fmt: skip


ONE = {"layers": {0: {"kernel": GaussianPrior(jnp.zeros((5, 4)))}}}
ZERO = {"layers": {0: {"bias": GaussianPrior(0.0, jnp.array([1.0, 0, 1, 1]))}}}
ARRAY = {"layers": {0: {"bias": jnp.ones(4)}}}
SMALL = mj.Bayesian(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
WRONG = [
    (lambda: mj.Bayesian(NET, prior=0.3), TypeError, r"tree of Gauss.*Got 0\.3.*prior_scale=s"),
    (lambda: mj.Bayesian(NET, prior="weights"), TypeError, "prior=\"network\".*Got 'weights'"),
    (lambda: mj.Bayesian(NET, prior_scale=0), ValueError, "prior_scale > 0. Got 0"),
    (lambda: mj.Bayesian(NET, prior=SMALL), ValueError, "priors in the places.*layers/0/bias.*'bias'"),
    (lambda: mj.Bayesian(NET, prior=ONE), ValueError, r"\(3, 4\).*Got .*\(5, 4\).*layers/0/kernel"),
    (lambda: mj.Bayesian(NET, prior=ZERO), ValueError, "variances. Got 0.0 at 'layers/0/bias'"),
    (lambda: mj.Bayesian(NET, prior=ARRAY), ValueError, "Got ArrayImpl.*Put a GaussianPrior"),
    (lambda: OTHER.as_prior(0.0), ValueError, "positive factor"),
    (lambda: OTHER.with_beliefs(sds=0.0), ValueError, "positive standard deviations. Got 0.0"),
    (lambda: OTHER.with_beliefs(nnx.PathContains("neck"), sds=1), ValueError, "Got none of layers/0"),
    (lambda: OTHER.with_beliefs(HEAD, sds=ARRAY), ValueError, "deviations in the places.*layers/0"),
    (lambda: OTHER.with_beliefs(means=ONE), ValueError, "means in the places.*layers/0/kernel"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), WRONG)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()
