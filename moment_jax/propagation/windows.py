"""Windows of an array: convolutions, sums and maxima; and embedding lookups."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import Diagonal, Separable
from moment_jax.covariance.numerics import safe_divide, safe_sqrt
from moment_jax.expectations import ElementwiseMoments
from moment_jax.layers.dense import dense
from moment_jax.layers.embedding import embedding
from moment_jax.layers.params import DenseParams
from moment_jax.posterior import Point
from moment_jax.propagation.errors import refuse
from moment_jax.propagation.graph import Node, as_weight, is_random
from moment_jax.propagation.moments import Axes, Moments, as_rows, fresh, gather, taken
from moment_jax.propagation.propagator import Propagator, rule
from moment_jax.propagation.weights import Weight, select
from moment_jax.xla import diagonal_of


def window_places(
    places: np.ndarray, size: Axes, strides: Axes, padding: Any, dilation: Axes, spread: Axes
) -> np.ndarray:
    """Places of the entries in each window of an array, (*positions, *offsets); -1 is padding.

    All arguments are by axis; `spread` is the array's own dilation, as in transposed convolutions.
    """
    config = [(*pad, step - 1) for pad, step in zip(padding, spread, strict=True)]
    with jax.ensure_compile_time_eval():
        padded = np.asarray(jax.lax.pad(places.astype(np.int32), np.int32(-1), config))
    reach = [(n - 1) * step + 1 for n, step in zip(size, dilation, strict=True)]
    seen = np.lib.stride_tricks.sliding_window_view(padded, reach)
    return seen[tuple(slice(None, None, step) for step in (*strides, *dilation))]


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
    rows = weight.places.transpose(*window, inputs, outputs)
    belief = select(weight.posterior, _ungrouped(rows, p["feature_group_count"]))
    if belief is None:
        return None
    # Windows of the batch and the channels are trivial: of length one, and of all.
    shown = x.places.transpose(batch, *space, channel)
    places = window_places(
        shown,
        (1, *rows.shape[:-2], shown.shape[-1]),
        (1, *p["window_strides"], 1),
        ((0, 0), *p["padding"], (0, 0)),
        (1, *p["rhs_dilation"], 1),
        (1, *p["lhs_dilation"], 1),
    ).reshape(-1, belief.shape[0])
    mean: Any = taken(x.mean, places)
    params = DenseParams(belief)
    zeros = propagator.structure.zeros
    cov: Any = gather(x.cov, places) if random else zeros(mean.shape, mean.dtype)
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


def _ungrouped(rows: np.ndarray, groups: int) -> np.ndarray:
    """Places of a kernel (window * channels, out) in a grouped one; -1 (zero) between groups."""
    inputs, outputs = rows.shape[-2:]
    rows = rows.reshape(-1, inputs, groups, outputs // groups)
    wide = np.full((len(rows), groups, inputs, groups, outputs // groups), -1)
    for i in range(groups):
        wide[:, i, :, i] = rows[:, :, i]
    return wide.reshape(-1, outputs)


def pool_places(node: Node, x: Moments) -> np.ndarray:
    """Places of the entries in each window of a sequence, (T, D, offsets)."""
    p = node.params
    if any(n != 1 for n in p["base_dilation"]):
        raise refuse(f"`{node.op}` of a dilated array", node.source, "Use plain windows.")
    places = window_places(
        x.places, p["window_dimensions"], p["window_strides"], p["padding"], p["window_dilation"],
        p["base_dilation"],
    )  # fmt: skip
    return as_rows(places, *x.natural(), tuple(range(x.ndim, places.ndim)))


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
    root = safe_sqrt(safe_divide(jnp.sum(variance, axis=1), diagonal_of(token_gram)))
    token_gram = root[:, None] * token_gram * root[None, :]
    return type(mapped).from_moments(variance, token_gram, mapped.features(), mapped.pool)


@rule("reduce_window_max")
def _window_max(propagator: Propagator, node: Node) -> Moments:
    """Pairwise maxima, by Clark's mean and variance of the larger of two correlated Gaussians.

    Covariances with other entries are weighted by the probability of being the larger.
    """
    x = propagator.moments(node.operands[0])
    # Pad with an entry of the window itself, which leaves the maximum unchanged.
    seen = np.sort(pool_places(node, x), axis=-1)
    first = np.min(np.where(seen < 0, x.mean.size, seen), axis=-1, keepdims=True)
    seen = np.where(seen < 0, first, seen)
    size, count = seen.shape[1], seen.shape[2]
    cov = gather(x.cov, np.swapaxes(seen, 1, 2).reshape(len(seen), -1))
    means = [x.mean.reshape(-1)[seen[:, :, i]] for i in range(count)]
    between = _between(x.cov, seen)
    mean, shares, variance = _largest(means, between)
    gated = cov.rescale(jnp.concatenate(shares, axis=1))
    linear = gated.map_features(jnp.concatenate([jnp.eye(size, dtype=mean.dtype)] * count))
    # The variances are these; the linear part shrinks where its own are larger.
    own = linear.variance()
    ratio = jnp.where(own > variance, variance / jnp.where(own > 0, own, 1), 1)
    moments = ElementwiseMoments(mean, variance, jnp.sqrt(ratio), jnp.zeros_like(variance))
    propagator.note(node, "maximum over windows", "entries Gaussian, maxima too (Clark)")
    return fresh(mean, linear.elementwise(moments), node.shape, *x.natural())


def _between(cov: Any, seen: np.ndarray) -> Array:
    """Covariances of every pair of a window's n entries, (n, n, T, D)."""
    token, feature = np.divmod(np.moveaxis(seen, -1, 0), cov.shape[1])
    t, d, s, e = token[:, None], feature[:, None], token, feature
    if isinstance(cov, Diagonal):
        own = np.eye(len(token), dtype=bool)[:, :, None, None]
        return jnp.where(own, cov.variance()[token, feature], 0)
    if isinstance(cov, Separable):
        return cov.scale[t, d] * cov.scale[s, e] * cov.token_correlation[t, s]
    return cov.to_dense()[t, d, s, e]


def _largest(means: list[Array], between: Array) -> tuple[Array, list[Array], Array]:
    """The largest of several Gaussians: mean, probability of each being it, and variance."""
    mean, variance = means[0], between[0, 0]
    cross = list(between[0])  # Cov[largest so far, entry i]
    shares = [jnp.ones_like(mean)]
    for i in range(1, len(means)):
        spread = variance + between[i, i] - 2 * cross[i]
        positive = spread > jnp.finfo(mean.dtype).tiny
        theta = jnp.sqrt(jnp.where(positive, spread, 1))
        gap = mean - means[i]
        alpha = gap / theta
        p = jnp.where(positive, jax.scipy.stats.norm.cdf(alpha), (gap >= 0).astype(mean.dtype))
        density = jnp.where(positive, theta * jax.scipy.stats.norm.pdf(alpha), 0)
        new = mean * p + means[i] * (1 - p) + density
        # Clark's variance, arranged so that little cancels.
        second = variance * p + between[i, i] * (1 - p)
        second += gap * (gap * p * (1 - p) + density * (1 - 2 * p))
        variance = jnp.maximum(second - density**2, 0)
        cross = [p * c + (1 - p) * between[i, j] for j, c in enumerate(cross)]
        shares = [*(s * p for s in shares), 1 - p]
        mean = new
    return mean, shares, variance
