"""The intents command at a tiny size: its files, its words, its padding, and what training may see."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

import moment_jax as mj
from experiments.__main__ import main
from experiments.classify import compared as classify_compared
from experiments.classify import methods
from experiments.intents import compared
from experiments.intents.compared import text_model
from experiments.intents.texts import BUCKETS, KEYS, PADDING, Vocabulary, read_set


def intent_texts():
    """What a file of CLINC150's form holds: actions on objects, and texts of neither."""
    ends, parts = ("now", "today", "please", "for me", "again"), {"train": 5, "val": 3, "test": 3}
    content = {
        part: [
            [f"{action} the {thing} {end}", f"{action}_{thing}"]
            for action in ("find", "cancel", "order")
            for thing in ("flight", "meal")
            for end in ends[:count]
        ]
        for part, count in parts.items()
    }
    others = [["who found the volcano", "oos"], ["how tall is the river", "oos"]]
    return content | {f"oos_{part}": others for part in parts}


TINY = intent_texts()


def test_texts_out_of_scope_that_train_and_validate_reach_nothing(tmp_path):
    others = {"oos_train": [["all else", "oos"]], "oos_val": [["find the flight", "oos"]]}
    (tmp_path / "a.json").write_text(json.dumps(TINY))
    (tmp_path / "b.json").write_text(json.dumps(TINY | others))
    given, same = read_set(tmp_path / "a.json"), read_set(tmp_path / "b.json")._replace(name="a")
    for one, other in zip(jax.tree.leaves(given), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(one, other)


def test_words_are_of_the_training_texts_and_others_share_buckets():
    vocabulary = Vocabulary.of(["play a song", "Play it, now!"])
    ids = vocabulary.encode(["play the zither", "?", "play " * 9])
    assert ids.shape == (3, 3)
    assert ids[0, 0] == vocabulary.ids["play"] > BUCKETS
    assert ((ids[0, 1:] > 0) & (ids[0, 1:] <= BUCKETS)).all()
    assert (ids[1] != PADDING).tolist() == [True, False, False]  # a text is never empty
    np.testing.assert_array_equal(ids, vocabulary.encode(["PLAY the zither", "", "play " * 3]))


@pytest.fixture
def tiny(monkeypatch):
    for name, value in (("NUM_FEATURES", 8), ("HIDDEN_FEATURES", 8), ("STRUCTURE", mj.Diagonal)):
        monkeypatch.setattr(compared, name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_padding_has_no_influence():
    ids = np.asarray([[3, 7, 3, 0, 0, 0], [5, 6, 7, 8, 9, 1]], np.int32)
    moments = nnx.jit(lambda model, ids: methods.moments(model, None, ids))
    plain = nnx.jit(lambda model, ids: methods.mean_logits(model, None, ids))
    model = text_model(20, 6, 3, jax.random.key(0))
    found = moments(model, ids)
    for given, alone in zip(found, moments(model, ids[:1, :3]), strict=True):
        np.testing.assert_allclose(alone[0], given[0], atol=1e-5)
    np.testing.assert_allclose(plain(model, ids)[0], plain(model, ids[:1, :3])[0], atol=1e-5)
    table = model.weights["embed"]["embedding"].mean
    table.set_value(table[...].at[PADDING].add(100.0))
    for given, same in zip(found, moments(model, ids), strict=True):
        np.testing.assert_array_equal(given, same)


def changed(**changes):
    content = {key: rows for key, rows in (TINY | changes).items() if rows is not None}
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (changed(val=None), "has no val"),
        (changed(test=[]), "got an empty one"),
        (changed(train=[["play a song", 3]]), "row 0"),
        (changed(test=[["play it", "unheard"]]), "'unheard' in test"),
        (changed(oos_val=[TINY["train"][0]]), "which train has too"),
        (changed(train=[["?", intent] for _, intent in TINY["train"]]), "no word"),
        (json.dumps(list(KEYS)).encode(), "got a list"),
        (b"{", "as JSON"),
        (changed().replace(b"flight", b"fl\xefght"), "UTF-8"),
    ],
)
def test_bad_files_are_told(content, said, tmp_path, refused):
    (tmp_path / "a.json").write_bytes(content)
    refused(["intents", "--data-dir", tmp_path, "--out", tmp_path / "out"], said)
    assert not (tmp_path / "out").exists()


def test_one_of_several_sets_is_named(tmp_path, refused):
    for name in "ab":
        (tmp_path / f"{name}.json").write_bytes(changed())
    refused(["intents", "--data-dir", tmp_path], "--set with one of a, b")


class Shallow(nnx.Linear):
    """In the place of the encoder, whose gradients take minutes to compile."""

    def __init__(self, num_blocks, num_features, num_heads, *, rngs, **options):
        super().__init__(num_features, num_features, rngs=rngs)

    def __call__(self, x, mask):
        return super().__call__(x)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_the_comparison(tmp_path, monkeypatch):
    for owner, name, value in (
        (mj.nn, "Encoder", Shallow),
        (compared, "STRENGTHS", (10.0,)),
        (compared, "KL_WEIGHTS", (0.1,)),
        (classify_compared, "RATES", (0.1,)),
    ):
        monkeypatch.setattr(owner, name, value)
    (tmp_path / "a.json").write_bytes(changed())
    counts = [f"--{name}=2" for name in ("seeds", "steps", "samples", "members")]
    command = ["intents", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out"), *counts]
    assert main([*command, "--plain-steps=3"]) == 0
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert len(metrics["methods"]) == 5
    for record in metrics["methods"].values():
        assert np.isfinite([record[key]["mean"] for key in ("nll", "ece", "brier")]).all()
        assert 0 <= record["oos_auroc"]["mean"] <= 1
