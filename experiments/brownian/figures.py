"""The figures of the Brownian experiment."""

import numpy as np
from matplotlib.axes import Axes

from experiments.brownian.motion import TokenMotion
from experiments.figures import BAYES, PLAIN, WRONG, Figure, plt, styled

EDGES = 20  # steps drawn in a graph: the most frequent ones
MARKS = "o^sD"  # and colours, of blocks in turn
COLOURS = BAYES, PLAIN, WRONG, "0.3"


@styled
def attention(image: np.ndarray, chains: dict[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """Each head's attention graph over the image: edges show the flow, discs the stationary law."""
    figure, axes = plt.subplots(1, len(chains), figsize=(2.5 * len(chains), 3.0), squeeze=False)
    for axis, (name, (chain, law)) in zip(axes[0], chains.items(), strict=True):
        _graph(axis, image, chain, law)
        axis.set_title(name)
    said = f"discs: stationary law, lines: the {EDGES} steps walked most"
    figure.suptitle(f"Attention as a walk, first block; {said}", fontsize=9)
    return figure


def _graph(axes: Axes, image: np.ndarray, chain: np.ndarray, law: np.ndarray) -> None:
    side = round(len(law) ** 0.5)
    size = image.shape[0] / side
    column, row = np.meshgrid(np.arange(side), np.arange(side))
    x, y = ((part.ravel() + 0.5) * size - 0.5 for part in (column, row))
    axes.imshow(image, cmap="gray_r", interpolation="nearest", alpha=0.35)
    flow = law[:, None] * chain
    flow = flow * ~np.eye(len(law), dtype=bool)
    most = np.argsort(flow, axis=None)[::-1][:EDGES]
    for i, j in zip(*np.unravel_index(most, flow.shape), strict=True):
        strength = flow[i, j] / flow.max()
        axes.annotate(
            "", (x[j], y[j]), (x[i], y[i]),
            arrowprops={"arrowstyle": "-|>", "color": BAYES, "alpha": 0.15 + 0.75 * strength,
                        "linewidth": 0.4 + 1.6 * strength, "mutation_scale": 6,
                        "connectionstyle": "arc3,rad=0.15", "shrinkA": 3, "shrinkB": 3},
        )  # fmt: skip
    axes.scatter(x, y, s=900 * law / max(law.max(), 0.15), color=PLAIN, alpha=0.65, linewidth=0)
    axes.set_axis_off()


@styled
def increments(quantiles: np.ndarray, found: list[np.ndarray], motion: TokenMotion) -> Figure:
    """Steps of each block against normal quantiles, and the growth of the variance with depth."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 4.2))
    ends = quantiles[[0, -1]]
    left.plot(ends, ends, color="0.6", linewidth=1, label="normal")
    for i, values in enumerate(found):
        marker = {"marker": MARKS[i % 4], "markersize": 2.5, "color": COLOURS[i % 4]}
        left.plot(quantiles, values, linestyle="", label=f"block {i + 1}", **marker)
    left.legend(loc="upper left", markerscale=2)
    left.set(xlabel="normal quantile", ylabel="quantile of the standardised steps")
    left.set_title("Steps of the tokens by coordinate")
    growth = motion.growth
    depth = np.arange(len(growth.variance))
    right.plot(
        depth, growth.variance, "o-", color=BAYES, label="variance of the way from the start"
    )
    summed = growth.brownian_variance
    right.plot(
        depth, summed, "s--", color="0.3", mfc="none", label="the same, were steps independent"
    )
    right.plot(depth[1:], growth.displacement, "^:", color=PLAIN, label="mean squared displacement")
    straight = growth.brownian_variance[-1] * depth / depth[-1]
    right.plot(depth, straight, color="0.6", linewidth=1, label="equal steps (Brownian law)")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=7)
    right.set(xlabel="blocks", ylabel="squared length per feature", xticks=depth)
    law = "with depth"
    if growth.exponent is not None:
        law = f"as depth^{growth.exponent:.2f} ± {growth.exponent_error:.3f}"
    right.set_title(f"Displacement grows {law}")
    return figure
