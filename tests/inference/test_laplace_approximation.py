"""Laplace approximations: the exact Gauss-Newton blocks of any layer, or an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import moment_jax as mj
from moment_jax.inference import laplace
from moment_jax.objectives import Bernoulli, Categorical, Gaussian
from moment_jax.posterior import FullNormal

X = jax.random.normal(jax.random.key(0), (24, 3))
ZEROS = X, jnp.zeros((24, 1))
WIDE = {"param_dtype": jnp.float64, "dtype": jnp.float64}

pytestmark = pytest.mark.usefixtures("ranks_of_a_user")


def linear(outputs=1, **options):
    return nnx.Linear(3, outputs, rngs=nnx.Rngs(1), **options)


def evaluated(make, **options):
    """The model in inference mode."""
    model = make(nnx.Rngs(0), **options)
    model.eval()
    return model


class Of(nnx.Module):
    """A model of layers and a function of them."""

    def __init__(self, fn, **layers):
        self.fn = fn
        for name, layer in layers.items():
            setattr(self, name, layer)

    def __call__(self, x):
        return self.fn(self, x)


def dense(rows, columns):
    return nnx.Linear(rows, columns, rngs=nnx.Rngs(0), **WIDE)


def perceptron(rngs):
    sizes = (3, 32), (32, 32), (32, 2)
    first, second, head = (nnx.Linear(*size, rngs=rngs) for size in sizes)
    return nnx.Sequential(first, nnx.relu, nnx.Dropout(0.1, rngs=rngs), second, nnx.silu, head)


def tokens(x, count):
    return x[:, None] * jnp.arange(1.0, count + 1)[:, None]


def scanned(net, x):
    fn = nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return net.last(net.norm(fn(x, net.layers)))


def attending(net, tokens):
    x = net.table(tokens) + net.start[...]
    return net.table.attend(x + net.attention(x))


class Bridged(linen.Module):
    train: bool = False

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4, param_dtype=jnp.float64)(x)
        x = linen.Dropout(0.5, deterministic=not self.train)(x)
        return linen.Dense(2, param_dtype=jnp.float64)(jnp.tanh(x))


def bridged(train=False):
    rngs = nnx.Rngs(0, dropout=1)
    return nnx.bridge.ToNNX(Bridged(train), rngs=rngs).lazy_init(jnp.ones((1, 3), jnp.float64))


MODELS = {
    "repeated": lambda r: Of(lambda n, x: n.a(jnp.tanh(0.05 * n.a(x))), a=dense(3, 3)),
    "pooled": lambda r: Of(lambda n, x: n.a(tokens(x, 6)).mean(1), a=dense(3, 2)),
    "tokens": lambda r: Of(lambda n, x: n.a(tokens(x, 4)), a=dense(3, 2)),
    "circular": lambda r: Of(
        lambda n, x: n.a(jnp.tanh(x[:, :, None] * x[:, None]))[:, :2].mean(2),
        a=nnx.Conv(3, 3, 3, padding="CIRCULAR", rngs=r, **WIDE),
    ),
    "scanned": lambda r: Of(
        scanned,
        layers=nnx.split_rngs(splits=2)(nnx.vmap(lambda r: nnx.Linear(3, 3, rngs=r, **WIDE)))(r),
        norm=nnx.LayerNorm(3, rngs=r, **WIDE),
        last=dense(3, 2),
    ),
    "recurrent": lambda r: Of(
        lambda n, x: n.a(tokens(x, 4))[:, -1],
        a=nnx.RNN(nnx.GRUCell(3, 3, rngs=r, **WIDE), rngs=r),
    ),
    "attention": lambda r: Of(
        lambda n, x: attending(n, (x > 0).astype(int)),
        table=nnx.Embed(5, 4, rngs=r, **WIDE),
        attention=nnx.MultiHeadAttention(2, 4, decode=False, rngs=r, **WIDE),
        start=nnx.Param(jnp.ones((1, 1, 4), jnp.float64)),
    ),
    "bridged": lambda r: bridged(),
}  # fmt: skip
QUICK = ("repeated", "pooled", "tokens", "circular", "bridged")
LIKELIHOODS = (Categorical, Bernoulli, Gaussian)


def blocks_of(model, x, likelihood):
    """Outputs, and the Gauss-Newton matrix of every array by its Jacobian and the Hessian."""
    graph, weights, rest = nnx.split(model, nnx.Param, ...)

    def outputs(weights, one):
        copies = jax.tree.map(lambda a: a, (weights, rest))
        return nnx.merge(graph, *copies, copy=True)(one[None]).reshape(-1, shape[-1])

    def loss(f):
        minus_log = {
            Categorical: jax.nn.logsumexp(f),
            Bernoulli: jnp.sum(jax.nn.softplus(f)),
            Gaussian: jnp.sum(f**2) / 2,
        }
        return minus_log[likelihood]

    @jax.jit
    def of_all(x):
        def of_one(one):
            jacobian = nnx.to_pure_dict(jax.jacrev(outputs)(weights, one))
            hessian = jax.vmap(jax.hessian(loss))(outputs(weights, one))

            def block(j):
                j = j.reshape(*hessian.shape[:2], -1)
                return jnp.einsum("mcp,mcd,mdq->pq", j, hessian, j)

            return jax.tree.map(block, jacobian)

        return jax.tree.map(lambda block: block.sum(0), jax.lax.map(of_one, x))

    shape = jax.eval_shape(lambda: nnx.merge(graph, weights, rest, copy=True)(x)).shape
    return nnx.traversals.flatten_mapping(of_all(x)), shape


def flat(tree):
    beliefs = nnx.traversals.flatten_mapping(tree)
    return {path: getattr(belief, "belief", belief) for path, belief in beliefs.items()}


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n not in QUICK)]
)
def test_the_curvature_is_the_exact_gauss_newton_matrix_of_every_array(name):
    """Variances; vectors whole; in the eigenbases of its partial traces the diagonal of a matrix's."""
    model, x = evaluated(MODELS[name]), X[:5].astype(jnp.float64)
    likelihood = LIKELIHOODS[list(MODELS).index(name) % 3]
    blocks, shape = blocks_of(model, x, likelihood)
    targets = jnp.zeros(shape[:-1], int) if likelihood is Categorical else jnp.zeros(shape)
    likelihood = Gaussian(1.0) if likelihood is Gaussian else likelihood()
    options = {"prior_precision": 0.5, "batch_size": 5}
    diagonal, factored = (
        flat(laplace(model, likelihood, (x, targets), kind=kind, **options).beliefs)
        for kind in ("diagonal", "kfac")
    )
    assert set(blocks) == set(diagonal)
    for path, block in blocks.items():
        exact = block + 0.5 * np.eye(len(block))
        np.testing.assert_allclose(diagonal[path].variance.ravel(), 1 / np.diag(exact), rtol=1e-6)
        belief, size = factored[path], len(block)
        if isinstance(belief, FullNormal):
            cov = belief.cov.reshape(size, size)
            np.testing.assert_allclose(cov, np.linalg.inv(exact), atol=1e-6)
            continue
        basis = np.kron(belief.in_basis, belief.out_basis)
        own = np.einsum("pa,pq,qa->a", basis, exact, basis)
        np.testing.assert_allclose(belief.variance.ravel(), 1 / own, rtol=1e-6)
        traced = np.einsum("iojo->ij", block.reshape(2 * belief.matrix.shape))
        turned = belief.in_basis.T @ traced @ belief.in_basis
        np.testing.assert_allclose(turned, np.diag(np.diag(turned)), atol=1e-6)
        assert np.max(belief.variance) <= 2 * (1 + 1e-6)


