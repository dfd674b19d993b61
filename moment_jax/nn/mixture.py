"""`Mixture`: several models of the same targets, averaged."""

from collections.abc import Sequence
from typing import Any

from flax import nnx
from jax import Array

from moment_jax.nn.bayesian import Bayesian
from moment_jax.nn.inputs import arguments
from moment_jax.nn.modules import Module
from moment_jax.objectives.predictive import averaged


class Mixture(Module):
    """The equal mixture of some `mj.Bayesian`: one of them is right, and nobody knows which.

    Args:
      members: models of the same likelihood and outputs.

    >>> import jax.numpy as jnp, moment_jax as mj
    >>> nets = [nnx.Linear(3, 1, rngs=nnx.Rngs(seed)) for seed in range(2)]
    >>> model = mj.nn.Mixture([mj.Bayesian(net, mj.Gaussian(0.1)) for net in nets])
    >>> prediction = model.predict(jnp.ones((5, 3)))
    >>> prediction.mean.shape, prediction.log_prob(jnp.zeros((5, 1))).shape
    ((5, 1), (5,))
    """

    def __init__(self, members: Sequence[Bayesian]) -> None:
        known = list(members) if isinstance(members, Sequence) else [members]
        if not isinstance(members, Sequence) or not all(isinstance(x, Bayesian) for x in known):
            came = ", ".join(type(x).__name__ for x in known)
            raise TypeError(f"`mj.nn.Mixture` needs a list of mj.Bayesian. Got {came}.")
        if not known:
            raise TypeError("`mj.nn.Mixture` needs a list of mj.Bayesian. Got an empty one.")
        self.members = nnx.List(members)

    def __repr__(self) -> str:
        """The number of members, and the first one."""
        return f"Mixture of {len(self.members)}, the first of which is {self.members[0]!r}"

    __str__ = __repr__

    def predict(self, *inputs: Any, batch_size: int = 256, **options: Any) -> Any:
        """The average of the members' predictive distributions, with the same methods as one of them.

        Probabilities of classes are averaged. Of real values, `log_prob` is that of the mixture, mean
        and variance follow the law of total variance, and `quantile` solves for the mixture's.
        """
        options = {"batch_size": batch_size, **options}
        return averaged([member.predict(*inputs, **options) for member in self.members])

    def log_prob(self, x: Any, y: Array, *, batch_size: int = 256, **options: Any) -> Array:
        """Log predictive density of each target, in nats: `predict(x).log_prob(y)`."""
        return self.predict(*arguments(x), batch_size=batch_size, **options).log_prob(y)
