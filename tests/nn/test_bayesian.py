"""`mj.Bayesian`: one door for every network, beliefs under its own paths, moments in its own shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx

import moment_jax as mj
from tests.builders import ALL_STRUCTURES, KERNEL_FAMILIES, assert_close

pytestmark = pytest.mark.usefixtures("ranks_of_a_user")

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (5, 3))
TOKENS = jax.random.normal(KEY, (2, 4, 6))
HEAD = nnx.PathContains("head")


class Net(nnx.Module):
    """A hidden layer and a head."""

    def __init__(self, rngs: nnx.Rngs, outputs: int = 2) -> None:
        self.hidden, self.head = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, outputs, rngs=rngs)

    def __call__(self, x, shift=0.0):
        return self.head(nnx.tanh(self.hidden(x))) + shift


def net(outputs: int = 2) -> Net:
    return Net(nnx.Rngs(0), outputs)


def moments_of(model, *inputs, **options):
    return nnx.jit(lambda model, *inputs: model(*inputs, **options))(model, *inputs)


def assert_same(a, b, tolerance=1e-12):
    jax.tree.map(lambda x, y: assert_close(x, y, tolerance), a, b)


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
def test_moments_have_the_networks_shapes(structure):
    for network, x in ((net(), X), (nnx.Linear(6, 3, rngs=nnx.Rngs(0)), TOKENS)):
        model = mj.Bayesian(network, structure=structure)
        shape = network(x).shape

        @nnx.jit
        def found(model, x):
            moments = model(x)
            return moments.mean, moments.sd, moments.variance, moments.features

        *each, variance, features = found(model, x)
        assert all(part.shape == shape for part in (*each, variance))
        assert features.shape == (*shape, shape[-1])
        assert_close(np.einsum("...cc->...c", features), variance, 1e-6)


@pytest.mark.parametrize("family", KERNEL_FAMILIES[1:])
def test_beliefs_are_exchanged_scaled_and_saved(family, tmp_path):
    attention = nnx.MultiHeadAttention(2, 6, decode=False, rngs=nnx.Rngs(0))
    model = mj.Bayesian(attention, family=family, prior_scale=0.5)
    again = mj.Bayesian(attention, beliefs=model.beliefs, prior_scale=0.5)

    @nnx.jit
    def parts(model):
        both = (m.beliefs["query"]["kernel"] for m in (model, model.scaled(3.0)))
        return model.kl(), [belief.marginal_variance() for belief in both]

    (kl, (known, wider)), (same_kl, _) = parts(model), parts(again)
    assert_close(same_kl, kl, 1e-6)
    assert known.shape == (6, 2, 3)
    assert_close(wider, 9 * known, 1e-6)
    size = np.sqrt(np.mean(np.square(attention.query.kernel[...])))
    assert_close(np.sqrt(np.mean(known)), 0.1 * size, 1e-6)
    graph, state = nnx.split(model)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as saver:
        restored = nnx.merge(graph, saver.restore(tmp_path / "state", nnx.split(model)[1]))
    assert_same(restored.beliefs, model.beliefs)


def test_variables_stand_under_the_networks_paths():
    model = mj.Bayesian(net(), mj.Gaussian(), random=HEAD, learn_prior=True)
    names = {"/".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(model))}
    kinds = {
        "weights/hidden/kernel": nnx.Param,
        "weights/head/kernel/mean": mj.nn.VariationalMean,
        "weights/head/kernel/raw/scale": mj.nn.VariationalScale,
        "weights/head/kernel/prior_log_scale": mj.nn.PriorScale,
    }
    assert all(type(names[name]) is kind for name, kind in kinds.items())
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=mj.nn.VariationalScale)
    of_scales = nnx.DiffState(0, mj.nn.VariationalScale)
    before = model.beliefs

    @nnx.jit
    def gradient(model):
        loss = lambda m: -m.elbo(X, jnp.ones((5, 2)), dataset_size=5)  # noqa: E731
        return nnx.grad(loss, argnums=of_scales)(model)

    optimizer.update(model, gradient(model))
    assert_same(model.at_means()(X), net()(X))
    assert (model.beliefs["head"]["bias"].variance != before["head"]["bias"].variance).all()


def test_partly_random_networks_keep_the_rest_plain():
    whole, part = mj.Bayesian(net(), structure=mj.Full), mj.Bayesian(net(), random=HEAD)
    hidden = nnx.tanh(net().hidden(X))
    belief = part.beliefs["head"]
    assert_close(moments_of(part, X).mean, net()(X))
    variance = hidden**2 @ belief["kernel"].variance + belief["bias"].variance
    assert_close(moments_of(part, X).variance, variance, 1e-6)
    assert (moments_of(whole, X).variance > moments_of(part, X).variance).all()
    gradients = nnx.jit(nnx.grad(lambda m: jnp.sum(m(X).variance)))(part)
    assert jnp.any(gradients["weights"]["hidden"]["kernel"][...] != 0)


def test_batches_loops_and_compiled_calls_agree():
    model = mj.Bayesian(net(), mj.Categorical())
    whole = moments_of(model, X)
    linear = mj.Bayesian(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), structure=mj.Diagonal)
    assert_same(linear(X), moments_of(linear, X), 1e-6)  # operation by operation, and compiled
    assert_close(moments_of(model, X[1:2]).sd, whole.sd[1:2], 1e-6)
    prediction = model.predict(X)
    assert_same(model.predict(X, batch_size=2), prediction, 1e-6)
    assert_close(np.sum(prediction.probs, axis=-1), np.ones(5), 1e-6)
    parts = map(np.asarray, (prediction.entropy, prediction.aleatoric, prediction.epistemic))
    entropy, aleatoric, epistemic = parts
    assert_close(entropy, aleatoric + epistemic, 1e-6)
    labels = np.arange(5) % 2
    expected = np.log(np.asarray(prediction.probs)[np.arange(5), labels])
    assert_close(model.log_prob(X, labels), expected, 1e-6)
    bound = nnx.jit(lambda model: model.elbo(X, labels, dataset_size=5, kl_weight=0.0))
    assert bound(model) < expected.mean()  # Jensen
    shifted = model.predict(X, shift=np.array([100.0, 0.0]))  # options are shared
    assert_close(np.asarray(shifted.probs)[:, 0], np.ones(5), 1e-6)


def test_real_targets_have_noise_that_is_known_or_learned():
    y = jnp.ones((5, 2))

    @nnx.jit
    def parts(model):
        known = model.predict(X)
        draws = known.interval(0.9), known.log_prob(y)
        return known.sd, model(X).sd, *draws

    known = mj.Bayesian(net(), mj.Gaussian(0.25), structure=mj.Diagonal)
    sd, of_mean, (low, high), log_prob = parts(known)
    assert_close(sd, np.sqrt(np.square(of_mean) + 0.25), 1e-6)
    assert_close(np.subtract(high, low), 2 * 1.6448536 * np.asarray(sd), 1e-5)
    assert log_prob.shape == (5,)
    learned = mj.Bayesian(net(), mj.Gaussian(), structure=mj.Diagonal)
    gradient = nnx.jit(nnx.grad(lambda m: m.elbo(X, y, dataset_size=5)))(learned)
    assert gradient["noise"][...] != 0
    assert learned.likelihood.noise_variance == 1


def test_networks_of_linen_and_sampled_networks_keep_their_class():
    module = linen.Dense(2)
    bound = module.bind(module.init(KEY, X))
    model = mj.Bayesian(bound, structure=mj.Full)
    assert isinstance(model.at_means(), linen.Dense)
    assert_close(model.at_means()(X), bound(X))
    belief = model.beliefs["params"]
    variance = X**2 @ belief["kernel"].variance + belief["bias"].variance
    assert_close(moments_of(model, X).variance, variance, 1e-6)
    ours = mj.Bayesian(net())
    assert type(ours.sample(KEY)) is Net
    assert (ours.sample(KEY).head.kernel[...] != net().head.kernel[...]).all()


def test_a_random_input_carries_its_covariance_through():
    first, second = (
        mj.Bayesian(nnx.Linear(3, 3, rngs=nnx.Rngs(i)), structure=mj.Full) for i in (0, 1)
    )
    both = nnx.Sequential(first.at_means(), second.at_means())
    beliefs = {"layers": {0: first.beliefs, 1: second.beliefs}}
    whole = moments_of(mj.Bayesian(both, beliefs=beliefs, structure=mj.Full), X)
    assert_same(nnx.jit(lambda a, b, x: b(a(x)))(first, second, X), whole, 1e-6)


def test_a_model_is_checked_and_explained():
    model = mj.Bayesian(net(), structure=mj.Full)
    found = model.check(X, samples=200)
    assert abs(found.sd_ratio - 1) < 0.1
    assert found.mean_error < 0.3
    table = str(model.explain(X)).splitlines()
    assert len(table) == len(model.explain(X)) + 2
    assert "is the network" in table[-1]
    assert "test_bayesian.py" in table[1]
    copy = model.replace(structure=mj.Diagonal)
    copy.owned["hidden", "bias"].mean.set_value(jnp.ones(8))
    assert (model.beliefs["hidden"]["bias"].mean == 1).all()  # the same variables


def test_a_factor_for_each_feature_corrects_the_spread_of_a_mean_over_tokens():
    """Of eight alike tokens, which share weights, `Diagonal` has an eighth of their mean's variance."""
    layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    x = jnp.ones((3, 8, 3)) * jnp.arange(1.0, 4.0)[:, None, None]
    network = nnx.Sequential(  # two means over tokens, two features of one token
        layer, lambda x: jnp.concatenate([x.mean(axis=1)[:, :2], x[:, 0, 2:]], axis=1)
    )
    model = mj.Bayesian(network, structure=mj.Diagonal)
    right = model.corrected(x, samples=200)
    assert_close(right.spread[...], jnp.sqrt(jnp.array([8.0, 8, 1, 1])), 0.2)
    before, after = moments_of(model, x), moments_of(right, x)
    assert_close(after.sd, right.spread[...] * before.sd, 1e-6)
    assert_same(after.mean, before.mean)
    assert model.spread.get_value() is None
    assert_close(right.corrected(x, samples=200).spread[...], right.spread[...], 1e-5)


