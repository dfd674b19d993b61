"""The comparison of Laplace approximations, at a tiny size."""

import importlib.util
import json

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from experiments import laplace
from experiments.__main__ import main
from experiments.classify import images
from experiments.classify.images import Task
from experiments.data import Images

pytestmark = pytest.mark.usefixtures("settings_of_a_user")


@pytest.mark.skipif(importlib.util.find_spec("laplax") is not None, reason="laplax is there")
def test_a_library_that_is_not_there_is_named_before_any_work(capsys):
    assert main(["laplace", "--laplax", "lanczos"]) == 2
    assert "moment_jax[laplax]" in capsys.readouterr().err


def test_differences_are_paired(capsys):
    def network(plain, other):
        record = {"ece": 0.0, "auroc": 0.5, "ms_an_image": 1.0, "fit_s": 1.0}
        return {"plain": {"nll": plain, **record}, "kfac": {"nll": other, **record}}

    laplace.show([network(0.1, 0.2), network(0.3, 0.4)])
    assert "0.3000 ± 0.1000 (+0.1000 ± 0.0000)" in capsys.readouterr().out


@pytest.mark.slow
def test_the_comparison(tmp_path, capsys, monkeypatch):
    whole = images.load("digits", [0])

    def small(name, divisions):
        sizes = zip(whole[:3], (64, 20, 50), strict=True)
        parts = (Images(part.images[:, :n], part.labels[:, :n]) for part, n in sizes)
        return Task(*parts, whole.background, 4)

    monkeypatch.setattr(images, "load", small)
    monkeypatch.setattr(laplace, "RANK", 10)
    monkeypatch.setattr(laplace, "PRECISIONS", np.array([10.0, 1e3]))
    file = tmp_path / "found.json"
    curvatures = ["--laplax", "lanczos"] if importlib.util.find_spec("laplax") else []
    options = ["--seeds", "1", "--plain-steps", "30", "--json", str(file)]
    assert main(["laplace", *options, *curvatures]) == 0
    (network,) = json.loads(file.read_text())["networks"]
    assert set(network) >= {"plain", "temperature", "kfac", "last_layer", "diagonal"}
    assert all(np.isfinite(found["nll"]) for found in network.values())
    assert "temperature" in capsys.readouterr().out
