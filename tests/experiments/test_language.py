"""The language experiment at a tiny size; its text, its windows, and what a causal mask owes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("orbax.checkpoint")

from experiments import language, networks
from experiments.__main__ import main
from experiments.language import model as language_model
from experiments.language import predictions as language_predictions
from experiments.language import text as language_text
from experiments.language.predictions import Scores, auroc
from experiments.language.text import Vocabulary, load, windows

pytestmark = pytest.mark.usefixtures("settings_of_a_user")


@pytest.fixture
def small(monkeypatch):
    """A network that compiles and runs in no time."""
    for name, value in {"NUM_FEATURES": 8, "NUM_HEADS": 2, "HIDDEN_FEATURES": 8}.items():
        monkeypatch.setattr(networks, name, value)
    for name, value in {"CONTEXT": 8, "NUM_BLOCKS": 1}.items():
        monkeypatch.setattr(language_model, name, value)
    monkeypatch.setattr(language, "CONTEXT", 8)
    monkeypatch.setattr(language_predictions, "CONTEXT", 8)


def test_the_vocabulary_is_of_the_training_text_and_says_what_it_lacks():
    vocabulary = Vocabulary.of("banana")
    assert vocabulary.decode(vocabulary.encode("bananab")) == "bananab"
    with pytest.raises(ValueError, match=r"'d' at 3.*keep"):
        vocabulary.encode("band")
    assert vocabulary.keep("bandana!") == "banana"
    assert vocabulary.decode(np.asarray([1, 0, -1])) == "ba"


def test_texts_are_cut_by_place_and_can_be_encoded():
    texts, vocabulary = load()
    assert set(vocabulary.characters) == set(texts.train)
    assert texts.train.isascii()
    for text in (texts.validation, texts.test, *texts.foreign.values()):
        assert 10_000 < len(text) <= len(texts.test) + len(texts.validation)
        assert vocabulary.encode(text).max() < len(vocabulary.characters)
    assert "def __init__" in texts.foreign["Python source"]
    assert texts.foreign["rot13 of the test"].count("gur") > texts.test.count("gur")


def test_windows_predict_every_character_once():
    cut = windows(np.arange(50), 8)
    assert cut.shape == (6, 9)
    np.testing.assert_array_equal(cut[:, 1:].ravel(), np.arange(1, 49))
    assert windows(np.arange(50), 8, most=3)[:, 0].tolist() == [0, 16, 40]


def test_a_batch_is_made_of_windows_of_the_text():
    inputs, targets = language_model.batch(
        jax.random.key(0), jnp.int32(3), jnp.arange(language_model.CONTEXT + 3), 50
    )
    np.testing.assert_array_equal(targets, inputs + 1)
    assert set(np.asarray(inputs[:, 0]).tolist()) == {0, 1, 2}


@pytest.mark.usefixtures("small")
def test_the_bayesian_network_is_causal_and_its_mean_is_the_plain_one():
    network = language_model.bayesian_network(5, "Diagonal", 0)
    tokens = jnp.asarray([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 0, 4, 2, 1]])
    mean, variance = jax.jit(lambda t: network(t))(tokens)
    np.testing.assert_array_equal(mean[0, :4], mean[1, :4])
    np.testing.assert_array_equal(variance[0, :4], variance[1, :4])
    assert np.abs(mean[0, 4:] - mean[1, 4:]).max() > 0
    assert (np.asarray(variance) > 0).all()
    logits = network.mean_network()(tokens)
    assert np.abs(mean - logits).max() < 0.1 * np.abs(logits).max()
    twin = language_model.bayesian_network(5, "Diagonal", 1)
    twin.load(network.mean_network())
    np.testing.assert_array_equal(twin.mean_network()(tokens), logits)


def test_auroc_and_the_cutting_of_scores():
    assert auroc(np.asarray([0.0, 1.0]), np.asarray([2.0, 3.0])) == 1
    assert auroc(np.asarray([0.0, 2.0]), np.asarray([1.0, 3.0])) == 0.75
    whole = Scores(*np.arange(20.0).reshape(4, 5))
    first, second = language_predictions.split(whole, np.asarray([2]))
    assert first.bits.tolist() == [0, 1]
    assert second.epistemic.tolist() == [17, 18, 19]


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_experiment(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(language, "NUM_VALIDATION", 4)
    monkeypatch.setattr(language, "LENGTH", 5)
    monkeypatch.setattr(language_predictions, "NUM_POINTS", 376)
    counts = {"--steps": 3, "--plain-steps": 4, "--batch-size": 2, "--samples": 2, "--windows": 8}
    arguments = [str(word) for option in counts.items() for word in option]
    assert main(["language", *arguments, "--out", str(tmp_path)]) == 0
    assert "bits per character" in capsys.readouterr().out
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert len(metrics["averages"]) == len(metrics["auroc"]) == 3
    for texts in metrics["averages"].values():
        assert len(texts) == 3
        assert all(np.isfinite(list(parts.values())).all() for parts in texts.values())
    assert len(metrics["continuation"]["drawn"]) == 5
    assert (tmp_path / "uncertainty.png").stat().st_size > 10_000
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_too_small_windows_of_text_are_an_empty_array():
    assert language_text.windows(np.arange(4), 8).shape == (0, 9)
