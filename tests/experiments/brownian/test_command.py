"""The Brownian experiment on the network of a tiny main job."""

import json

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("orbax.checkpoint")

from experiments.__main__ import main

FIGURES = ("attention.png", "heads.png", "increments.png")


pytestmark = pytest.mark.usefixtures("settings_of_a_user")


@pytest.mark.slow
def test_figures_and_metrics(main_job, tmp_path, capsys):
    # As many training as test images: the masked passes are one program.
    small = ["--images", "20", "--head-images", "20"]
    small += ["--run", str(main_job.folder), "--out", str(tmp_path)]
    assert main(["brownian", *small]) == 0
    said = capsys.readouterr().out
    assert "Brownian" in said
    assert "heads kept" in said
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["motion"]["sentence"] in said
    for chain in metrics["attention"]["chains"]:
        balanced = chain["detailed_balance_gap"] < 1e-4
        assert balanced == (chain["chain"] == "identity projections")
    assert np.isfinite(metrics["heads"]["importance"]["elbo_change"]).all()
    for name in FIGURES:
        assert (tmp_path / name).stat().st_size > 10_000
