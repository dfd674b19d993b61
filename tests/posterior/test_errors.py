"""Each error states the rule, the value and the fix, in one line."""

import re

import jax
import numpy as np
import pytest

from moment_jax.posterior import (
    Factorized,
    FullNormal,
    GaussianPrior,
    MatrixNormal,
    OutputShared,
    Point,
    Posterior,
)
from tests.posterior.families import IN, OUT, example, stack

KERNEL, VECTOR, STACK = np.zeros((IN, OUT)), np.zeros((IN,)), np.zeros((4, IN, OUT))
X = np.ones((5, IN))


def stacked(family):
    return stack([example(family)] * 2)


CASES = {
    "factorized_scalar": (lambda: Factorized(KERNEL, 0.1), "(3, 2) and (). For one", "full_like"),
    "factorized_shape": (lambda: Factorized(KERNEL, np.ones(OUT)), "(3, 2) and (2,)", "full_like"),
    "shared_vector": (lambda: OutputShared(VECTOR, VECTOR), "(in, out)", "use Factorized"),
    "shared_inputs": (lambda: OutputShared(KERNEL, np.ones(IN)), "(3, 2) and (2,)", "Factorized"),
    "shared_entries": (lambda: OutputShared(KERNEL, KERNEL), "(3, 2) and (3, 2)", "Factorized"),
    "matrix_vector": (
        lambda: MatrixNormal(VECTOR, np.eye(IN), np.eye(1)),
        "(in, out)",
        "use Factorized or FullNormal",
    ),
    "matrix_swapped": (
        lambda: MatrixNormal(KERNEL, np.eye(OUT), np.eye(IN)),
        "Got (3, 2) and (2, 2) and (3, 3)",
        "(in, in) and (out, out)",
    ),
    "full_matrix": (lambda: FullNormal(KERNEL, np.eye(6)), "(3, 2, 3, 2)", "cov.reshape"),
    "full_scalar": (lambda: FullNormal(KERNEL, 1.0), "Got (3, 2) and ()", "cov.reshape"),
    "full_vector": (lambda: FullNormal(VECTOR, np.ones(IN)), "(3, 3)", "cov.reshape"),
    "negative": (lambda: Factorized(VECTOR, VECTOR - 2), "Got -2", "squares"),
    "negative_shared": (lambda: OutputShared(KERNEL, -np.ones(OUT)), "Got -1", "squares"),
    "negative_matrix": (
        lambda: MatrixNormal(KERNEL, np.eye(IN), -np.eye(OUT)),
        "Got -1",
        "squares",
    ),
    "negative_full": (lambda: FullNormal(VECTOR, -np.eye(IN)), "Got -1", "squares"),
    "noise_of_vector": (
        lambda: Factorized(VECTOR, VECTOR).noise_variance(X, X),
        "Factorized.noise_variance",
        "jax.vmap",
    ),
    "noise_of_stack": (lambda: Point(STACK).noise_variance(X, X), "Got (4, 3, 2)", "jax.vmap"),
    "noise_inputs": (
        lambda: example(OutputShared).noise_variance(X.T, X.T),
        "in == 3. Got (3, 5)",
        "broadcast_to",
    ),
    "noise_variance_rank": (
        lambda: example(MatrixNormal).noise_variance(X, X[0]),
        "Got (5, 3) and (3,)",
        "broadcast_to",
    ),
    "block_inputs": (
        lambda: example(FullNormal).noise_block(np.ones((4, 4))),
        "in == 3. Got (4, 4)",
        "last",
    ),
    "metric_of_vector": (lambda: Point(VECTOR).input_metric(), "(in, out). Got (3,)", "jax.vmap"),
    "vector_of_kernel": (lambda: Point(KERNEL).vector_cov(), "(D,). Got (3, 2)", "jax.vmap"),
    "vector_of_shared": (
        lambda: example(OutputShared).vector_cov(),
        "a bias or a gain (D,). Got (3, 2)",
        "Use Point, Factorized or FullNormal",
    ),
    "matrix_stack": (
        lambda: stacked(MatrixNormal).kl(GaussianPrior()),
        "Got (2, 3, 2)",
        "jax.vmap",
    ),
    "full_stack": (
        lambda: stacked(FullNormal).sample(jax.random.key(0)),
        "Got (2, 3, 2, 3, 2) and (2, 3, 2)",
        "jax.vmap",
    ),
    "prior_shape": (
        lambda: example(Factorized).kl(GaussianPrior(0.0, np.ones(IN))),
        "(3, 2). Got () and (3,)",
        "Use scalars",
    ),
    "prior_rank": (
        lambda: example(Factorized).kl(GaussianPrior(np.ones((1, IN, OUT)))),
        "Got (1, 3, 2) and ()",
        "Use scalars",
    ),
}


@pytest.mark.parametrize(("call", "got", "fix"), CASES.values(), ids=CASES)
def test_error(call, got, fix):
    with pytest.raises(ValueError, match=re.escape(got)) as caught:
        call()
    message = str(caught.value)
    assert fix in message
    assert message.startswith("`")
    assert "\n" not in message
    assert caught.value.__cause__ is None


def test_a_number_is_no_prior():
    with pytest.raises(TypeError, match=re.escape("Got float. For a variance s, use")):
        example(Factorized).kl(1.0)


@pytest.mark.parametrize(
    ("mean", "got"), [(np.ones(IN, int), "int64"), (np.ones(IN, bool), "bool"), ([1.0], "list")]
)
def test_a_belief_is_about_real_numbers(mean, got):
    for make in (Point, lambda mean: Factorized(mean, mean)):
        with pytest.raises(TypeError, match=rf"Got {got}\. Use .*"):
            make(mean)


def test_errors_are_raised_while_tracing():
    with pytest.raises(ValueError, match="full_like"):
        jax.eval_shape(lambda variance: Factorized(KERNEL, variance), np.ones(OUT))


def test_the_interface_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        Posterior()
