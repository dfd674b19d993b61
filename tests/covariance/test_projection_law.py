"""The law of all structures: op(S) == project(op(Full(S))), and its consequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moment_jax.covariance import Covariance, Diagonal, Full, Separable
from tests.builders import (
    ALL_STRUCTURES,
    KERNEL_FAMILIES,
    Pairs,
    assert_close,
    member,
    random_cov,
    random_dense,
    random_kernel,
    random_psd,
    stacked,
)

SHAPE = (4, 5)
STRUCTURES = [*ALL_STRUCTURES, Pairs]  # and one of a user, of whose operations none is his own
structures = pytest.mark.parametrize("structure", STRUCTURES)
KEYS = jax.random.split(jax.random.key(0), 12)
MEAN = jax.random.normal(KEYS[0], SHAPE)


GAIN, SECOND = jax.random.normal(KEYS[1], SHAPE), 0.3 * jax.random.normal(KEYS[2], SHAPE)
POSITIVE = jax.random.uniform(KEYS[3], SHAPE, minval=0.1)
SIGNED = jax.random.normal(KEYS[3], SHAPE)
NARROWER, SQUARE = (jax.random.normal(KEYS[4], (5, size)) for size in (3, 5))
FEWER_TOKENS = jax.random.normal(KEYS[5], (3, 4))
EACH = jax.random.normal(KEYS[6], (*SHAPE, 3))
VECTOR, PSD = jnp.arange(1.0, 6.0), random_psd(KEYS[9], 5)
TOKEN_KERNELS = {f.__name__: random_kernel(KEYS[8], f, (4, 3)) for f in KERNEL_FAMILIES}
KERNELS = {family.__name__: random_kernel(KEYS[10], family, (5, 3)) for family in KERNEL_FAMILIES}


class Gain:
    """Moments of an elementwise function: any with gain^2 var + second^2 <= variance."""

    def __init__(self, variance):
        self.gain, self.second = GAIN, SECOND
        self.variance = GAIN**2 * variance + SECOND**2 + 0.1


OPERATIONS = (
    {
        "identity": lambda cov: cov,
        "rescale": lambda cov: cov.rescale(POSITIVE),
        "rescale_signed": lambda cov: cov.rescale(SIGNED),
        "map_features": lambda cov: cov.map_features(NARROWER),
        "map_tokens": lambda cov: cov.map_tokens(FEWER_TOKENS),
        "map_each": lambda cov: cov.map_each(EACH),
        "add": lambda cov: cov.add(cov.map_features(SQUARE)),
        "add_shared": lambda cov: cov.add(cov.bias_noise(PSD)),
        "add_shared_diagonal": lambda cov: cov.add(cov.bias_noise(VECTOR)),
        "add_independent": lambda cov: cov.add(cov.independent(jnp.abs(SIGNED))),
        "gain_noise": lambda cov: cov.gain_noise(MEAN, VECTOR),
        "gain_noise_full": lambda cov: cov.gain_noise(MEAN, PSD),
        "elementwise": lambda cov: cov.elementwise(Gain(cov.variance())),
        "entries": lambda cov: cov.entries(np.array([[3, -1, 7], [19, 0, 3]])),
        # x + x K, and x - avg(x): the covariances of x with what is made of it.
        "add_branch": lambda cov: joined(cov, SQUARE),
        "add_average": lambda cov: joined(cov, jnp.full((5, 5), -0.2)),
    }
    | {
        f"weight_noise_{name}": lambda cov, kernel=kernel: cov.weight_noise(MEAN, kernel)
        for name, kernel in KERNELS.items()
    }
    | {
        f"token_noise_{name}": lambda cov, kernel=kernel: cov.token_noise(MEAN, kernel)
        for name, kernel in TOKEN_KERNELS.items()
    }
)


def joined(cov, kernel):
    """The covariance of x + x K."""
    return cov.add_branch(cov.map_features(kernel), cov.with_itself().map_features(kernel))


def textbook(dense):
    """The dense result of every operation."""
    return {name: operation(Full(dense)).to_dense() for name, operation in OPERATIONS.items()}


@pytest.fixture(scope="module")
def run():
    """Result, dense, variance, textbook and its projection, for each operation on a batch of two."""
    compiled = jax.jit(jax.vmap(textbook))  # one program for all structures

    @functools.cache
    def program(structure):
        def one(name, cov, exact):
            ours = OPERATIONS[name](cov)
            expected = structure.project(exact).to_dense()
            return ours, ours.to_dense(), ours.variance(), exact, expected

        def every(cov, exact):
            return {name: one(name, cov, exact[name]) for name in exact}

        return jax.jit(jax.vmap(every))

    def run(covs: list[Covariance]):
        exact = compiled(jnp.stack([cov.to_dense() for cov in covs]))
        return program(type(covs[0]))(jax.tree.map(lambda *x: jnp.stack(x), *covs), exact)

    return run


@pytest.fixture(scope="module")
def results(run):
    """The same for random members."""
    every = functools.cache(lambda s: run([random_cov(key, s, SHAPE) for key in KEYS[10:]]))
    return lambda structure, name: every(structure)[name]


@structures
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_is_projection_of_dense_operation(structure, name, results):
    ours, dense, variance, exact, expected = results(structure, name)
    assert type(ours) is structure
    assert_close(dense, expected)
    assert_close(variance, np.einsum("btdtd->btd", exact))
    size = dense.shape[1] * dense.shape[2]
    assert np.linalg.eigvalsh(dense.reshape(2, size, size)).min() >= -1e-10


# Operations that keep the covariance of the token sum exact for any covariance.
OF_THE_SUM = {
    **{
        name: operation
        for name, operation in OPERATIONS.items()
        if name.startswith(("identity", "map_features", "add", "weight_noise", "gain_noise"))
    },
    "gains": lambda cov: cov.rescale(SIGNED[:1]),
    "average": lambda cov: cov.map_tokens(jnp.full((1, 4), 0.25)),
}


@pytest.fixture(scope="module")
def of_the_sum():
    """Covariances of the token sum and variances, ours and the textbook's, of a general covariance."""

    @jax.jit
    def both(dense):
        ours = {name: operation(Separable.project(dense)) for name, operation in OF_THE_SUM.items()}
        exact = {name: operation(Full(dense)).to_dense() for name, operation in OF_THE_SUM.items()}
        return {
            name: (
                (ours[name].features, ours[name].variance()),
                (jnp.einsum("tdse->de", exact[name]), jnp.einsum("tdtd->td", exact[name])),
            )
            for name in OF_THE_SUM
        }

    return both(random_dense(KEYS[11], SHAPE))