def test_a_correction_is_forgotten_or_refused_with_other_beliefs():
    x, path = jnp.ones((2, 3)), ("kernel",)
    model = mj.Bayesian(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), structure=mj.Diagonal)
    right = model.corrected(x)
    for other in (right.replace(structure=mj.Full), right.scaled(0.5)):
        assert other.spread.get_value() is None
        assert other.owned[path].mean is not right.owned[path].mean  # not trained under the factors
    known = jax.grad(lambda x: (right.spread[...] * model(x).sd).sum())(x)
    assert_close(jax.grad(lambda x: right(x).sd.sum())(x), known, 1e-6)
    with pytest.raises(ValueError, match="factors that hold for its present beliefs"):
        nnx.jit(nnx.grad(lambda m: m(x).sd.sum()))(right)
    nnx.update(model, nnx.state(right))
    assert_same(model(x).sd, right(x).sd)


def test_outputs_of_one_number_are_corrected_by_one_factor():
    network = nnx.Sequential(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), lambda x: x[..., 0].mean(axis=1))
    model = mj.Bayesian(network, structure=mj.Diagonal).corrected(jnp.ones((3, 8, 3)), samples=200)
    assert_close(model.spread[...], jnp.sqrt(jnp.array([8.0])), 0.2)
    assert model(jnp.ones((5, 8, 3))).sd.shape == (5,)


