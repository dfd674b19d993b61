"""Kinds of variational parameters, so that optimisers and filters can tell them apart."""

from flax import nnx


class VariationalMean(nnx.Param):
    """The mean of a Gaussian belief about one array."""


class VariationalScale(nnx.Param):
    """What the spread of a Gaussian belief is computed from; unconstrained."""


class PriorScale(nnx.Param):
    """The logarithm of the standard deviation of a prior that is learned (empirical Bayes)."""