@pytest.mark.parametrize("name", OF_THE_SUM)
def test_separable_keeps_the_covariance_of_the_sum_of_any_covariance(name, of_the_sum):
    """The covariance is not a member of the structure."""
    (ours, variance), (expected, expected_variance) = of_the_sum[name]
    assert_close(ours, expected)
    if name == "average":
        assert_close(variance, expected_variance)


@pytest.mark.parametrize("landmarks", [None, 3])
@structures
def test_queries_equal_the_dense_ones(structure, landmarks):
    """Of one covariance, and of a batch with any number of leading axes."""

    @jax.jit
    def queries(cov):
        names = "to_dense", "token_blocks", "token_gram", "variance", "sd"
        return [getattr(cov, name)() for name in names]

    @jax.jit
    def members(dense):
        return [member(structure.project(each)).at_landmarks(landmarks) for each in dense]

    each = members([random_dense(key, SHAPE) for key in KEYS[8:]])
    alone = stacked([queries(cov) for cov in each])
    if landmarks is None:
        paths = "ntdte->ntde", "ntdsd->nts", "ntdtd->ntd"
        for path, query in zip(paths, alone[1:], strict=False):
            assert_close(query, np.einsum(path, alone[0]))
    for lead in ((4,), (2, 2)):
        batch = jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), stacked(each))  # noqa: B023
        assert batch.shape == (*lead, *SHAPE)
        for found, expected in zip(queries(batch), alone, strict=True):
            assert_close(found, expected.reshape(*lead, *expected.shape[1:]))


@structures
def test_zeros_shared_and_independent(structure):
    assert not structure.zeros(SHAPE).to_dense().any()
    assert structure.zeros(SHAPE).dtype == jnp.float32
    vector = random_psd(KEYS[9], 5)
    shared = np.broadcast_to(np.asarray(vector)[None, :, None, :], (*SHAPE, *SHAPE))
    variance = np.random.default_rng(0).uniform(size=SHAPE)

    @jax.jit
    def dense(vector, shared, variance):
        noisy = structure.zeros(SHAPE, float).bias_noise(vector), structure.project(shared)
        return [cov.to_dense() for cov in (*noisy, structure.independent(variance))]

    found, expected, independent = dense(vector, shared, variance)
    assert_close(found, expected)
    assert_close(independent, np.diag(variance.ravel()).reshape(*SHAPE, *SHAPE))


