"""Which gradients the curvature is made of: of sampled targets, or of those in the data."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class SampledFisher:
    """The true Fisher matrix: targets are drawn from the model's own prediction.

    That takes one more backward pass, to the outputs of the layers.

    The loss function returns (loss, prediction), see `CategoricalPrediction` and its like.

    Args:
      examples: take the curvature of the first so many examples of the batch alone, by a forward and a
        backward pass of their own; None for the whole batch, whose forward pass is shared.
    """

    examples: int | None = None

    def __post_init__(self) -> None:
        _check_examples("SampledFisher", self.examples)


@dataclasses.dataclass(frozen=True)
class EmpiricalFisher:
    """Outer products of the loss's own gradients: no second backward pass, and no true curvature.

    Warning: it is not the Fisher matrix. Where the fit is good its gradients vanish, and so does what
    should bound the step. It is here for comparison and for losses that have no predictive distribution.

    The loss must be an average over the examples of the batch, the first axis of its first array.

    Args:
      examples: as for `SampledFisher`.
    """

    examples: int | None = None

    def __post_init__(self) -> None:
        _check_examples("EmpiricalFisher", self.examples)


Fisher = SampledFisher | EmpiricalFisher


def _check_examples(name: str, examples: int | None) -> None:
    if examples is not None and examples < 1:
        raise ValueError(f"`{name}` needs examples >= 1, or None for all. Got {examples}.")
