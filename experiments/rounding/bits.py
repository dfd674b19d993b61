"""Bits for each matrix of a network, so many for a weight on average at most: five ways to choose."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.rounding import noise
from experiments.rounding.noise import Arrays, Programs

BITS = np.arange(2, 9)  # that a matrix may have
ROUNDS = 10  # gradients at most


def ways(
    programs: Programs, arrays: Arrays, rows: Any, drawn_gradient: Callable[..., Any]
) -> dict[str, Callable[[float], np.ndarray]]:
    """By name: the budget -> the bits of each matrix, chosen for images and labels `rows`.

    The first three are the cheapest allocation by costs (matrices, bits): step^2, the NLL with one
    matrix rounded and the others whole, and the second order of a Taylor series. A gradient by the
    variances of the noise is taken anew after each move, from uniform bits by one bit at a time: further
    off the NLL is no straight line. It ends where it has been, and the best that it has seen is taken.
    """
    tops, fisher = noise.largest(arrays), jax.device_get(programs.fisher(arrays, *rows))
    sizes = np.asarray([arrays[path].size for path in tops])
    variances = np.asarray([noise.step(top.item(), BITS) ** 2 / 12 for top in tops.values()])

    def nll(path: Any, bits: Any) -> float:
        return float(programs.nll(noise.rounded(arrays, {path: tops[path]}, [bits]), *rows)[0])

    def cheapest(costs: Any, budget: float) -> np.ndarray:
        return allocate(np.asarray(costs), BITS, sizes, budget)

    def by_gradient(gradient: Callable[..., Any], budget: float) -> np.ndarray:
        now, seen = cheapest(uniform, budget), dict[tuple[int, ...], float]()
        while len(seen) < ROUNDS and tuple(now) not in seen:
            sd = noise.rounding_sd(arrays, tops, now)
            seen[tuple(now)], (_, by_sd) = jax.device_get(gradient(arrays, sd, *rows))
            slopes = np.asarray([np.sum(by_sd[path] / (2 * sd[path])) for path in tops])
            near = np.abs(BITS - now[:, None]) <= 1
            now = cheapest(np.where(near, slopes[:, None] * variances, np.inf), budget)
        return np.asarray(min(seen, key=lambda bits: seen[bits]))

    uniform = sizes[:, None] * 4.0**-BITS
    alone = [[nll(path, bits) for bits in BITS] for path in tops]
    taylor = np.asarray([np.sum(fisher[path]) / 2 for path in tops])[:, None] * variances
    return {
        "uniform": lambda budget: cheapest(uniform, budget),
        "one at a time": lambda budget: cheapest(alone, budget),
        "Fisher information": lambda budget: cheapest(taylor, budget),
        "gradient, draws": lambda budget: by_gradient(drawn_gradient, budget),
        "gradient, one pass": lambda budget: by_gradient(programs.gradient, budget),
    }


def allocate(costs: np.ndarray, bits: np.ndarray, sizes: np.ndarray, budget: float) -> np.ndarray:
    """The bits of each matrix with the least sum of costs, exactly: a knapsack, by its recursion.

    Args:
      costs: (J, B), infinite for what may not be.
      bits: (B,), whole numbers to choose from.
      sizes: (J,), weights in each matrix.
      budget: bits for a weight on average, no fewer than the least of `bits`.

    >>> allocate(np.asarray([[4.0, 1], [9, 2]]), np.asarray([2, 3]), np.asarray([10, 10]), 2.5)
    array([2, 3])
    """
    sizes = sizes // np.gcd.reduce(sizes)
    room = math.floor(budget * sizes.sum() + 1e-6)
    best, chosen = (
        np.zeros(room + 1),
        [],
    )  # for any number of bits that the matrices so far may have
    for cost, size in zip(costs, sizes, strict=True):
        table = np.full((len(bits), room + 1), np.inf)
        for row, own, spent in zip(table, cost, size * bits, strict=True):
            row[spent:] = best[: max(room + 1 - spent, 0)] + own
        chosen.append(table.argmin(axis=0))
        best = table.min(axis=0)
    found = []
    for size, choice in zip(sizes[::-1], chosen[::-1], strict=True):
        found.append(bits[choice[room]])
        room -= size * found[-1]
    return np.asarray(found[::-1])
