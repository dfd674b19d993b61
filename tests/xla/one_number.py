"""Finds products whose right operand is one number broadcast, without compiling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal


def faulty_products(fn: Callable[..., Any], *args: Any) -> list[str]:
    """Where the program of `fn` has such products, for arbitrary arguments."""
    program = jax.make_jaxpr(fn)(*args)
    found: list[str] = []
    _walk(program, [False] * len(program.jaxpr.invars), found)
    return found


def _walk(program: ClosedJaxpr | Jaxpr, args: list[bool], found: list[str]) -> list[bool]:
    """Which results are one number, given which arguments are; `found` grows."""
    closed = isinstance(program, ClosedJaxpr)
    jaxpr, consts = (program.jaxpr, program.consts) if closed else (program, [])
    known = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*map(_constant, consts), *args], strict=True)
    )

    def is_one(variable: Any) -> bool:
        return _constant(variable.val) if isinstance(variable, Literal) else known[variable]

    for equation in jaxpr.eqns:
        ones = [is_one(variable) for variable in equation.invars]
        if equation.primitive.name == "dot_general" and ones[1] and _of_matrices(equation):
            found.append(_place(equation))
        known |= zip(equation.outvars, _results(equation, ones, found), strict=True)
    return [is_one(variable) for variable in jaxpr.outvars]


def _results(equation: Any, ones: list[bool], found: list[str]) -> list[bool]:
    name, count = equation.primitive.name, len(equation.outvars)
    programs = [
        program
        for value in equation.params.values()
        for program in (value if isinstance(value, tuple) else (value,))
        if isinstance(program, ClosedJaxpr | Jaxpr)
    ]
    if name == "cond":  # the first operand is the choice
        platforms = equation.params.get("branches_platforms") or ()
        here = [
            branch
            for branch, names in zip(programs, platforms, strict=False)
            if "cpu" in (names or ())
        ]
        each = [_walk(branch, ones[1:], found) for branch in here or programs]
        return [any(results) for results in zip(*each, strict=True)]
    if name == "materialize":
        return [False] * count
    if name in ("scan", "while"):  # operands and results of loops are in memory
        for program in programs:
            _walk(program, [False] * len(program.jaxpr.invars), found)
        return [False] * count
    for program in programs:
        variables = program.jaxpr.invars if isinstance(program, ClosedJaxpr) else program.invars
        if len(variables) == len(ones):
            return _walk(program, ones, found)
    return [bool(ones) and all(ones)] * count


def _of_matrices(product: Any) -> bool:
    """Whether no side is a vector, which the faulty fusions exclude."""
    (contracted, own), (batch, own_batch) = product.params["dimension_numbers"]
    left, right = (variable.aval.shape for variable in product.invars)
    rows = [n for i, n in enumerate(left) if i not in (*contracted, *batch)]
    columns = [n for i, n in enumerate(right) if i not in (*own, *own_batch)]
    return all(np.prod(sizes) > 1 for sizes in (rows, columns, [right[i] for i in own]))


def _place(equation: Any) -> str:
    lines = str(equation.source_info.traceback).splitlines()
    return next((line for line in lines if "moment_jax" in line), str(equation))


def _constant(value: Any) -> bool:
    if jax.dtypes.issubdtype(getattr(value, "dtype", np.float64), jax.dtypes.extended):
        return False
    array = np.asarray(value)
    return array.size > 0 and bool(np.all(array == array.ravel()[0]))