@pytest.mark.parametrize("kind", ["kfac", "diagonal"])
def test_what_was_never_seen_keeps_the_prior(kind):
    model = Of(lambda n, x: n.a(x), a=linear(2), unused=linear(2))
    x, options = X.at[:, 1].set(0), {"kind": kind, "prior_precision": 1.0}
    with pytest.warns(UserWarning, match="not depend on unused/bias, unused/kernel"):
        tree = laplace(model, Gaussian(1.0), (x, jnp.zeros((24, 2))), **options).beliefs
    variance = tree["a"]["kernel"].marginal_variance()
    np.testing.assert_allclose(variance[1], 1, rtol=1e-5)
    assert np.all(variance[::2] < 0.2)
    np.testing.assert_allclose(tree["unused"]["kernel"].marginal_variance(), 1, rtol=1e-5)


def test_other_parameters_than_those_of_the_filter_are_certain():
    layers = {"a": linear(), "b": linear(), "c": linear(3)}
    model = Of(lambda n, x: jnp.concatenate([n.a(n.c(x)), n.b(n.c(x))], 1), **layers)
    data, options = (X, jnp.zeros((24, 2))), {"prior_precision": 1.0}
    both, whole = (
        laplace(model, Gaussian(1.0), data, random=random, **options).beliefs
        for random in (nnx.Any(nnx.PathContains("a"), nnx.PathContains("b")), nnx.Param)
    )
    np.testing.assert_array_equal(both["c"]["kernel"], model.c.kernel[...])
    for name in "ab":
        np.testing.assert_allclose(both[name]["kernel"].cov, whole[name]["kernel"].cov, rtol=1e-4)


