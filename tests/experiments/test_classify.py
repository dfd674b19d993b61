"""The comparison of classifiers at a tiny size, its images, and its scores."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from experiments import classify, draws, predictions
from experiments.__main__ import main
from experiments.classify import compared, images, scores, selective
from experiments.classify.images import Task
from experiments.classify.methods import relative
from experiments.data import Images
from moment_jax.inference import laplace_approximation


def test_every_seed_divides_the_images_its_own_way_and_others_are_on_the_same_scale():
    task = images.load("digits", (0, 3))
    assert [part.labels.shape for part in task[:3]] == [(2, 1037), (2, 260), (2, 500)]
    assert not np.array_equal(task.test.labels[0], task.test.labels[1])
    together = np.concatenate([part.images[0] for part in task[:3]]).reshape(1797, -1)
    assert len(np.unique(together.round(4), axis=0)) == 1797
    for given in images.others(task, 50).values():
        assert given.shape == (2, 50, 8, 8)
        assert (given >= task.background[:, None, None, None] - 1e-5).all()
        assert np.ptp(given) > 1


def test_the_temperature_is_found_that_probabilities_were_made_with():
    random = np.random.default_rng(0)
    truth = random.dirichlet(np.full(4, 0.5), size=20_000)
    labels = np.asarray([random.choice(4, p=p) for p in truth])
    for temperature in (0.5, 1.0, 2.0):
        given = scores.tempered(truth, 1 / temperature)
        assert abs(scores.best_temperature(given, labels) / temperature - 1) < 0.03


def test_the_calibration_error_by_its_definition():
    confidence, hits = np.array([0.30, 0.33, 0.6, 1.0]), np.array([True, False, True, True])
    right = (abs(0.63 - 1) + abs(0.6 - 1) + abs(1.0 - 1)) / 4
    found = predictions.calibration_error(confidence, np.stack([hits, hits]))
    np.testing.assert_allclose(found, [right, right])


def test_spreads_are_those_of_the_noise_that_was_trained_with():
    network = mj.nn.MLP([3, 4, 2], rngs=nnx.Rngs(0))
    beliefs = relative(mj.Bayesian(network), 0.1).beliefs
    draw = jax.jit(jax.vmap(draws.relative(beliefs, 0.1)))
    drawn = draw(jax.random.split(jax.random.key(1), 500))
    for belief, arrays in zip(draws.beliefs(beliefs), jax.tree.leaves(drawn), strict=True):
        np.testing.assert_allclose(belief.variance, (0.1 * belief.mean) ** 2, rtol=1e-3)
        error = np.abs(arrays.mean(axis=0) - belief.mean)
        assert np.all(error <= 6 * 0.1 * np.abs(belief.mean) / 500**0.5 + 1e-6)


def test_dropout_drops_whole_inputs_of_kernels():
    network = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
    beliefs = mj.Bayesian(network).beliefs
    attention, dropped = draws.means(beliefs), draws.dropout(beliefs, 0.5)(jax.random.key(1))
    for name, outputs in (("query", (1, 2)), ("out", (2,))):  # (in, H, K) and (H, K, out)
        ratio = dropped[name]["kernel"] / attention[name]["kernel"]
        np.testing.assert_array_equal(ratio.min(axis=outputs), ratio.max(axis=outputs))
        assert set(np.unique(ratio)) == {0, 2}
        np.testing.assert_array_equal(dropped[name]["bias"], attention[name]["bias"])


class Flat(nnx.Module):
    """In the place of the Transformer, whose gradients take minutes to compile."""

    def __init__(self, rngs):
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(x.reshape(*x.shape[:-2], -1))


COUNTS = ["--seeds", "2", "--members", "2", "--plain-steps", "3", "--steps", "2", "--samples", "2"]


@pytest.fixture
def tiny(monkeypatch):
    whole = images.load("digits", (0, 1))
    few = [Images(part.images[:, :60], part.labels[:, :60]) for part in whole[:3]]
    for owner, name, value in (
        (images, "load", lambda *_: Task(*few, whole.background, 4)),
        (images, "vision_transformer", lambda key, **_: Flat(nnx.Rngs(key))),
        (images, "STRUCTURE", mj.Diagonal),
        (images, "ANGLES", (0, 45, 60)),
        (compared, "RATES", (0.1,)),
        (compared, "LAPLACE", {"last-layer Laplace": nnx.PathContains("head")}),
        (laplace_approximation, "PRECISIONS", (100.0,)),
        (classify, "SHIFTED", 50),
    ):
        monkeypatch.setattr(owner, name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
@pytest.mark.filterwarnings("ignore:.*(the edge of the range|chose the factor):UserWarning")
@pytest.mark.filterwarnings("ignore:.*choose a factor roughly:UserWarning")
def test_the_comparison(tmp_path):
    assert main(["classify", "--out", str(tmp_path), *COUNTS]) == 0
    methods = json.loads((tmp_path / "metrics.json").read_text())["methods"]
    assert len(methods) == 10
    nll = {name: record["test"]["nll"]["mean"] for name, record in methods.items()}
    for name, record in methods.items():
        assert np.isfinite([found["mean"] for found in record["test"].values()]).all()
        assert 0 <= record["others"]["letters"]["auroc"]["mean"] <= 1
        assert 1 / 4 <= record["chosen"]["temperature"] <= 4
        difference = record["minus_plain"]["test"]["nll"]["mean"]
        assert difference == pytest.approx(nll[name] - nll["plain"], abs=1e-9)


def test_selective_scores_of_a_known_ranking():
    confidence = np.array([0.6, 0.9, 0.7, 0.8])
    found = selective.scored(np.stack([confidence, 1 - confidence], axis=1), np.array([0, 0, 1, 0]))
    assert found["aurc"] == pytest.approx(np.mean([0, 0, 1 / 3, 1 / 4]))
    assert found["coverage at 0.005"] == found["coverage at 0.01"] == 0.5


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_every_way_to_predict_by_one_posterior_is_scored_and_priced(tmp_path):
    assert main(["classify", "--selective", "--out", str(tmp_path), *COUNTS]) == 0
    ways = json.loads((tmp_path / "selective.json").read_text())["ways"]
    assert len(ways) == 2 + 7
    for record in ways.values():
        assert 0 < record["aurc"]["mean"] < 1
        assert record["price"] > 0
