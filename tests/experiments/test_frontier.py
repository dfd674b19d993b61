"""The frontier: its command line, a tiny run with all its figures, and what the figures are made of."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("orbax.checkpoint")

import moment_jax as mj
from experiments import frontier
from experiments.__main__ import main
from experiments.cases import read_case
from experiments.frontier import problems, storage, truth
from experiments.frontier.measure import Accuracy, advantage, largest_array_gib
from experiments.frontier.passes import plain_tokens
from experiments.frontier.problem import NETWORKS, Spec, Training
from experiments.frontier.problems import Problems, random_problem
from experiments.frontier.truth import Sampled, sample

TINY = "random_b1_t4_d8"
FIGURES = {*mj.reference.Agreement._fields, "rms_sd_error", "resolution", "at_resolution"}
COSTS = {"seconds", "time_ratio", "bytes", "memory_ratio", "compile_seconds", "compile_ratio"}


pytestmark = pytest.mark.usefixtures("settings_of_a_user")


def fails(capsys, arguments, *words):
    """The command ends with status 2 and one line that has these words."""
    assert main(["frontier", *map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in words), line


def test_bad_options_are_one_line(capsys, tmp_path):
    fails(capsys, ["--networks", "nothing"], "nothing", TINY)
    fails(capsys, ["--structure", "Foo"], "Foo", "Separable")
    fails(capsys, ["--samples", "3"], "--samples", "16 or more")
    fails(capsys, ["--repeats", "0"], "--repeats", "1 or more")
    fails(capsys, ["--seed", "-1"], "--seed", "0 or more")
    fails(capsys, ["--array-limit", "0"], "--array-limit", "above 0")
    file = tmp_path / "file"
    file.write_text("mine")
    fails(capsys, ["--out", file / "below"], "--out", "may write")
    fails(capsys, ["--out", tmp_path / "out", "--json", tmp_path], "--json", "folder")


@pytest.mark.slow
def test_a_tiny_run_has_all_figures(capsys, tmp_path):
    arguments = ["--networks", TINY, "--structure", "Diagonal", "Full", "--samples", "400"]
    arguments += ["--repeats", "1", "--out", str(tmp_path), "--json", str(tmp_path / "a.json")]
    assert main(["frontier", *arguments, "--array-limit", "1e-6"]) == 0
    records = json.loads((tmp_path / "a.json").read_text())
    assert records == json.loads((tmp_path / "frontier.json").read_text())
    record, skipped, linear, *sampled = records
    assert [each["structure"] for each in (linear, sampled[0])] == ["linearised", "10 sampled"]
    for each in (record, linear, *sampled):
        assert each["predictive"]["probability_error"] < 0.2
        assert each["logits"]["cov_error"] < 3
    assert sampled[-1]["logits"]["sd_error"] < sampled[0]["logits"]["sd_error"]
    assert skipped["status"] == "skipped"
    assert "--array-limit" in skipped["reason"]
    assert record["about"]["tokens_per_sequence"] == 4
    assert record["truth"]["samples"] == 400
    for output in ("tokens", "logits"):
        assert set(record[output]) - {"cov_error"} == {*FIGURES, "monte_carlo"}
        assert 0.2 < record[output]["sd_ratio"] < 1.2
        assert set(record[output]["monte_carlo"]) == {"formula", "samples", "ratio"}
    for kind in ("forward", "step"):
        assert set(record["cost"][kind]) == COSTS
        assert all(value > 0 for value in record["cost"][kind].values())
    said = capsys.readouterr().out
    assert f"{TINY} Full skipped" in said


def test_a_bad_network_does_not_stop_the_others(capsys, tmp_path, monkeypatch):
    def problem(spec, seed):
        if spec.name == TINY:
            raise ValueError("made to fail")
        return random_problem(spec, seed)

    measured = {"network": "random_b1_t16_d32", "structure": "Diagonal", "status": "skipped"}
    monkeypatch.setattr(problems, "random_problem", problem)
    monkeypatch.setattr(Problems, "truth", lambda self, problem: sample(random, 16, 0))
    monkeypatch.setattr(frontier, "measure", lambda *_: [{**measured, "reason": "of no interest"}])
    random = random_problem(NETWORKS[TINY], 0)
    arguments = ["--networks", TINY, "random_b1_t16_d32", "--structure", "Diagonal"]
    assert main(["frontier", *arguments, "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith(f"experiments: failed: {TINY}")
    assert "ValueError: made to fail" in said.out
    records = json.loads((tmp_path / "frontier.json").read_text())
    assert [record["status"] for record in records] == ["failed", "skipped"]


def test_a_trained_network_is_kept(tmp_path, monkeypatch):
    spec = Spec("trained", 1, 4, 8, batch=2, training=Training(0.1, seed=1, steps=3))
    first = Problems(tmp_path, 20, 0)
    problem = first.problem(spec)
    sampled = first.truth(problem)
    assert np.isfinite(problem.inputs).all()

    def never(*_):
        raise AssertionError("made again")

    monkeypatch.setattr(problems, "fit", never)
    monkeypatch.setattr(problems, "sample", never)
    again = Problems(tmp_path, 20, 0)
    restored = again.problem(spec)
    for left, right in zip(
        jax.tree.leaves(problem.blocks), jax.tree.leaves(restored.blocks), strict=True
    ):
        np.testing.assert_allclose(left, right, rtol=1e-6)
    for left, right in zip(sampled, again.truth(restored), strict=True):
        np.testing.assert_array_equal(left, right)
    with pytest.raises(AssertionError, match="made again"):
        Problems(tmp_path, 21, 0).truth(restored)
    case = read_case(tmp_path / "trained" / "trained.npz")
    kernel = problem.each_block()[0].feed_forward.hidden.kernel
    np.testing.assert_allclose(case.blocks[0].feed_forward.hidden.kernel.mean, kernel.mean)
    np.testing.assert_array_equal(case.truth.sd, sampled.tokens.sd)


def test_a_damaged_file_counts_as_none(tmp_path):
    store = storage.Store(tmp_path)
    store.save("a", {"x": 1}, {"y": np.ones(3)})
    assert store.load("a", {"x": 2}) is None
    (tmp_path / "a.npz").write_bytes(store.path("a").read_bytes()[:-20])
    assert store.load("a", {"x": 1}) is None
    assert store.load("b", {}) is None


def test_the_truth_is_that_of_monte_carlo(monkeypatch):
    monkeypatch.setattr(truth, "CHUNK_NUMBERS", 1000)  # eleven draws at a time
    problem = random_problem(NETWORKS[TINY], 3)
    sampled = sample(problem, 50, 7)

    def tokens(arrays):
        return plain_tokens(problem.spec, arrays, jnp.asarray(problem.inputs))

    wanted = mj.monte_carlo(tokens, problem.blocks, jax.random.key(7), 50)
    for mine, theirs in zip(
        sampled.tokens,
        (wanted.mean, wanted.standard_deviation, wanted.mean_error, wanted.sd_error),
        strict=True,
    ):
        np.testing.assert_allclose(mine, theirs, rtol=2e-3, atol=1e-5)


def test_moments_and_their_errors_are_the_textbooks(monkeypatch):
    monkeypatch.setattr(truth, "COLUMNS", 2)
    draws = np.random.default_rng(0).gamma(2.0, size=(1000, 3)).astype(np.float32)
    exact = draws.astype(np.float64)
    variance = exact.var(axis=0, ddof=1)
    fourth = ((exact - exact.mean(axis=0)) ** 4).mean(axis=0)
    square = (fourth - exact.var(axis=0) ** 2 * 997 / 999) / 1000
    wanted = exact.mean(axis=0), variance**0.5, (variance / 1000) ** 0.5
    wanted = (*wanted, square**0.5 / (2 * variance**0.5))
    for mine, textbook in zip(truth.moments(draws, (3,)), wanted, strict=True):
        np.testing.assert_allclose(mine, textbook, rtol=1e-5)


def test_fewer_gaussian_draws_err_as_the_formula_says():
    draws = np.random.default_rng(1).standard_normal((8192, 200))
    for size in (8, 64, 512):
        square = truth._subsampled(draws, draws.std(axis=0, ddof=1), size).mean()
        # E (s/sigma - 1)^2 = 2 (1 - c4), which is 1 / (2 (n - 1)) but for a term of higher order.
        assert abs(square * 2 * (size - 1) - 1) < 0.5 / size + 0.06


def test_the_advantage_of_gaussian_draws():
    sizes = 2 ** np.arange(1, 10)
    curve = 1 / np.sqrt(2 * (sizes - 1))
    for error in (1.0, 0.1, 0.03, 0.004):
        found = advantage(error, sizes, curve, cost=4.0)
        wanted = max(2.0, 1 + 1 / (2 * error**2))
        np.testing.assert_allclose(found, (1 + 1 / (2 * error**2), wanted, wanted / 4), rtol=1e-9)


def test_the_error_is_never_below_the_truths_noise():
    rng = np.random.default_rng(2)
    sd = rng.uniform(1, 2, 1000)
    sampled = sd * (1 + 0.02 * rng.standard_normal(1000))
    moments = Sampled(np.zeros(1000), sampled, 0.1 * sampled, 0.02 * sampled)
    exact = Accuracy.of(np.zeros(1000), sampled, moments)
    assert exact.at_resolution
    np.testing.assert_allclose(exact.rms_sd_error, 0.02, rtol=1e-6)
    wrong = Accuracy.of(np.zeros(1000), 1.1 * sd, moments)
    assert not wrong.at_resolution
    assert abs(wrong.rms_sd_error - 0.1) < 0.005
    with pytest.raises(ValueError, match="not finite"):
        Accuracy.of(np.zeros(1000), sampled * np.nan, moments)


def test_the_largest_arrays():
    spec = Spec("any", 1, 16, 32, batch=2, num_heads=2)
    numbers = {
        mj.Full: (16 * 128) ** 2,
        mj.TokenBlock: 2 * 16 * 128**2,
        mj.Separable: 2 * 2 * 16**2,
    }
    for structure, number in numbers.items():
        assert largest_array_gib(spec, structure) == number * 4 / 2**30
