"""Sequences from a random network: greedy decoding, sampling and beam search.

The network is a function with a state of your choice:

    step(state, tokens) -> (mean, cov, state)

`tokens` (B,) int32 are the latest tokens of B rows. `mean` (B, V) and `cov`, variances (B, V) or
covariances (B, V, V), are moments of the next logits; a mean of -inf masks a token. `state` is a pytree
of arrays with a leading axis B: cached keys and values, or the tokens so far and their number. Its
shapes and types must not change.

Tokens are chosen by the predictive distribution E[softmax(logits)], integrated over the logits, instead
of softmax(E[logits]). Weights are averaged anew at each token: a sequence shares no draw of the weights,
and its probability is the product of its tokens' predictive probabilities.
"""

from moment_jax.decoding.beam import Beams, beam_search
from moment_jax.decoding.generation import Decoded, greedy, sample
from moment_jax.objectives.uncertainty import TokenUncertainty, token_uncertainty

__all__ = [
    "Beams",
    "Decoded",
    "TokenUncertainty",
    "beam_search",
    "greedy",
    "sample",
    "token_uncertainty",
]
