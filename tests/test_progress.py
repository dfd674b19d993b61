"""Compilation that takes long is told."""

import warnings

import jax
import jax.numpy as jnp
from flax import nnx

import moment_jax as mj
from moment_jax import progress


def test_compilation_that_takes_long_is_told_with_its_time(monkeypatch, caplog):
    def compile_anew(number):
        return jax.jit(lambda x: jnp.sin(x) + number)(jnp.ones(3))

    with progress.compiling("the pass of Net"):
        compile_anew(0.3)  # short
        assert not caplog.messages
        monkeypatch.setattr(progress, "LONG", 0.0)
        compile_anew(0.4)
        assert any(x.startswith("moment_jax: compiled the pass of Net in") for x in caplog.messages)
        assert "moment_jax: compiling the pass of Net" in caplog.messages


def test_every_long_call_shows_a_bar_where_it_is_asked_for(capsys):
    rows, labels = jnp.ones((100, 3)), jnp.arange(100) % 2
    network = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    model = mj.Bayesian(network, mj.Categorical())
    calls = {
        "draw": lambda **shown: (model.check(rows, **shown), model.corrected(rows, **shown)),
        "batch": lambda **shown: mj.laplace(
            network, mj.Categorical(), (rows, labels), prior_precision=1.0, **shown
        ),
        "factor": lambda **shown: mj.calibrate(network, mj.Categorical(), (rows, labels), **shown),
    }
    for unit, call in calls.items():
        with warnings.catch_warnings(action="ignore"):  # labels are random
            call(progress=True)
            assert unit in capsys.readouterr().err
            call()  # no terminal
            assert unit not in capsys.readouterr().err
