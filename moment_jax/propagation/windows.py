"""Windows of an array: convolutions and sums; and embedding lookups."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import Separable
from moment_jax.covariance.numerics import safe_divide, safe_sqrt
from moment_jax.layers.dense import dense
from moment_jax.layers.embedding import embedding
from moment_jax.layers.params import DenseParams
from moment_jax.posterior import Factorized, Point
from moment_jax.propagation.errors import refuse
from moment_jax.propagation.graph import Node, as_weight, is_random
from moment_jax.propagation.moments import Moments, as_rows, fresh, gather
from moment_jax.propagation.propagator import Propagator, rule
from moment_jax.propagation.weights import Weight
from moment_jax.xla import rows_diagonal

# size, strides, padding and dilation, each by axis
Window = tuple[Sequence[int], Sequence[int], Sequence[tuple[int, int]], Sequence[int]]


def window_places(shape: tuple[int, ...], window: Window) -> np.ndarray:
    """Flat indices of the entries in each window of an array, (*positions, *offsets); -1 is padding."""
    size, strides, padding, dilation = window
    index = np.zeros((1,) * (2 * len(shape)), int)
    inside = np.ones_like(index, bool)
    for i, n in enumerate(shape):
        reach = (size[i] - 1) * dilation[i] + 1
        count = (n + sum(padding[i]) - reach) // strides[i] + 1
        first = np.arange(count)[:, None] * strides[i] - padding[i][0]
        at = first + np.arange(size[i]) * dilation[i]
        axes = [1] * (2 * len(shape))
        axes[i], axes[i + len(shape)] = at.shape
        index = index * n + at.reshape(axes)
        inside = inside & ((at >= 0) & (at < n)).reshape(axes)
    return np.where(inside, index, -1)


@rule("conv_general_dilated")
def _convolution(propagator: Propagator, node: Node) -> Moments | None:
    """A dense layer of the windows: exact for `Full`, else as far as the structure represents them."""
    p, (image, kernel) = node.params, node.operands
    weight = as_weight(kernel)
    if weight is None or p["batch_group_count"] != 1:
        return None
    (batch, channel, *space), (outputs, inputs, *window), out = p["dimension_numbers"]
    random = isinstance(image, Node)
    x = propagator.moments(image) if random else propagator.certain(image, (channel,))
    shown = _dilated(x.places, space, p["lhs_dilation"])
    rows = weight.places.transpose(*window, inputs, outputs)
    belief = _grouped_kernel(
        Weight(weight.posterior, rows), p["feature_group_count"], shown.shape[channel]
    )
    if belief is None:
        return None
    # Windows of the batch and the channels are trivial: of length one, and of all.
    lead = (batch, *space, channel)
    seen = window_places(
        tuple(shown.shape[i] for i in lead),
        (
            (1, *(weight.shape[i] for i in window), shown.shape[channel]),
            (1, *p["window_strides"], 1),
            ((0, 0), *p["padding"], (0, 0)),
            (1, *p["rhs_dilation"], 1),
        ),
    )
    seen = seen.reshape(-1, belief.shape[0])
    places = np.where(seen < 0, -1, shown.transpose(lead).ravel()[seen])
    mean: Any = jnp.where(places < 0, 0, x.mean.reshape(-1)[np.maximum(places, 0)])
    zeros = propagator.structure.zeros
    cov: Any = gather(x.cov, places) if random else zeros(mean.shape, mean.dtype)
    params = DenseParams(belief)
    if random and isinstance(cov, Separable):
        mapped = cov.map_features(belief.mean)
        out_mean = params.mean_output(mean)
        out_cov = with_window_variance(mapped, x.cov, places, belief.mean)
        if not isinstance(belief, Point):
            out_cov = out_cov.add(cov.weight_noise(mean, belief))
    else:
        out_mean, out_cov = dense(mean, cov, params)
    assumed = "input and kernel independent; windows as the structure represents them"
    propagator.note(node, "convolution", assumed)
    return fresh(out_mean, out_cov, node.shape, (out[0], *out[2:]), (out[1],))


def _dilated(places: np.ndarray, axes: Any, steps: Any) -> np.ndarray:
    """Places with padding between the entries, as in transposed convolutions."""
    if all(n == 1 for n in steps):
        return places
    step = dict(zip(axes, steps, strict=True))
    shape = [(n - 1) * step.get(i, 1) + 1 for i, n in enumerate(places.shape)]
    wide = np.full(shape, -1)
    wide[tuple(slice(None, None, step.get(i, 1)) for i in range(places.ndim))] = places
    return wide


def _grouped_kernel(weight: Weight, groups: int, channels: int) -> Any:
    """The belief about the kernel (window * channels, out), zero between groups."""
    *window, inputs, outputs = weight.shape
    n = len(window)
    belief = weight.kernel(tuple(range(n + 1)), (n + 1,))
    if groups == 1:
        return belief
    if not isinstance(belief, Point | Factorized):
        return None
    own = np.arange(outputs) // (outputs // groups)
    place = own[None, :] * inputs + np.arange(inputs)[:, None]  # each output's input channels
    index = np.arange(math.prod(window))[:, None, None] * channels + place
    index, columns = index.reshape(-1, outputs), np.arange(outputs)[None, :]

    def spread(array: Array) -> Array:
        zeros = jnp.zeros((math.prod(window) * channels, outputs), array.dtype)
        return zeros.at[index, columns].set(array)

    return type(belief)(*jax.tree.map(spread, jax.tree.leaves(belief)))


def pool_places(node: Node, x: Moments) -> np.ndarray:
    """Places of the entries in each window of a sequence, (T, D, offsets)."""
    p = node.params
    if any(n != 1 for n in p["base_dilation"]):
        raise refuse(f"`{node.op}` of a dilated array", node.source, "Use plain windows.")
    window = (p["window_dimensions"], p["window_strides"], p["padding"], p["window_dilation"])
    seen = window_places(x.shape, window)
    places = np.where(seen < 0, -1, x.places.ravel()[seen])
    return as_rows(places, *x.natural(), tuple(range(len(x.shape), seen.ndim)))


@rule("reduce_window_sum")
def _window_sum(propagator: Propagator, node: Node) -> Moments | None:
    m = propagator.moments(node.operands[0])
    places = pool_places(node, m)
    num_tokens, d = m.mean.shape
    # Only windows over tokens, the same for every feature, are a map of the tokens.
    feature = np.arange(d)[:, None]
    if places.shape[1] != d or (np.where(places < 0, feature, places % d) != feature).any():
        return None
    token = np.where(places < 0, num_tokens, places // d)[:, 0]  # (T', offsets)
    choose = np.zeros((len(token), num_tokens + 1))
    np.add.at(choose, (np.arange(len(token))[:, None], token), 1)
    weights = jnp.asarray(choose[:, :-1], m.mean.dtype)
    propagator.note(node, "sum over windows")
    return fresh(weights @ m.mean, m.cov.map_tokens(weights), node.shape, *m.natural())


@rule("gather")
def _rows(propagator: Propagator, node: Node) -> Moments | None:
    """Rows of a random table; the ids may be traced."""
    table, ids = node.operands
    numbers = node.params["dimension_numbers"]
    if not isinstance(table, Weight) or is_random(ids) or table.ndim != 2:
        return None
    by_row = numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
    if not by_row or node.params["slice_sizes"][1] != table.shape[1]:
        return None
    belief = table.kernel((0,), (1,))
    if belief is None:
        return None
    mean, cov = embedding(jnp.reshape(ids, (-1,)), belief, propagator.structure)
    features = tuple(numbers.offset_dims)
    tokens = tuple(i for i in range(node.ndim) if i not in features)
    propagator.note(node, "embedding", "rows as the family represents them")
    return fresh(mean, cov, node.shape, tokens, features)


def with_window_variance(mapped: Any, image: Any, places: np.ndarray, kernel: Array) -> Any:
    """The covariance of windows @ kernel, with variances that use the correlation between pixels.

    In `Separable`, all windows share the feature correlation of their sum, which treats the offsets of a
    window as one pixel. The image's token correlation holds the true correlation of neighbours; it gives
    the variances. The token Gram matrix is rescaled to fit; the covariance of the sum is already exact.
    Costs P K C^2 O for P windows of K pixels.

    Args:
      mapped: covariance of the output, (P, O), by `map_features`.
      image: covariance of the image's sequence, (T, C).
      places: flat index into the image of each window entry, (P, K C); -1 is zero.
      kernel: (K C, O).
    """
    if not isinstance(mapped, Separable):
        return mapped
    channels = image.shape[1]
    if places.shape[1] % channels or places.shape[1] == channels:
        return mapped
    by_offset = (len(places), places.shape[1] // channels, channels)
    tokens = (np.maximum(places, 0) // channels).reshape(by_offset)[:, :, 0]
    known = (places >= 0).reshape(by_offset)
    seen = tokens[:, :, None] * channels + np.arange(channels)
    if not (known == known[:, :, :1]).all() or (seen != places.reshape(by_offset))[known].any():
        return mapped  # windows over channels, or an image of other tokens
    scale = jnp.where(known, image.scale[tokens], 0)  # (P, K, C)
    pairs = image.token_correlation[tokens[:, :, None], tokens[:, None, :]]

    def of_output(column: Array) -> Array:
        gained = scale * column[None]
        return jnp.sum((gained @ image.feature_correlation) @ gained.mT * pairs, axis=(1, 2))

    columns = jnp.moveaxis(kernel.reshape(*by_offset[1:], -1), -1, 0)
    variance = jnp.maximum(jax.lax.map(of_output, columns), 0).T
    token_gram = mapped.token_gram()
    root = safe_sqrt(safe_divide(jnp.sum(variance, axis=1), rows_diagonal(token_gram)))
    token_gram = root[:, None] * token_gram * root[None, :]
    return type(mapped).from_moments(variance, token_gram, mapped.features(), mapped.pool)
