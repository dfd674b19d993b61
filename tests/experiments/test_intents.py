"""The intents command at a tiny size: its files, its words, its padding, and what training may see."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from experiments import draws, intents
from experiments.__main__ import main
from experiments.classify import compared as classify_compared
from experiments.classify.networks import Params
from experiments.intents import compared
from experiments.intents.compared import TextNetwork
from experiments.intents.texts import (
    BUCKETS,
    KEYS,
    PADDING,
    Vocabulary,
    read_set,
    with_lost_words,
)
from tests.experiments.intent_files import intent_texts, write_intents

pytestmark = pytest.mark.usefixtures("settings_of_a_user")


TINY = intent_texts()


def test_texts_out_of_scope_that_train_and_validate_reach_nothing(tmp_path):
    write_intents(tmp_path / "a.json", TINY)
    others = {"oos_train": [["all else", "oos"]], "oos_val": [["find the flight", "oos"]]}
    write_intents(tmp_path / "b.json", TINY | others)
    given, same = read_set(tmp_path / "a.json"), read_set(tmp_path / "b.json")._replace(name="a")
    for one, other in zip(jax.tree.leaves(given), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(one, other)


def test_words_are_of_the_training_texts_and_rare_ones_share_buckets():
    vocabulary = Vocabulary.of(["play a song", "Play it, now!"])
    ids = vocabulary.encode(["play the zither", "?", "play " * 9])
    assert ids.shape == (3, 3)
    assert ids[0, 0] == vocabulary.ids["play"] > BUCKETS
    assert ((ids[0, 1:] > 0) & (ids[0, 1:] <= BUCKETS)).all()
    assert (ids[1] != PADDING).tolist() == [True, False, False]  # a text is never empty
    np.testing.assert_array_equal(ids, vocabulary.encode(["PLAY the zither", "", "play " * 3]))
    lost = with_lost_words(jax.random.key(0), jnp.asarray(ids), 1.0)
    assert ((lost > 0) == (ids > 0)).all()
    assert lost.max() <= BUCKETS


IDS = np.asarray([[3, 7, 3, 0, 0, 0], [5, 6, 7, 8, 9, 1]], np.int32)
NETWORK = TextNetwork(20, 6, 3)
moments = jax.jit(NETWORK.moments)


def test_padding_has_no_influence():
    params = NETWORK.start(jax.random.key(0))
    mean, cov = moments(params, IDS)
    for given, alone in zip((mean, cov), moments(params, IDS[:1, :3]), strict=True):
        np.testing.assert_allclose(alone[0], given[0], atol=1e-5)
    plain = jax.jit(NETWORK.mean_logits)
    np.testing.assert_allclose(plain(params, IDS)[0], plain(params, IDS[:1, :3])[0], atol=1e-5)
    module = NETWORK.module(params)
    table = module.embed.table.mean
    table.set_value(table[...].at[PADDING].add(100.0))
    changed = Params(*nnx.split(module, mj.nn.VariationalMean, ...)[1:])
    for given, same in zip((mean, cov), moments(changed, IDS), strict=True):
        np.testing.assert_array_equal(given, same)


def test_moments_are_those_of_drawn_networks():
    params = NETWORK.start(jax.random.key(0))
    mean, cov = moments(params, IDS)
    draw = draws.weights(NETWORK.module(params).params)
    drawn = jax.jit(partial(NETWORK.many_logits, draw, count=1000))(params, jax.random.key(1), IDS)
    sd = drawn.std(axis=0)
    assert jnp.all(jnp.abs(mean - drawn.mean(axis=0)) < 5 * sd / 1000**0.5)
    ratio = jnp.sqrt(jnp.einsum("ncc->nc", cov)) / sd
    assert jnp.all(jnp.abs(ratio - 1) < 5 / 2000**0.5)


def changed(**changes):
    content = {key: rows for key, rows in (TINY | changes).items() if rows is not None}
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (changed(val=None), "has no val"),
        (changed(test=[]), "got an empty one"),
        (changed(oos_train={"a": 1}), "got an object"),
        (changed(train=[["play a song", 3]]), "row 0"),
        (changed(train=[*TINY["train"], ["alone"]]), "row 72"),
        (changed(test=[["play it", "unheard"]]), "'unheard' in test"),
        (changed(oos_val=[TINY["train"][0]]), "which train has too"),
        (changed(train=TINY["train"][:1]), "two intents"),
        (changed(train=[["?", intent] for _, intent in TINY["train"]]), "no word"),
        (json.dumps(list(KEYS)).encode(), "got a list"),
        (b"{", "as JSON"),
        (changed().replace(b"flight", b"fl\xefght"), "UTF-8"),
    ],
)
def test_bad_files_are_told(content, said, tmp_path, capsys):
    (tmp_path / "a.json").write_bytes(content)
    command = ["intents", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "out").exists()


def test_bad_folders_and_names_are_told(tmp_path, capsys):
    command = ["intents", "--data-dir", str(tmp_path)]
    assert main([*command[:2], str(tmp_path / "none")]) == 2
    assert main(command) == 2
    write_intents(tmp_path / "a.json", TINY)
    assert main([*command, "--set", "c"]) == 2
    write_intents(tmp_path / "b.json", TINY)
    assert main(command) == 2
    lines = capsys.readouterr().err.splitlines()
    for line, word in zip(
        lines, ["no folder", "no .json", "take one of a", "--set with one of a, b"], strict=True
    ):
        assert word in line


@pytest.mark.slow
def test_the_comparison(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compared, "NUM_FEATURES", 8)
    monkeypatch.setattr(compared, "HIDDEN_FEATURES", 8)
    monkeypatch.setattr(classify_compared, "RATES", (0.1,))
    monkeypatch.setattr(compared, "STRENGTHS", (10.0,))
    monkeypatch.setattr(compared, "KL_WEIGHTS", (0.1,))
    monkeypatch.setattr(intents, "TextNetwork", partial(TextNetwork, structure="Diagonal"))
    write_intents(tmp_path / "a.json", TINY)
    command = ["intents", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")]
    counts = ["--seeds", 2, "--plain-steps", 3, "--steps", 2, "--samples", 2]
    assert main([*command, *map(str, counts)]) == 0
    assert "Bayesian Transformer, analytic" in capsys.readouterr().out
    assert (tmp_path / "out" / "entropy.png").stat().st_size > 10_000
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert len(metrics["methods"]) == 4
    for record in metrics["methods"].values():
        assert np.isfinite([record[key]["mean"] for key in ("nll", "ece", "brier")]).all()
        assert 0 <= record["oos_auroc"]["mean"] <= 1
