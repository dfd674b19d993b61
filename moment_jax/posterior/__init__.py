"""Gaussian beliefs about one array of weights.

| family | Cov[w_io, w_jp] of a kernel (in, out) | numbers kept | also for |
|---|---|---|---|
| `Point` | 0 | in out | any array |
| `Factorized` | [i = j][o = p] v_io | 2 in out | any array |
| `OutputShared` | [i = j][o = p] v_o, the derivation's | in out + out | |
| `KroneckerEigen` | sum_ab U_ia U_ja W_ob W_pb v_ab | 2 in out + in^2 + out^2 | |
| `FullNormal` | everything | in out + (in out)^2 | any array |

A kernel may also be an array of more axes, such as (D, heads, width): its `matrix` has two. Beliefs
about trained networks come from `mj.laplace`.

"Any array" includes a bias or a gain (D,). A belief is an immutable pytree: it passes through `jit`,
`vmap`, `grad` and `scan`, and an optimiser updates its arrays. A stack of beliefs (one for each layer,
say) has leading axes on every array; call its methods under `jax.vmap`.
"""

from moment_jax.posterior.base import GaussianPrior, Posterior, sample_params
from moment_jax.posterior.correlated import FullNormal, KroneckerEigen
from moment_jax.posterior.independent import Factorized, OutputShared, Point

__all__ = [
    "Factorized", "FullNormal", "GaussianPrior", "KroneckerEigen", "OutputShared", "Point",
    "Posterior", "sample_params",
]  # fmt: skip
