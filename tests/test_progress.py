"""No silent wait: long compilation is told on stderr, once, and can be silenced."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest

from moment_jax import progress


def compile_slowly(monkeypatch, seconds=0.3):
    """A program of its own, whose compilation is told after no time."""
    monkeypatch.setattr(progress, "LONG", 0.0)
    jax.jit(lambda x: jnp.sin(x) + seconds)(jnp.ones(3)).block_until_ready()
    time.sleep(0.05)


def test_compilation_that_takes_long_is_told_with_its_time(monkeypatch, capsys):
    with progress.compiling("the pass of Net (Full)"):
        compile_slowly(monkeypatch)
    told = capsys.readouterr().err
    assert "moment_jax: compiling the pass of Net (Full), about" in told
    assert "moment_jax: compiled the pass of Net (Full) in" in told
    compile_slowly(monkeypatch)  # a user's own
    assert not capsys.readouterr().err


@pytest.mark.parametrize("way", ["progress", "logger", "short"])
def test_it_is_silent_when_told_or_short(way, monkeypatch, capsys):
    if way == "logger":
        monkeypatch.setattr(progress.logger, "disabled", True)
    with progress.running(2, False if way == "progress" else None), progress.compiling("it"):
        if way == "short":
            jax.jit(lambda x: jnp.cos(x) + 3)(jnp.ones(3))
        else:
            compile_slowly(monkeypatch, len(way))
    assert "compil" not in capsys.readouterr().err


def test_a_bar_counts_steps_and_goes(capsys):
    with progress.running(4, True) as shown:
        progress.advance(2, loss="1.5")
    assert shown
    progress.advance()  # there is none
    assert "2/4" in capsys.readouterr().err