def test_nan_is_told_by_a_check():
    network = nnx.Sequential(nnx.Embed(5, 3, rngs=nnx.Rngs(0)), lambda x: x.mean(axis=1))
    model = mj.Bayesian(network, structure=mj.Diagonal)
    assert np.isnan(model.check(jnp.array([[0, 1], [2, 9]]), samples=10).sd_ratio)


class Reports(nnx.Module):
    """A layer with statistics."""

    def __init__(self) -> None:
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x)


VIT = mj.nn.VisionTransformer(image_size=8, patch_size=4, num_classes=2, rngs=nnx.Rngs(0))
DROPS = linen.Sequential([linen.Dense(2), linen.Dropout(0.5, deterministic=False)]).bind(
    {"params": {"layers_0": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}}}
)

WRONG = [
    (lambda: mj.Bayesian(nnx.Dropout(0.1)), ValueError, "network with parameters"),
    (lambda: mj.Bayesian(jnp.tanh), TypeError, "mj.propagate"),
    (lambda: mj.Bayesian(net()).corrected(X, samples=1), ValueError, "samples >= 2"),
    (lambda: mj.Bayesian(net()).check((X, mj.Separable.zeros((1, 3)))), ValueError, "certain inputs"),
    (lambda: mj.Bayesian(net())(X[:0]), ValueError, "an example or more, .*Got"),
    (lambda: mj.Bayesian(net(), mj.Categorical()).predict(X, batch_size=0.5), ValueError, "integer"),
    (lambda: mj.Bayesian(mj.Bayesian(net())), TypeError, "at_means"),
    (lambda: mj.Bayesian(linen.Dense(2)), TypeError, "module.bind"),
    (lambda: mj.Bayesian(net(), random=nnx.PathContains("body")), ValueError, "hidden/kernel.*head"),
    (lambda: mj.Bayesian(net(), beliefs={"hidden": {"weight": X}}), ValueError, "hidden/weight"),
    (lambda: mj.Bayesian(net(), beliefs={"head": {"bias": mj.posterior.Factorized(X, X**2)}}),
     ValueError, r"head/bias \(2,\).*\(5, 3\)"),
    (lambda: mj.Bayesian(net(), beliefs={}), ValueError, "one array at least"),
    (lambda: mj.Bayesian(net(), family=mj.posterior.Posterior), TypeError, "posterior family"),
    (lambda: mj.Bayesian(net(), relative_scale=0), ValueError, "relative_scale > 0"),
    (lambda: mj.Bayesian(net(), structure="Full"), TypeError, "mj.Separable"),
    (lambda: mj.Bayesian(net())(), ValueError, "the inputs of its network. Got none"),
    (lambda: mj.Bayesian(net(), landmarks=0), ValueError, "landmarks=T"),
    (lambda: jax.eval_shape(mj.Bayesian(net(), landmarks=9), X), ValueError, "at most.* 1. Got 9"),
    (lambda: mj.Bayesian(net(), mj.Categorical), TypeError, r"Categorical\(\)"),
    (lambda: mj.Bayesian(net()).predict(X), ValueError, "likelihood"),
    (lambda: mj.Bayesian(mj.Categorical(), net()), TypeError, "Got Net. Give an object, after"),
    (lambda: mj.Bayesian(Net), TypeError, "the class Net"),
    (lambda: mj.Bayesian(net(), beliefs={"neck": {}}), ValueError, "the key 'neck'.*Factorized"),
    (lambda: mj.Bayesian(net()).sample(0), TypeError, r"jax\.random\.key\(0\)"),
    (lambda: mj.Bayesian(net()).scaled(-1.0), ValueError, "not negative"),
    (lambda: mj.Bayesian(net())(X[:, :2]), ValueError, r"its network takes.*\(5, 2\).*raised"),
    (lambda: mj.Bayesian(net()).explain(X.tolist()), TypeError, r"Got list. Use np\.asarray"),
    (lambda: mj.Bayesian(VIT)(np.ones((2, 28, 28))), ValueError, "images of 8 x 8 pixels"),
    (lambda: mj.Bayesian(DROPS)(X), ValueError, r"draws random numbers. Call network\.eval"),
    (lambda: mj.nn.Mixture(mj.Bayesian(net())), TypeError, "list of mj.Bayesian. Got Bayesian"),
    (lambda: mj.Bayesian(net())(X[0, 0]), ValueError, "with a batch axis"),
    (lambda: mj.Bayesian(net(), mj.Categorical()).predict("a"), TypeError, "arrays. Got str"),
    (lambda: mj.Bayesian(net())(X, shift=jnp.ones((5, 1))), ValueError, "shift.*by position"),
    (lambda: mj.Bayesian(net()).replace(family=None), TypeError, "landmarks, linearised"),
    (lambda: mj.Bayesian(Reports())(X.astype(jnp.float32)), ValueError, r"network.eval\(\)"),
    (lambda: mj.Bayesian(net(), mj.Categorical()).elbo(X, jnp.full(5, 2), dataset_size=5),
     ValueError, "from 0 to 1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), WRONG, ids=range(len(WRONG)))
def test_bad_input_is_told_the_rule_and_the_mend(call, kind, message):
    with pytest.raises(kind, match=message):
        call()
