"""Sequences from a random network: greedy decoding, sampling and beam search.

The network is a function of a state, which the caller makes of whatever it likes:

    step(state, tokens) -> (mean, cov, state)

`tokens` (B,) int32 are those just produced for B rows; `mean` (B, V) and `cov`, variances (B, V) or
covariances (B, V, V), are moments of the logits of the next ones; a mean of -inf masks a token. `state`
is a pytree of arrays with a leading axis B: kept keys and values, or the tokens so far and their
number. What comes out has the shapes and types of what came in.

Tokens are chosen by the predictive distribution E[softmax(logits)], integrated over the logits, in the
place of softmax(E[logits]). The weights are averaged anew at each token: no draw of the weights is
shared by a sequence, whose probability is the product of its tokens' predictive probabilities.
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