@pytest.mark.slow
def test_the_evidence_is_highest_at_the_chosen_precision_and_batches_do_not_matter():
    model = evaluated(perceptron)
    data = X, jnp.sin(X[:, :2])

    def found(precision=None):
        return laplace(model, Gaussian(0.1), data, prior_precision=precision, receipt=True)[1]

    best = found()
    (precision,) = set(best.prior_precision.values())
    whole, batches = (
        flat(laplace(model, Gaussian(0.1), data, prior_precision=precision, batch_size=b).beliefs)
        for b in (256, 10)
    )
    for path, belief in whole.items():
        moments = belief.marginal_variance(), batches[path].marginal_variance()
        np.testing.assert_allclose(*moments, rtol=1e-3)
    assert best.log_evidence > max(found(precision * f).log_evidence for f in (0.8, 1.25))
    each = laplace(model, Gaussian(0.1), data, receipt=True, per_layer=True)[1]
    assert len(set(each.prior_precision.values())) > 1
    assert each.log_evidence > best.log_evidence
    assert 0 < best.effective_parameters < 1000


def test_blocks_of_one_example_seen_many_times_are_the_dense_matrix_s_own():
    """Kronecker factors are exact then; counts of examples and the softmax's Hessian show."""
    model = evaluated(perceptron)
    nnx.update(model, jax.tree.map(lambda w: w.astype(jnp.float64), nnx.state(model, nnx.Param)))
    x = jnp.tile(X[:1].astype(jnp.float64), (5, 1))
    labels = jnp.zeros(5, int)
    receipt = laplace(model, Categorical(), (x, labels), prior_precision=0.3, receipt=True)[1]
    graph, state, rest = nnx.split(model, nnx.Param, ...)
    weights = nnx.to_pure_dict(state)

    def logits(weights):
        filled = jax.tree.map(lambda a: a, state)
        nnx.replace_by_pure_dict(filled, weights)
        return nnx.merge(graph, filled, rest)(x)[0]

    p = jax.nn.softmax(logits(weights))
    hessian = 5 * (jnp.diag(p) - jnp.outer(p, p))
    determined, log_det = 0.0, 0.0
    for jacobian in jax.tree.leaves(jax.jit(jax.jacrev(logits))(weights)):
        j = np.asarray(jacobian).reshape(len(p), -1)
        # The eigenvalues of J^T H J that are not zero.
        values = np.maximum(np.linalg.eigvals(hessian @ (j @ j.T)).real, 0)
        determined += np.sum(values / (values + 0.3))
        log_det += np.sum(np.log1p(values / 0.3))
    square = sum(float(jnp.sum(w**2)) for w in jax.tree.leaves(weights))
    assert abs(receipt.effective_parameters / determined - 1) < 1e-6
    evidence = 5 * float(jnp.log(p[0])) - 0.5 * (0.3 * square + log_det)
    assert abs(receipt.log_evidence / evidence - 1) < 1e-6


@pytest.mark.filterwarnings("ignore:.*the edge of the range:UserWarning")
@pytest.mark.parametrize(
    ("likelihood", "targets"),
    [
        (Categorical(), lambda y: (y[:, 0] > 0).astype(int)),
        (Bernoulli(), lambda y: (y > 0).astype(float)),
        (Gaussian(0.1), lambda y: y),
        (Gaussian(), lambda y: y),
    ],
    ids=["categorical", "bernoulli", "gaussian", "noise"],
)
def test_held_out_data_choose_the_precision_that_predicts_them_best(likelihood, targets):
    model = linear(2)
    other = jax.random.normal(jax.random.key(1), (10, 3))
    train, held = ((x, targets(jnp.sin(3 * x[:, :2]))) for x in (X, other))

    def density(**options):
        found, receipt = laplace(model, likelihood, train, receipt=True, **options)
        (precision,) = set(receipt.prior_precision.values())
        if isinstance(likelihood, Gaussian):
            np.testing.assert_allclose(found.likelihood.noise_variance, receipt.noise_variance)
        return found.log_prob(*held).sum(), precision

    best, _ = density(held_out=held)
    for precision in np.logspace(-2, 6, 17)[::4]:
        assert best >= density(prior_precision=precision)[0] - 1e-3


