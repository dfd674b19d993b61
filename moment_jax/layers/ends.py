"""The two ends of a network: embeddings of tokens, and softmax (Prop. 3)."""

import jax
import jax.numpy as jnp
from jax import Array

from moment_jax.covariance import Covariance
from moment_jax.covariance.fields import known_values, need
from moment_jax.expectations import softmax_expansion
from moment_jax.layers import params as checks
from moment_jax.layers.params import S
from moment_jax.posterior import Point, Posterior
from moment_jax.xla import diagonal_of, materialized, materialized_inputs


@materialized_inputs
def embedding(
    ids: Array, table: Posterior, structure: type[S], *, landmarks: int | None = None
) -> tuple[Array, S]:
    """Moments of the rows of a random table that are looked up by token ids.

    Equal ids share a row and its noise: Cov[x_td, x_se] is that of rows ids[t] and ids[s]. Exact for
    `Full`; other structures keep its projection.

    Args:
      ids: (T,) integers in [0, V), at least one. Known ids are checked; while tracing, ids out of range
        give NaN. Pad with an id of the table.
      table: belief about the (V, D) table.
      structure: the structure of the covariance, such as `mj.Separable`.
      landmarks: of long sequences, see `Separable.zeros`.

    Returns:
      Mean (T, D) and covariance; or ValueError or TypeError if an argument is not so.

    >>> import jax.numpy as jnp, moment_jax as mj
    >>> table = mj.posterior.Factorized(jnp.eye(3), jnp.full((3, 3), 0.25))
    >>> mean, cov = mj.embedding(jnp.array([2, 0, 2]), table, mj.Separable)
    >>> print(mean[0], cov.tokens[0].round(3))
    [0. 0. 1.] [0.75 0.   0.75]
    """
    shape = table.shape if isinstance(table, Posterior) else ()
    came, mend = shape or type(table).__name__, "For a certain one, use mj.posterior.Point(table)."
    rule = "a belief about a (V, D) table (a Posterior)"
    need("embedding", len(shape) == 2, rule, came, mend, TypeError)
    whole = jnp.issubdtype(getattr(ids, "dtype", object), jnp.integer)
    rule = "token ids of shape (T,), integers, of at least one token"
    mend = "Use jnp.asarray; for a batch jax.vmap, or an nnx.Embed."
    need("embedding", whole and ids.ndim == 1 and ids.size, rule, checks.described(ids), mend)
    known = known_values(ids)
    if known is not None:
        rule, least, most = f"token ids from 0 to {shape[0] - 1}", known.min(), known.max()
        mend = "They are rows of the table: encode the text with its vocabulary."
        need("embedding", 0 <= least <= most < shape[0], rule, f"{least} to {most}", mend)
    right = isinstance(structure, type) and issubclass(structure, Covariance)
    need("embedding", right, "a covariance structure", structure, "Use mj.Separable.", TypeError)
    asked, ids = ids, jnp.clip(jnp.asarray(ids), 0, table.shape[0] - 1)
    valid = (asked == ids)[:, None]
    mean = jnp.where(valid, table.mean[ids], jnp.nan)
    if isinstance(table, Point):
        return mean, structure.zeros(mean.shape, mean.dtype, landmarks)
    # Each token selects the first token with its id, so that equal ids share one row.
    first = jnp.argmax(ids[:, None] == ids[None, :], axis=1)
    choice = jax.nn.one_hot(first, ids.shape[0], dtype=mean.dtype)
    choice = jnp.where(valid, choice, jnp.nan)
    certain = materialized(structure.zeros(choice.shape, mean.dtype, landmarks))
    return mean, certain.weight_noise(choice, table.rows(ids))


@materialized_inputs
def softmax(mean: Array, cov: S) -> tuple[Array, S]:
    """Moments of the softmax over the last axis, row by row.

    Mean and variances are those of `expectations.softmax_expansion`, and covariances, including those
    between rows, pass through the expected Jacobians, which are smaller than diag(w_t) - w_t w_t^T at
    the mean weights. The errors are stated there; for 8 independent logits the total variance is 0.99,
    1.02, 1.08 and 1.27 of the sampled one at a logit sd of 1, 2, 3 and 10. The cost is that of (C, C)
    matrices per token.

    Assumes that x is Gaussian. Source: Transformer derivation, Prop. 3 and Eq. 10, 11;
    Brownian motion in the Transformer, Eq. 7 (the second-order term).

    Arguments, (T, C), results and errors are those of `dense`. Entries of -inf in the mean are masked:
    their weights are exactly zero, and so is a fully masked row.
    """
    checks.check_moments("softmax", mean, cov)
    rows = jax.vmap(softmax_expansion)(mean, cov.token_blocks())
    passed = cov.map_each(rows.jacobian)
    return rows.mean, passed.add(type(cov).independent(diagonal_of(rows.rest)))
