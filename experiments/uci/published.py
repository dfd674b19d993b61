"""Test results of others on the same sets and splits: one hidden layer of 50 ReLU units."""

from __future__ import annotations

SETS = ("boston", "energy", "yacht")
NLL = {
    "PBP (Hernandez-Lobato 2015)": (2.57, 2.04, 1.63),
    "MC dropout, tuned (Gal 2018)": (2.40, 1.21, 1.25),
    "deep ensemble of 5 (Lakshminarayanan 2017)": (2.41, 1.38, 1.18),
    "DVI, heteroscedastic (Wu 2019)": (2.41, 1.01, 0.47),
    "DVI, homoscedastic (Wu 2019)": (2.58, 2.09, 1.41),
    "MCVI (Wu 2019)": (2.46, 1.03, 0.68),
}
"""Mean negative log-likelihood over the splits; Lakshminarayanan 2017, Table 1, Wu 2019, Table 2."""

RMSE = {
    "PBP (Hernandez-Lobato 2015)": (3.01, 1.80, 1.02),
    "MC dropout, tuned (Gal 2018)": (2.90, 0.54, 0.67),
    "deep ensemble of 5 (Lakshminarayanan 2017)": (3.28, 2.09, 1.58),
}


def of(name: str) -> dict[str, dict[str, float]]:
    """What others have for this set: nothing for a set that is not theirs."""
    if name not in SETS:
        return {}
    place = SETS.index(name)
    return {
        who: {"nll": values[place], **({"rmse": RMSE[who][place]} if who in RMSE else {})}
        for who, values in NLL.items()
    }