@structures
def test_gradients_are_finite_at_zero_covariance(structure):
    @jax.jit
    @jax.grad
    def gradient(cov):
        results = [operation(cov) for operation in OPERATIONS.values()]
        return sum(jnp.sum(r.variance()) + jnp.sum(r.token_gram() ** 2) for r in results)

    gradients = gradient(structure.zeros(SHAPE, jnp.float64))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_pooled_features_are_those_of_the_tokens_left():
    """Their trace follows the pool; nothing is lost on the way back."""
    cov = random_cov(KEYS[0], Separable, SHAPE)
    pool = jnp.array([1.0, 0, 1, 0])
    some = cov.pooled(pool)
    assert_close(jnp.trace(some.features), pool @ cov.tokens @ pool)
    assert_close(some.pooled(jnp.ones(4)).to_dense(), cov.to_dense())


# -- Cov[x, z]: what it becomes by operations on z is the projection of the dense one -----------------

OTHER = jax.random.normal(KEYS[2], (5, 5))
GAIN_OF_EACH = jax.random.normal(KEYS[1], (1, 5))
TOKENS = jax.random.uniform(KEYS[2], (4, 4))
ROWS, COLUMNS = np.array([1, 0, 3, -1]), np.array([4, -1, 0, 1, 1])
CARRIED = {  # functions of Cov[x, x]
    "itself": lambda c: c,
    "kernel": lambda c: c.map_features(SQUARE),
    "three kernels": lambda c: c.map_features(SQUARE).rescale(GAIN_OF_EACH).map_features(
        OTHER
    ).map_features(SQUARE),
    "each": lambda c: c.map_each(jnp.broadcast_to(SQUARE, (4, 5, 5))),
    "tokens": lambda c: c.map_tokens(TOKENS),
    "columns": lambda c: c.take(np.arange(4), COLUMNS),
    "rows": lambda c: c.take(ROWS, np.arange(5)),
    "both sides": lambda c: c.map_features(SQUARE).T.rescale(GAIN_OF_EACH).map_features(OTHER).T,
    "a sum": lambda c: c.add(c.map_features(SQUARE)).add(c.map_features(OTHER)),
    "the same rows of both": lambda c: c.map_features(SQUARE).take(ROWS, np.arange(5)).T.take(
        ROWS, np.arange(5)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def entries():
    """The covariance of every entry of x with that of what it became, ours and the dense one."""

    @jax.jit
    def both(cov):
        dense = Full.of(cov).with_itself()
        return {n: (f(cov.with_itself()).own(), f(dense).own()) for n, f in CARRIED.items()}

    return {s: both(random_cov(KEYS[4], s, SHAPE)) for s in ALL_STRUCTURES}


@pytest.mark.parametrize("structure", ALL_STRUCTURES)
@pytest.mark.parametrize("name", CARRIED)
def test_what_is_carried_is_the_dense_covariance(structure, name, entries):
    ours, expected = entries[structure][name]
    assert_close(ours, expected)


def test_a_diagonal_forgets_what_other_tokens_tell():
    cov = Diagonal(jnp.ones(SHAPE)).with_itself()
    assert cov.map_tokens(TOKENS[:2]) is None


def test_a_diagonal_keeps_the_gain_of_each_row():
    """Of rows in another order, the last of them zero."""
    cov, same_rows = Diagonal(POSITIVE), CARRIED["the same rows of both"]
    ours, dense = (same_rows(c.with_itself()).rescale(GAIN).own() for c in (cov, Full.of(cov)))
    assert_close(ours, dense)


def test_a_covariance_beyond_both_variances_is_bounded():
    """So where heads cancel in the pooled sum, whose share in what tokens get is then out of scale."""
    # No narrower: not corrected then.
    covs = [random_cov(key, Separable, (2, 13)) for key in KEYS[:2]]

    @jax.jit
    def branch(cov, other):
        cross = cov.with_itself()
        return cov.add_branch(other, cross._replace(features=-1e3 * cross.features))

    own, other, both = (np.diagonal(cov.tokens) for cov in (*covs, branch(*covs)))
    np.testing.assert_allclose(both, (own**0.5 - other**0.5) ** 2, rtol=1e-6)
