"""`Mixture`: several models of the same targets, averaged."""

from collections.abc import Sequence
from typing import Any

from flax import nnx
from jax import Array

from moment_jax.covariance.fields import need
from moment_jax.nn.bayesian import Bayesian
from moment_jax.nn.inputs import arguments
from moment_jax.nn.modules import Module
from moment_jax.objectives.predictive import averaged


class Mixture(Module):
    """The equal mixture of `mj.Bayesian` models of one likelihood: one is right, and nobody knows which.

    >>> import jax.numpy as jnp, moment_jax as mj
    >>> nets = [nnx.Linear(3, 1, rngs=nnx.Rngs(seed)) for seed in range(2)]
    >>> model = mj.nn.Mixture([mj.Bayesian(net, mj.Gaussian(0.1)) for net in nets])
    >>> prediction = model.predict(jnp.ones((5, 3)))
    >>> prediction.mean.shape, prediction.log_prob(jnp.zeros((5, 1))).shape
    ((5, 1), (5,))
    """

    def __init__(self, members: Sequence[Bayesian]) -> None:
        known: Any = members if isinstance(members, Sequence) else [members]
        right = known is members and known and all(isinstance(x, Bayesian) for x in known)
        came = ", ".join(type(x).__name__ for x in known) or "an empty one"
        need("mj.nn.Mixture", right, "a list of mj.Bayesian", came, error=TypeError)
        self.members = nnx.List(members)

    def __repr__(self) -> str:
        return f"Mixture of {len(self.members)}, the first of which is {self.members[0]!r}"

    __str__ = __repr__

    def predict(self, *inputs: Any, batch_size: int = 256, **options: Any) -> Any:
        """The average of the members' predictive distributions, with the same methods as one of them.

        Probabilities of classes are averaged. Of real values, `log_prob` is that of the mixture, mean
        and variance follow the law of total variance, and `quantile` solves for the mixture's.
        """
        options |= {"batch_size": batch_size}
        return averaged([member.predict(*inputs, **options) for member in self.members])

    def log_prob(self, x: Any, y: Array, *, batch_size: int = 256, **options: Any) -> Array:
        """Log predictive density of each target, in nats: `predict(x).log_prob(y)`."""
        return self.predict(*arguments(x), batch_size=batch_size, **options).log_prob(y)
