"""Each error states the rule, the value and the fix, in one line."""

import re

import jax
import numpy as np
import pytest

from moment_jax.posterior import GaussianPrior, Posterior
from tests.builders import KERNEL_FAMILIES
from tests.posterior.families import IN, KEY, OUT, PRIOR, example, stack

Point, Factorized, OutputShared, MatrixNormal, FullNormal = KERNEL_FAMILIES
KERNEL, VECTOR, STACK = np.zeros((IN, OUT)), np.zeros((IN,)), np.zeros((4, IN, OUT))
X, EYE, SHARED = np.ones((5, IN)), np.eye(IN), example(OutputShared)


def stacked(family):
    return stack([example(family)] * 2)


CASES = {
    "factorized_scalar": (lambda: Factorized(KERNEL, 0.1), "(3, 2) and (). For one", "full_like"),
    "factorized_shape": (lambda: Factorized(KERNEL, np.ones(OUT)), "(3, 2) and (2,)", "full_like"),
    "shared_vector": (lambda: OutputShared(VECTOR, VECTOR), "(in, out)", "use Factorized"),
    "shared_inputs": (lambda: OutputShared(KERNEL, np.ones(IN)), "(3, 2) and (2,)", "Factorized"),
    "shared_entries": (lambda: OutputShared(KERNEL, KERNEL), "(3, 2) and (3, 2)", "Factorized"),
    "matrix_vector": (
        lambda: MatrixNormal(VECTOR, EYE, EYE),
        "(in, out)",
        "use Factorized or Full",
    ),
    "matrix_swapped": (
        lambda: MatrixNormal(KERNEL.T, EYE, EYE),
        "Got (2, 3) and (3, 3)",
        "(in, in)",
    ),
    "full_matrix": (lambda: FullNormal(KERNEL, np.eye(6)), "(3, 2, 3, 2)", "cov.reshape"),
    "full_scalar": (lambda: FullNormal(KERNEL, 1.0), "Got (3, 2) and ()", "cov.reshape"),
    "full_vector": (lambda: FullNormal(VECTOR, np.ones(IN)), "(3, 3)", "cov.reshape"),
    "negative": (lambda: Factorized(VECTOR, VECTOR - 2), "Got -2", "squares"),
    "negative_shared": (lambda: OutputShared(KERNEL, -np.ones(OUT)), "Got -1", "squares"),
    "negative_matrix": (lambda: MatrixNormal(KERNEL, EYE, -np.eye(OUT)), "Got -1", "squares"),
    "negative_full": (lambda: FullNormal(VECTOR, -EYE), "Got -1", "squares"),
    "noise_of_vector": (lambda: Point(VECTOR).noise_variance(X, X), "Point.noise_var", "jax.vmap"),
    "noise_of_stack": (lambda: Point(STACK).noise_variance(X, X), "Got (4, 3, 2)", "jax.vmap"),
    "noise_inputs": (
        lambda: SHARED.noise_variance(X.T, X.T),
        "in == 3. Got (3, 5)",
        "broadcast_to",
    ),
    "noise_rank": (lambda: SHARED.noise_variance(X, X[0]), "Got (5, 3) and (3,)", "broadcast_to"),
    "block_inputs": (lambda: SHARED.noise_block(np.ones((4, 4))), "in == 3. Got (4, 4)", "last"),
    "metric_of_vector": (lambda: Point(VECTOR).input_metric(), "(in, out). Got (3,)", "jax.vmap"),
    "vector_of_kernel": (lambda: Point(KERNEL).vector_cov(), "(D,). Got (3, 2)", "jax.vmap"),
    "vector_of_shared": (lambda: SHARED.vector_cov(), "(D,). Got (3, 2)", "Use Point, Factorized"),
    "matrix_stack": (lambda: stacked(MatrixNormal).kl(PRIOR), "Got (2, 3, 2)", "jax.vmap"),
    "full_stack": (lambda: stacked(FullNormal).sample(KEY), "Got (2, 3, 2, 3, 2) and", "jax.vmap"),
    "prior_shape": (
        lambda: SHARED.kl(GaussianPrior(0.0, X)),
        "(3, 2). Got () and (5, 3)",
        "scalars",
    ),
    "prior_rank": (lambda: SHARED.kl(GaussianPrior(STACK[:1])), "Got (1, 3, 2) and ()", "scalars"),
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
