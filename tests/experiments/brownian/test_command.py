"""The Brownian experiment on the network of a tiny main job."""

import json

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("orbax.checkpoint")

from experiments.__main__ import main

FIGURES = ("attention.png", "diffusion.png", "heads.png", "increments.png")


pytestmark = pytest.mark.usefixtures("settings_of_a_user")


@pytest.mark.slow
def test_figures_and_metrics(main_job, tmp_path, capsys):
    # As many training as test images: the masked passes are one program.
    small = ["--images", "20", "--head-images", "20", "--samples", "2"]
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


def test_it_needs_a_finished_run(tmp_path, capsys):
    for arguments, word in [
        (["--run", str(tmp_path)], "no finished run"),
        (["--images", "3"], "20 or more"),
    ]:
        assert main(["brownian", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert word in line
