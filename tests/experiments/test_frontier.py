"""The frontier: its command line, a tiny run with all its figures, and what the figures are made of."""

import json

import jax
import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("orbax.checkpoint")

import moment_jax as mj
from experiments.__main__ import main
from experiments.cases import read_case
from experiments.frontier import measure, problems
from experiments.frontier.measure import accuracy, sampled_networks
from experiments.frontier.passes import classify, plain_tokens
from experiments.frontier.problem import NETWORKS, Spec, Training, random_problem
from experiments.frontier.problems import Problems
from experiments.frontier.truth import Sampled, Truth, sample
from experiments.propagation import full_gib

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
    file = tmp_path / "file"
    file.write_text("mine")
    fails(capsys, ["--out", file / "below"], "--out", "may write")


@pytest.mark.slow
def test_a_tiny_run_has_all_figures(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "ARRAY_GIB", 1e-6)
    monkeypatch.setattr(measure, "SAMPLED", (10, 100))
    arguments = ["--networks", TINY, "--structure", "Diagonal", "Full", "--samples", "400"]
    assert main(["frontier", *arguments, "--repeats", "1", "--out", str(tmp_path)]) == 0
    records = json.loads((tmp_path / "frontier.json").read_text())
    record, skipped, linear, *sampled = records
    assert [each["structure"] for each in (linear, sampled[0])] == ["linearised", "10 sampled"]
    for each in (record, linear, *sampled):
        assert each["probability_error"] < 0.2
        assert each["logits"]["cov_error"] < 3
    assert sampled[-1]["logits"]["sd_error"] < sampled[0]["logits"]["sd_error"]
    assert skipped["status"] == "skipped"
    assert "one array" in skipped["reason"]
    for output in ("tokens", "logits"):
        assert set(record[output]) - {"cov_error"} == {*FIGURES, "monte_carlo"}
        assert 0.2 < record[output]["sd_ratio"] < 1.2
        assert set(record[output]["monte_carlo"]) == {"samples", "ratio"}
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
    monkeypatch.setattr(
        measure, "records_of", lambda *_: [{**measured, "reason": "of no interest"}]
    )
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
    np.testing.assert_array_equal(case.truth.sd, sampled.tokens.std)


def test_a_damaged_file_counts_as_none(tmp_path):
    path = tmp_path / "a.npz"
    problems.save(path, {"x": 1}, {"y": np.ones(3)})
    assert problems.load(path, {"x": 1}).keys() == {"y"}
    assert problems.load(path, {"x": 2}) is None
    path.write_bytes(path.read_bytes()[:-20])
    assert problems.load(path, {"x": 1}) is None
    assert problems.load(tmp_path / "b.npz", {}) is None


def test_the_truth_is_the_textbooks_of_its_draws():
    problem = random_problem(NETWORKS[TINY], 3)
    found = sample(problem, 50, 7)

    @jax.jit
    def draw(key):
        arrays = mj.posterior.sample_params(problem.blocks, key)
        tokens = plain_tokens(problem.spec, arrays, problem.inputs)
        return tokens, classify(tokens, problem.head)

    keys = [jax.random.fold_in(jax.random.key(7), i) for i in range(50)]
    tokens, logits = (np.stack(part) for part in zip(*map(draw, keys), strict=True))
    for drawn, sampled in ((tokens, found.tokens), (logits, found.logits)):
        np.testing.assert_allclose(sampled.mean, drawn.mean(axis=0), rtol=2e-3, atol=1e-5)
        np.testing.assert_allclose(sampled.std, drawn.std(axis=0, ddof=1), rtol=2e-3)
        np.testing.assert_allclose(sampled.mean_error, sampled.std / 50**0.5, rtol=1e-5)
    cov = np.stack([np.cov(logits[:, i], rowvar=False) for i in range(logits.shape[1])])
    np.testing.assert_allclose(found.logit_cov, cov, rtol=2e-3, atol=1e-4 * cov.max())
    wanted = np.asarray(jax.nn.softmax(logits)).mean(axis=0)
    np.testing.assert_allclose(found.probabilities, wanted, rtol=1e-4)


def test_fewer_draws_err_as_said():
    """Of a distribution that is not normal."""
    draws = np.random.default_rng(1).gamma(2.0, size=(8192, 200))
    sd, centred = draws.std(axis=0, ddof=1), draws - draws.mean(axis=0)
    error = np.sqrt((centred**4).mean(axis=0) - sd**4) / (2 * sd * 8192**0.5)
    true = Truth(None, None, None, None, np.array(8192))
    for size in (64, 256):
        ratio = draws.reshape(-1, size, 200).std(axis=1, ddof=1) / sd
        rms = ((ratio - 1) ** 2).mean() ** 0.5
        resolution = ((error / sd) ** 2).mean() ** 0.5
        assert sampled_networks(rms, resolution, true) == pytest.approx(size, rel=0.1)
    gaussian = 1 / (2 * 8191) ** 0.5
    assert sampled_networks(0.1, gaussian, true) == pytest.approx(1 + 1 / (2 * 0.1**2))
    assert sampled_networks(9.0, gaussian, true) == 2


def test_the_error_is_never_below_the_truths_noise():
    rng = np.random.default_rng(2)
    sd = rng.uniform(1, 2, 1000)
    sampled = sd * (1 + 0.02 * rng.standard_normal(1000))
    moments = Sampled(np.zeros(1000), sampled, 0.1 * sampled, 0.02 * sampled)
    exact = accuracy(np.zeros(1000), sampled, moments)
    assert exact["at_resolution"]
    np.testing.assert_allclose(exact["rms_sd_error"], 0.02, rtol=1e-6)
    wrong = accuracy(np.zeros(1000), 1.1 * sd, moments)
    assert not wrong["at_resolution"]
    assert abs(wrong["rms_sd_error"] - 0.1) < 0.005
    with pytest.raises(ValueError, match="not finite"):
        accuracy(np.zeros(1000), sampled * np.nan, moments)


def test_the_largest_array_of_full():
    assert full_gib(16, 128, 2) == (16 * 128) ** 2 * 4 / 2**30
    assert full_gib(16, 8, 2) == 2**2 * 16**4 * 4 / 2**30
