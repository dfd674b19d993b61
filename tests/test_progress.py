"""Compilation that takes long is told."""

from __future__ import annotations

import jax
import jax.numpy as jnp

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
