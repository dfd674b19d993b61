"""Two tables that `vega_datasets` ships: whole numbers, real ones, dates, a category, missing values."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.uci.sets import RegressionSet

FRAMES = {"cars": ("cars.json", "Miles_per_Gallon"), "weather": ("seattle-weather.csv", "temp_max")}
"""Files and targets, by the names of the sets."""
SHARE = 0.1  # of the rows, to test on


def read_frame(name: str, splits: int) -> RegressionSet:
    """Splits by chance; x is a DataFrame (N, D), in the order of its dates."""
    import pandas as pd
    from vega_datasets import data

    file, target = FRAMES[name]
    path = Path(data.cars.filepath).with_name(file)
    frame = pd.read_json(path) if path.suffix == ".json" else pd.read_csv(path)
    dated = pd.to_datetime(frame.pop("Year" if name == "cars" else "date"))
    frame["date"] = dated.dt.year if name == "cars" else dated.dt.dayofyear
    frame = frame.drop(columns="Name", errors="ignore").dropna(subset=target)
    y = frame.pop(target).to_numpy(float)
    orders = [np.random.default_rng(split).permutation(len(y)) for split in range(splits)]
    kept = round(SHARE * len(y))
    return RegressionSet(name, frame, y, [o[kept:] for o in orders], [o[:kept] for o in orders])


def rows(x: Any, train: np.ndarray, test: np.ndarray) -> list[np.ndarray]:
    """Those to train on and to test; of a DataFrame encoded as the first ones say."""
    if isinstance(x, np.ndarray):
        return [x[train], x[test]]
    from sklearn.compose import make_column_selector, make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.preprocessing import OneHotEncoder

    encode = make_column_transformer(
        (OneHotEncoder(sparse_output=False), make_column_selector(dtype_exclude="number")),
        remainder=SimpleImputer(strategy="median", add_indicator=True),
    )
    return [encode.fit_transform(x.iloc[train]), encode.transform(x.iloc[test])]
