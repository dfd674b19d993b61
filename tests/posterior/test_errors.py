"""Each error states the rule, the value and the fix, in one line."""

import re
from functools import partial

import jax
import numpy as np
import pytest

from moment_jax.posterior import GaussianPrior, Posterior
from tests.builders import KERNEL_FAMILIES
from tests.posterior.families import IN, KEY, OUT, PRIOR, example, stack

Point, Factorized, OutputShared, KroneckerEigen, FullNormal = KERNEL_FAMILIES
KERNEL, VECTOR, STACK = np.zeros((IN, OUT)), np.zeros((IN,)), np.zeros((4, IN, OUT))
X, EYE, SHARED = np.ones((5, IN)), np.eye(IN), example(OutputShared)
TWO = {family: stack([example(family)] * 2) for family in (KroneckerEigen, FullNormal)}
OF_VARIANCE = partial(Factorized, KERNEL)

CASES = {
    "scalar": (lambda: Factorized(KERNEL, 0.1), "(3, 2) and (). For one", "full_like"),
    "shared_vector": (lambda: OutputShared(VECTOR, VECTOR), "(in, out)", "use Factorized"),
    "shared_entries": (lambda: OutputShared(KERNEL, KERNEL), "(3, 2) and (3, 2)", "Factorized"),
    "basis_vector": (lambda: KroneckerEigen(VECTOR, EYE, EYE, EYE), "(in, out)", "Factorized or"),
    "bases": (lambda: KroneckerEigen(KERNEL, 2 * EYE, np.eye(OUT), KERNEL), "by 3", "eigh"),
    "basis_shape": (lambda: KroneckerEigen(KERNEL.T, EYE, EYE, KERNEL), "(2, 3)", "(in, in)"),
    "full_matrix": (lambda: FullNormal(KERNEL, np.eye(6)), "(3, 2, 3, 2)", "cov.reshape"),
    "negative": (lambda: Factorized(VECTOR, VECTOR - 2), "Got -2", "squares"),
    "negative_shared": (lambda: OutputShared(KERNEL, -np.ones(OUT)), "Got -1", "squares"),
    "negative_full": (lambda: FullNormal(VECTOR, -EYE), "Got -1", "squares"),
    "noise_of_vector": (lambda: Point(VECTOR).noise_variance(X, X), "Point.noise_var", "jax.vmap"),
    "noise_inputs": (lambda: SHARED.noise_variance(X.T, X.T), "== 3. Got (3, 5)", "broadcast_to"),
    "block_inputs": (lambda: SHARED.noise_block(np.ones((4, 4))), "in == 3. Got (4, 4)", "last"),
    "metric_of_vector": (lambda: Point(VECTOR).input_metric(), "(in, out). Got (3,)", "jax.vmap"),
    "vector_of_kernel": (lambda: Point(KERNEL).vector_cov(), "(D,). Got (3, 2)", "jax.vmap"),
    "vector_of_shared": (lambda: SHARED.vector_cov(), "(D,). Got (3, 2)", "Use Point, Factorized"),
    "matrix_stack": (lambda: TWO[KroneckerEigen].kl(PRIOR), "Got (2, 3, 2)", "jax.vmap"),
    "full_stack": (lambda: TWO[FullNormal].sample(KEY), "Got (2, 3, 2, 3, 2) and", "jax.vmap"),
    "prior": (lambda: SHARED.kl(GaussianPrior(0.0, X)), "(3, 2). Got () and (5, 3)", "scalars"),
    "prior_rank": (lambda: SHARED.kl(GaussianPrior(STACK[:1])), "Got (1, 3, 2) and ()", "scalars"),
    "traced": (lambda: jax.eval_shape(OF_VARIANCE, np.ones(OUT)), "(3, 2) and (2,)", "full_like"),
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


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: example(Factorized).kl(1.0), "Got float. For a variance s, use"),
        (lambda: Point(np.ones(IN, int)), "Got int64. Use "),
        (lambda: Factorized([1.0], [1.0]), "Got list. Use "),
        (Posterior, "abstract"),
    ],
)
def test_wrong_type(call, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        call()