def test_each_output_has_its_noise_in_its_own_unit():
    x, noise = np.asarray(X), np.random.default_rng(0).normal(size=(24, 2))
    y = x[:, :2] + 0.1 * noise
    model = linear(2)
    fit = np.linalg.lstsq(np.c_[x, np.ones(24)], y)[0]
    units, found = np.array([1.0, 1e3]), []
    for unit in (np.ones(2), units):
        model.kernel.set_value(jnp.asarray(fit[:3] * unit))
        model.bias.set_value(jnp.asarray(fit[3] * unit))
        found.append(laplace(model, Gaussian(), (x, y * unit), prior_precision=1e-9, receipt=True))
    (one, receipt), (other, scaled) = found
    np.testing.assert_allclose(scaled.noise_variance, receipt.noise_variance * units**2, rtol=1e-4)
    residuals = np.mean((y - x @ fit[:3] - fit[3]) ** 2, axis=0)
    np.testing.assert_allclose(receipt.noise_variance, residuals * 24 / 20, rtol=1e-3)
    np.testing.assert_allclose(other.predict(x).sd, one.predict(x).sd * units, rtol=1e-3)


def test_a_linear_regression_has_its_noise_and_prior_from_the_evidence():
    x = jax.random.normal(jax.random.key(2), (400, 3))
    weights = jnp.array([[1.0], [-2.0], [0.5]])
    y = x @ weights + 0.3 * jax.random.normal(jax.random.key(3), (400, 1))
    model = linear(use_bias=False)
    model.kernel.set_value(jnp.linalg.lstsq(x, y)[0])
    _, receipt = laplace(model, Gaussian(), (x, y), receipt=True)
    assert abs(receipt.noise_variance - 0.09) < 0.02
    assert abs(receipt.effective_parameters - 3) < 0.01
    assert abs(receipt.prior_precision["model"] - 3 / float(jnp.sum(weights**2))) < 0.1


def test_a_covariance_beyond_single_precision_is_kept():
    """The bias sees one direction a million times as well as the other."""
    model = Of(lambda n, x: n.a(x) @ jnp.array([[1.0, 1.0], [1.0, 1.0]], x.dtype), a=linear(2))
    x = X.astype(jnp.float32)
    belief = laplace(model, Gaussian(1e-4), (x, jnp.zeros((24, 2))), prior_precision=1e-4).beliefs
    cov = np.asarray(belief["a"]["bias"].cov, np.float64)
    np.testing.assert_allclose(np.linalg.eigvalsh(cov)[1], 1e4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["kfac", "diagonal"])
def test_a_prior_of_any_form_is_its_means_and_variances(kind):
    """At the weights nothing draws them on; a prior twice as wide is half the precision."""
    model, options = linear(), {"kind": kind, "prior_precision": 3.0, "receipt": True}
    weights = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    with pytest.warns(UserWarning, match="evidence chose .* edge"):
        at = laplace(model, Gaussian(1.0), ZEROS, prior="network", receipt=True)[1]
    assert at.prior_precision["model"] > 1e6
    wide = jax.tree.map(lambda w: mj.posterior.GaussianPrior(0 * w, 2.0), weights)
    found, receipt = laplace(model, Gaussian(1.0), ZEROS, prior=wide, **options)
    known = laplace(model, Gaussian(1.0), ZEROS, **(options | {"prior_precision": 1.5}))
    assert receipt.log_evidence == pytest.approx(known[1].log_evidence)
    jax.tree.map(np.testing.assert_allclose, found.beliefs, known[0].beliefs)


def test_each_weight_has_its_own_prior_variance_in_a_diagonal_approximation():
    model, prior = (
        linear(),
        {"kernel": mj.posterior.GaussianPrior(0.0, jnp.array([[1.0], [2], [4]]))},
    )
    options = {"likelihood": Gaussian(1.0), "data": ZEROS, "prior_precision": 3.0}
    found = laplace(model, kind="diagonal", prior=prior, **options).beliefs["kernel"].variance
    curvature = np.sum(np.square(X), axis=0)
    np.testing.assert_allclose(found[:, 0], 1 / (curvature + 3 / np.array([1, 2, 4])), rtol=1e-6)
    with pytest.raises(ValueError, match=r"one prior variance .* several at kernel"):
        laplace(model, prior=prior, **options)


