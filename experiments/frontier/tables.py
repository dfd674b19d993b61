"""The printed tables of the frontier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import moment_jax as mj
from experiments.report import aligned

Record = dict[str, Any]
FIGURES = mj.reference.Agreement._fields
SHORT = ("mean err", "sd ratio", "|r-1|", "corr")
_COSTS = ("time_ratio", "memory_ratio", "compile_ratio")


def accuracy_table(records: list[Record]) -> str:
    """The four figures of the library at the tokens and at the logits, and the truth's own noise.

    Also the relative error of the logits' covariance over the classes (Frobenius), the mean error of
    the predictive probabilities, and the negative log-likelihood beside that of the sampled truth. The
    noise is the mean standard error, at the tokens, of a mean in sd and of a sd relative to it.
    """
    header = [*(f"tok {name}" for name in SHORT), *(f"log {name}" for name in SHORT)]
    header += ["class cov", "p err", "nll", "MC nll", "mean noise", "sd noise"]

    def cells(record: Record) -> list[str]:
        parts = (record["tokens"], record["logits"])
        figures = [part[name] for part in parts for name in FIGURES]
        figures += [record["logits"]["cov_error"], *record["predictive"].values()]
        figures += [record["truth"]["tokens_mean_error"], record["truth"]["tokens_sd_error"]]
        return [f"{figure:.4f}" for figure in figures]

    return _table(records, header, cells)


def cost_table(records: list[Record]) -> str:
    """Ratios to the plain network, and what sampling would need."""
    header = ["fwd time", "fwd mem", "fwd comp", "step time", "step mem", "step comp"]
    header += ["tok MC", "tok adv", "log MC", "log adv"]

    def cells(record: Record) -> list[str]:
        parts = (record["cost"]["forward"], record["cost"].get("step", {}))
        ratios = [
            f"{part[name]:.1f}x" if name in part else "-" for part in parts for name in _COSTS
        ]
        for part in (record["tokens"], record["logits"]):
            # Errors within the truth's own noise bound the advantage from below.
            sign = ">" if part["at_resolution"] else ""
            found = part["monte_carlo"]
            ratios += [f"{sign}{found['samples']:.0f}", f"{sign}{found['ratio']:.1f}"]
        return ratios

    return _table(records, header, cells)


def _table(records: list[Record], header: list[str], cells: Callable[[Record], list[str]]) -> str:
    """A row for each record."""
    label = max(len(record["network"]) for record in records)
    rows = [["network".ljust(label) + "  structure", *header]]
    for record in records:
        name = f"{record['network']:{label}s}  {record['structure']}"
        said = (
            cells(record) if record["status"] == "ok" else [record["status"]] + [""] * len(header)
        )
        rows.append([name, *said[: len(header)]])
    return aligned(rows)


def reasons(records: list[Record]) -> str:
    """One line for each record without figures."""
    return "\n".join(
        f"{record['network']} {record['structure']} {record['status']}: {record['reason']}"
        for record in records
        if record["status"] != "ok"
    )
