"""The derivation's four propositions, formula by formula, on dense covariances.

Index convention: `cov[t, d, s, e]` is Cov[x_td, x_se]. The derivation's A^T B is our a b, so its
column a_k of A is our row `a[k]`, and its Sigma_{a_k a_l} is `cov_a[k, :, l, :]`. For small sizes only:
clarity comes before speed.

Misprints are corrected; the README says what they are.
"""

import jax
import jax.numpy as jnp
from jax import Array


def proposition1(mean_a: Array, mean_b: Array) -> Array:
    """E[a b] = E[a] E[b], (T, Q), for independent a (T, P) and b (P, Q): Prop. 1, Eq. 8."""
    return mean_a @ mean_b


@jax.jit
def proposition2(mean_a: Array, cov_a: Array, mean_b: Array, cov_b: Array) -> Array:
    """Cov[(a b)_kl, (a b)_mn], (T, Q, T, Q), for independent a (T, P) and b (P, Q). Exact.

    tr(Sa^T Sb) + E[a_k]^T Sb E[a_m] + E[b_l]^T Sa E[b_n], with Sa the covariance of the rows k and m of
    a and Sb that of the columns l and n of b. Covariances are (T, P, T, P) and (P, Q, P, Q).

    Source: Transformer derivation, Prop. 2, Eq. 9, with the transpose of E[a_m a_k^T] that its proof
    drops; its i and j run to nq, not to np.
    """
    return (
        jnp.einsum("kimj,iljn->klmn", cov_a, cov_b)
        + jnp.einsum("ki,iljn,mj->klmn", mean_a, cov_b, mean_a)
        + jnp.einsum("il,kimj,jn->klmn", mean_b, cov_a, mean_b)
    )


@jax.jit
def proposition3(mean: Array, cov: Array) -> Array:
    """First-order Cov[phi_i(w_a), phi_k(w_b)] of the softmax of every two rows, (T, C, T, C).

    sum_jl dphi_i/dx_j(E[w_a]) dphi_k/dx_l(E[w_b]) Cov[w_aj, w_bl], with
    dphi_i/dx_j = phi_i (1[i = j] - phi_j), of E[w] (T, C), one softmax a row, and Cov[w] (T, C, T, C).
    The corresponding mean is the softmax of the mean (Eq. 10).

    Source: Transformer derivation, Prop. 3, Eq. 11.
    """
    phi, one = jax.nn.softmax(mean, axis=1), jnp.eye(mean.shape[1], dtype=mean.dtype)
    jacobians = phi[:, :, None] * (one[None] - phi[:, None, :])  # [a, i, j]
    return jnp.einsum("aij,bkl,ajbl->aibk", jacobians, jacobians, cov)


@jax.jit
def proposition4(
    mean: Array, cov: Array, gain: Array, gain_cov: Array, bias_cov: Array, *,
    epsilon: Array | float = 1e-6,
) -> Array:  # fmt: skip
    """First-order covariance of a layer normalisation with random gain and bias, (T, D, T, D).

    With n the normalised mean of a token, q = var_d(E[a]) + epsilon and the Jacobian
    J = (I - 11^T/D - n n^T/D) / sqrt(q) of each token, C = J Cov[a] J^T and

    Cov[z_td, z_se] = Cov[g_d, g_e] (C_tdse + n_td n_se) + E[g_d] E[g_e] C_tdse + Cov[b_d, b_e].

    Assumes that the input (T, D), the gain (D,) and the bias (D,) are independent. `epsilon` is a
    number, or one for each token, (T,).

    Source: Transformer derivation, section 4.5 and Prop. 4, corrected: the division is by the standard
    deviation, and the mean and deviation over the features depend on the token.
    """
    d = mean.shape[1]
    normal, variance = normalized(mean, epsilon)

    def jacobian(n: Array, q: Array) -> Array:
        return (jnp.eye(d, dtype=n.dtype) - 1 / d - n[:, None] * n[None, :] / d) / jnp.sqrt(q)

    jacobians = jax.vmap(jacobian)(normal, variance)
    passed = jnp.einsum("tdi,sej,tisj->tdse", jacobians, jacobians, cov)
    second_moment = passed + normal[:, :, None, None] * normal[None, None]
    gain_product = gain[:, None] * gain[None, :]
    return (
        gain_cov[None, :, None, :] * second_moment
        + gain_product[None, :, None, :] * passed
        + bias_cov[None, :, None, :]
    )


def normalized(mean: Array, epsilon: Array | float) -> tuple[Array, Array]:
    """The normalised mean n (T, D) of `proposition4`, and its variance q over the features (T,)."""
    centred = mean - jnp.mean(mean, axis=1, keepdims=True)
    variance = jnp.mean(centred**2, axis=1) + epsilon
    return centred / jnp.sqrt(variance)[:, None], variance