DICT = {"x": X}
BAD = [  # of data, see also tests/inference/test_fit.py
    ({"kind": "full"}, ValueError, "kfac or diagonal. Got 'full'"),
    ({"likelihood": Gaussian(np.ones(1))}, ValueError, "one positive noise variance"),
    ({"data": (X, jnp.zeros((24, 2)))}, ValueError, r"shape \(24, 1\).*Got .* shape \(24, 2\)"),
    ({"data": (DICT, ZEROS[1])}, TypeError, "Got object.*write a module"),
    ({"held_out": (X, jnp.zeros((24, 2)))}, ValueError, r"shape \(24, 1\).*Got .* \(24, 2\)"),
    ({"held_out": ZEROS, "per_layer": True}, ValueError, "one prior precision"),
    ({"prior_precision": -1.0}, ValueError, "positive number as prior_precision. Got -1.0"),
    ({"prior_precision": 0}, ValueError, "positive number"),
    ({"prior": {"kernal": jnp.zeros((3, 1))}}, ValueError, r"kernel \(3, 1\). Got the key 'kernal'"),
    ({"random": nnx.PathContains("head")}, ValueError, "Got none of bias, kernel"),
    ({"network": mj.Bayesian(linear())}, TypeError, "Got a Bayesian; use its at_means"),
    ({"network": Of(lambda n, x: (n.a(x), x), a=linear())}, TypeError, "one array.*output="),
    ({"network": Of(lambda n, x: n.a(x)[0], a=linear())}, TypeError, "one array"),
    ({"network": Of(lambda n, x: n.a(x), a=linear(kernel_init=nnx.initializers.constant(jnp.nan)))},
     ValueError, "finite outputs"),
]  # fmt: skip


def test_a_stopped_gradient_is_refused_but_before_certain_weights():
    net = Of(lambda n, x: n.b(jax.lax.stop_gradient(n.a(x))), a=linear(3), b=linear())
    for call in (laplace, mj.fit):
        with pytest.raises(ValueError, match=r"Got stop_gradient at .*test_laplace.*certain"):
            call(net, Gaussian(1.0), (X, X[:, :1]))
    laplace(net, Gaussian(1.0), ZEROS, prior_precision=1.0, random=nnx.PathContains("b"))


@pytest.mark.parametrize(("change", "error", "words"), BAD)
def test_bad_input(change, error, words):
    arguments = {"network": linear(), "likelihood": Gaussian(1.0), "data": ZEROS}
    with pytest.raises(error, match=words):
        laplace(**{**arguments, **change})


def training():
    """Models in training mode, and what they do; one of each kind of layer, and scanned."""
    rngs = nnx.Rngs(0, dropout=1)
    norms = nnx.split_rngs(splits=2)(nnx.vmap(lambda r: nnx.BatchNorm(3, rngs=r)))(rngs)

    def of_two(first):
        return Of(lambda n, x: n.a(n.b(x)), a=linear(), b=first)

    return {
        "dropout": (of_two(nnx.Dropout(0.5, rngs=rngs)), "random"),
        "norm": (of_two(nnx.BatchNorm(3, rngs=rngs)), "statistics"),
        "scanned": (Of(scanned, layers=norms, norm=linear(3), last=linear()), "statistics"),
        "bridged": (Of(lambda n, x: n.a(x)[:, :1], a=bridged(True)), "random"),
    }


@pytest.mark.parametrize("name", ["dropout", "norm", "scanned", "bridged"])
def test_a_model_in_training_mode_is_refused(name):
    (model, what), data = training()[name], tuple(x.astype(jnp.float32) for x in ZEROS)
    for call in (
        lambda: laplace(model, Gaussian(1.0), data),
        lambda: mj.fit(model, Gaussian(1.0), data),
        lambda: mj.Bayesian(model, linearised=True)(data[0]),
    ):
        with pytest.raises(ValueError, match=f"inference mode. Got .*{what}.*network.eval"):
            call()
    if name != "bridged":
        model.eval()
        laplace(model, Gaussian(1.0), data, prior_precision=1.0)
