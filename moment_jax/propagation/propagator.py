"""Mean and covariance of any JAX function of random weights: interprets its jaxpr on moments."""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moment_jax.covariance import STRUCTURES, Covariance, Separable
from moment_jax.covariance.fields import need
from moment_jax.covariance.token_gram import pool_read, pool_seen
from moment_jax.posterior import Factorized, Posterior
from moment_jax.posterior.base import mean_params
from moment_jax.propagation import arrays, errors, graph, law, primitives
from moment_jax.propagation.arrays import Axes, Base, Moments, Places, Same, Sequence
from moment_jax.propagation.errors import PropagationError, Step, Steps, shapes
from moment_jax.propagation.graph import GIVEN, Node, Value
from moment_jax.propagation.recorder import Recorder
from moment_jax.propagation.regions import reads
from moment_jax.propagation.weights import Weight
from moment_jax.xla import materialized_inputs

Rule = Callable[[Any, Node], Moments | None]


@dataclasses.dataclass(eq=False, repr=False)
class Propagator:
    """Plans how the moments of a graph's nodes are computed, from shapes alone; then computes them.

    All of the plan is made, and with it what is pooled, before a number of an array is asked for. C
    serves the sum that it is of: the pool follows the read-out, a class token or a mean over tokens. If
    more than one token is read under a mask, it holds the tokens which the mask shows instead: one that
    is hidden, by a causal mask or padding, must not contribute to sums taken before the attention.
    """

    structure: type[Covariance]
    landmarks: int | None = None  # of `Separable`
    pool: Array | None = None  # pool sequences as long as this over its tokens
    reading: bool = False  # whether that pool is what the output reads
    output: Value = None  # of the function
    steps: dict[Node, Step] = dataclasses.field(default_factory=dict)
    planned: dict[Node, Moments] = dataclasses.field(default_factory=dict)
    known: dict[Any, Moments] = dataclasses.field(default_factory=dict)  # of certain arrays
    repeats: graph.Repeats = dataclasses.field(default_factory=dict)  # of certain arrays
    longest: int = 1  # tokens of the longest sequence
    bases: dict[Any, Base] = dataclasses.field(default_factory=dict)  # of weights
    crosses: dict[tuple[Base, Base], Any] = dataclasses.field(default_factory=dict)
    related: set[tuple[Base, Base]] = dataclasses.field(default_factory=set)

    def find_pool(self, t: int, mask: Array | None, mutual: bool, dtype: Any) -> None:
        """Pool what the output reads of attention to T tokens, or what its mask shows; see above.

        What is read does not count if it is even, nor under a mask if the output has several tokens:
        these may not look at each other.
        """
        if self.pool is not None or not self.structure.pools:
            return
        read = None
        if self.reads is not None and (mask is None or math.prod(self.output.shape[:-1]) <= 1):
            axes = range(self.reads.ndim)
            each = [self.reads.sum(tuple(j for j in axes if j != i)) for i in axes]
            each = [x for x in each if len(x) == t]
            even = each[0] if each and mask is not None else None
            read = next((x for x in each if not np.allclose(x, x[0])), even)
        if read is not None:
            self.pool, self.reading = pool_read(jnp.asarray(read, float), mask), True
        elif not (mutual or mask is None):
            self.pool = pool_seen(mask, jnp.zeros(t, bool)).astype(dtype)

    @functools.cached_property
    def reads(self) -> np.ndarray | None:
        """How much of each entry of the last attention the output reads."""
        return reads(self.output) if isinstance(self.output, Node) else None

    def moments(self, value: Value) -> Moments:
        """Moments of a node, a weight or a certain array."""
        if isinstance(value, Weight):
            # Views of the same entries are views of one array.
            key = Same(value.posterior), value.held().tobytes()
            if key not in self.bases:
                self.bases[key] = value.base(self.structure, self.landmarks)
            return Moments(self.bases[key], value.places)
        if not isinstance(value, Node):
            return self.certain(value, arrays.by_last_axis(np.ndim(value))[1])
        if value not in self.planned:
            self.planned[value] = self._resolved(value)
        return self.planned[value]

    def given(
        self, moments: Moments, dtype: Any, weights: Iterable[Weight], apart: Iterable[Weight] = ()
    ) -> Node:
        """An array of known moments that depends on these weights: an input, or what a loop carries.

        On those `apart` it depends through attention to a memory alone.
        """
        memory = Node(GIVEN, {}, tuple(apart), (), dtype, ())
        edge = Node(GIVEN, {}, (memory,), (), dtype, (), apart={0})
        operands = (*weights, edge) if memory.weights else tuple(weights)
        moments.base.node = node = Node(GIVEN, {}, operands, moments.shape, dtype, ())
        self.planned[node] = moments
        return node

    def certain(self, array: Any, features: Axes) -> Moments:
        """Moments of a certain array, as a sequence with these feature axes."""
        key = Same(array), features
        if key not in self.known:
            x = graph.as_floating(array)
            tokens = tuple(i for i in range(x.ndim) if i not in features)
            mean = arrays.as_rows(x, tokens, features)
            zeros = functools.partial(self.structure.zeros, mean.shape, mean.dtype, self.landmarks)
            places = arrays.ordered(x.shape, tokens, features)
            found = arrays.made(lambda: (mean, zeros()), mean.shape, places)
            found.base.finish = self.finished
            self.known[key] = found
        return self.known[key]

    def entries(self, array: Any, shape: tuple[int, ...]) -> tuple[Any, Places]:
        """A certain array (N,) without repeats, and the place in it of each entry of this shape."""
        axes = self.repeats.get(Same(array), set())
        x = np.asarray(array) if primitives.is_known(array) else array
        small = x[tuple(slice(0, 1) if i in axes else slice(None) for i in range(x.ndim))]
        number = primitives.uniform(small)
        small = small if number is None else np.full((1,) * x.ndim, number, small.dtype)
        return small.reshape(-1), np.broadcast_to(arrays.numbered(small.shape), shape)

    def finished(self, cov: Any) -> Any:
        """A covariance at the landmarks, and pooled if its sequence has the pool's length."""
        cov = cov.at_landmarks(self.landmarks)
        fits = self.pool is not None and cov.shape[:1] == self.pool.shape
        return cov.pooled(self.pool) if fits and cov.pool is not self.pool else cov

    def note(self, node: Node, rule: str, assumes: str = "") -> None:
        """Add an operation to the receipt."""
        line = errors.where(node.source)
        self.steps[node] = Step(node.op, rule, assumes, line, tuple(node.shape))

    def _resolved(self, node: Node) -> Moments:
        for rule in (*_REGISTERED[node.op], *PATTERNS, *RULES[node.op]):
            found = rule(self, node)
            if found is not None:
                self.longest = max(self.longest, found.base.shape[0])
                if found.base.node is None:  # not a view of what was known
                    found.base.node, found.base.finish = node, self.finished
                return found
        what = f"`{node.op}` of random {shapes(node.operands)}"
        if not graph.independent(*node.operands):
            what += ", which have a random array in common"
        fix = f"No rule or pattern covers it. {errors.register(node)}"
        raise errors.refuse(what, node.source, fix)


PATTERNS: list[Rule] = []  # tried first, whatever the primitive
RULES: dict[str, list[Rule]] = defaultdict(list)  # by primitive
_REGISTERED: dict[str, list[Rule]] = defaultdict(list)  # by users


def rule(*primitives: str) -> Callable[[Rule], Rule]:
    """Register a library rule for these primitives."""

    def enter(function: Rule) -> Rule:
        for name in primitives:
            RULES[name].append(function)
        return function

    return enter


def pattern(function: Rule) -> Rule:
    """Register a rule that recognises operations by what they compute."""
    PATTERNS.append(function)
    return function


def propagation_rule(
    primitive: str, *, carry: Callable[..., Any] | None = None
) -> Callable[[Callable[..., tuple[Array, Any]]], Any]:
    """Register a rule for a primitive: `rule(mean, cov, *others, **params) -> (mean, cov)`.

    The rule receives the first random operand as a sequence, mean (T, D) and covariance; the other
    operands as arrays (random ones by their mean, taken as independent); and the primitive's
    parameters. It returns the moments of the result in the same (T, D) layout, and takes precedence over
    the library's rules. Primitives have the names that `jax.make_jaxpr` prints.

    A result that meets its input again, as in a residual sum, needs
    `carry(cross, mean, cov, *others, **params)`: the operation linearised, which makes Cov[u, result] of
    `cross`, Cov[u, x] for any u. Both have a covariance's `rescale`, `map_features` and `map_tokens`.

    >>> import jax, jax.numpy as jnp, moment_jax as mj
    >>> @mj.propagation_rule("asinh")
    ... def asinh(mean, cov):
    ...     return mj.activation(mean, cov, jnp.arcsinh)
    >>> def slope(cross, mean, cov):
    ...     return cross.rescale(1 / jnp.sqrt(1 + mean**2))
    >>> _ = mj.propagation_rule("asinh", carry=slope)(asinh)  # also for x + arcsinh(x)
    """
    rule, mend = "the name of a primitive, such as 'sort'", "jax.make_jaxpr prints the names."
    right = isinstance(primitive, str)
    need("propagation_rule(primitive)", right, rule, repr(primitive), mend, TypeError)

    def enter(function: Callable[..., tuple[Array, Any]]) -> Any:
        def applied(propagator: Propagator, node: Node) -> Moments:
            operands = list(node.operands)
            first = operands.pop(next(i for i, x in enumerate(operands) if graph.is_random(x)))
            x = propagator.moments(first).sequence()
            others = [propagator.moments(y) if graph.is_random(y) else y for y in operands]

            def compute() -> tuple[Any, ...]:
                means = (y.array() if isinstance(y, Moments) else y for y in others)
                given = x.mean, x.cov, *means
                found = function(*given, **node.params)
                if carry is None:
                    return found
                return *found, lambda cross: carry(cross, *given, **node.params)

            propagator.note(node, getattr(function, "__name__", "a rule"), "registered")
            places = arrays.ordered(node.shape, *x.axes)
            t = math.prod(node.shape[i] for i in x.tokens)
            parents = None if carry is None else (x,)
            return Moments(Base((t, node.size // t), compute, parents), places)

        _REGISTERED[primitive] = [applied]
        return function

    return enter


def is_random_input(x: Any) -> bool:
    """Whether an input is given by its moments, (mean, cov)."""
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[1], Covariance)


def propagate(
    fn: Callable[..., Any],
    *,
    structure: type[Covariance] = Separable,
    landmarks: int | None = None,
    receipt: bool = False,
) -> Callable[..., Any]:
    """Mean and covariance of a function of random weights, in one analytic pass.

    `fn(params, x)` is any JAX function. It is traced, and its operations are applied to moments: linear
    ones as exactly as the structure allows; elementwise functions in closed form or by quadrature.
    Layer and RMS normalisation, attention and residual sums are recognised by what they compute,
    whichever module wrote them, and use the library's transforms. First all of the function is planned,
    from shapes, operations and what is truly known; then each array is computed, once.

    Where two arrays meet that depend on one another, as in residual sums, gates and concatenations,
    their covariance is that through everything that they share, linearised: exact to first order in
    `mj.Full`, and as far as the other structures can hold it.

    No rule have: convolutions but those of patches (kernel = stride), quotients of two random arrays
    other than norms and softmax, maxima and comparisons of two random entries or more, cumulative sums,
    sorting, scattered entries, random conditions and indices, rounding and other functions that jump
    with curved pieces, branches, recurrent loops, kernels that are functions of weights (weight
    normalisation) of a random array, one weight used in two places other than a product with its
    transpose, such as a layer that is called twice, and attention other than softmax(where(mask, scale *
    q k^T + bias, number)) v: with a sink, or a head that mixes others. They raise an error that names
    the line; `mj.linearised` takes them all, and so do certain weights.

    Assumes that weight arrays are independent of each other and of random inputs, and a single input:
    for a batch, use jax.vmap (axes of size one are fine); the examples of a batch that come in as one
    array share their weights' noise. A decoder's memory is taken as independent of
    what attends to it, as in `mj.decoder_block`; the receipt says so. This is the right predictive
    distribution for variational posteriors; a Laplace approximation describes the linearised network, so
    use `linearised` there.

    Args:
      fn: `fn(params, *inputs)`, returning one array.
      structure: of the covariances. `mj.Full` is the most exact and suits small arrays: its size is the
        square of the array's.
      landmarks: tokens at which `Separable` keeps the covariance of a long sequence, see
        `Separable.zeros`; with a causal mask, all of them.
      receipt: also return the list of operations, each with its rule and assumption (those of a loop
        once), outside of jax.jit; and hold the pass to the first law: without noise it is `fn`.

    Returns:
      A function of `params`, a pytree with a `Posterior` for each random array and arrays elsewhere,
      and of the inputs: arrays, or a random one as (mean, cov), with cov that of the mean as a sequence
      (T, D). Loops over stacked weights and `jax.checkpoint` are kept. It returns the
      output's mean and covariance as a sequence (T, D): the last axis holds the features, all others
      the tokens; an output (D,) is one token. With `receipt` also the list of `Step`s.

    Raises:
      PropagationError: if an operation has no rule, or the mean of one is off (with `receipt`); names
        the line it came from.

    >>> import jax, jax.numpy as jnp, moment_jax as mj
    >>> belief = mj.posterior.Factorized(jnp.ones((2, 3)), jnp.full((2, 3), 0.25))
    >>> mean, cov = mj.propagate(lambda w, x: jnp.tanh(x @ w))(belief, jnp.ones(2))
    >>> print(mean.shape, cov.variance().round(2))
    (1, 3) [[0.02 0.02 0.02]]
    """
    came, mend = type(fn).__name__, "For a Flax module, use mj.Bayesian(module)."
    need("propagate(fn)", callable(fn), "a function fn(params, x)", came, mend, TypeError)
    right = isinstance(structure, type) and issubclass(structure, Covariance)
    rule, mend = f"a structure, one of {', '.join(STRUCTURES)}", "Give the class: mj.Separable."
    need("propagate", right, rule, repr(structure), mend, TypeError)

    def propagated(params: Any, *inputs: Any) -> Any:
        steps: Steps = Steps()

        def computed(params: Any, inputs: Any) -> tuple[Array, Any]:
            output, found = plan(fn, params, inputs, structure, landmarks)
            steps.extend(found.steps.values())
            return output.moments

        mean, cov = materialized_inputs(computed)(params, inputs)
        if not receipt:
            return mean, cov
        leaves = jax.tree.leaves((params, inputs))
        unknown = any(isinstance(x, jax.core.Tracer) for x in leaves)
        if unknown or any(map(is_random_input, inputs)):
            steps.law = (
                "The pass was not compared with the function, of traced or random arguments."
            )
        else:
            planned = functools.partial(plan, fn, structure=structure, landmarks=landmarks)
            law.hold_function(fn, params, inputs, planned)
            steps.law = "Without noise the pass is the function."
        return mean, cov, steps

    return propagated


def plan(
    fn: Any, params: Any, inputs: Any, structure: type[Covariance], landmarks: int | None,
    *, unrolls: bool = False,
) -> tuple[Sequence, Propagator]:  # fmt: skip
    """The output of `propagate(fn)` with nothing computed, and what was planned on the way.

    What a loop cannot carry is unrolled, or, if that is asked for, every loop.
    """
    at = mean_params(params)
    means = jax.tree.map(
        lambda x: x[0] if is_random_input(x) else x, inputs, is_leaf=is_random_input
    )
    traced = jax.make_jaxpr(fn)(at, *means)
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Posterior))
    leaves += jax.tree.leaves(inputs, is_leaf=is_random_input)
    count, mend = len(traced.jaxpr.outvars), "Pick one: lambda params, x: fn(params, x)[0]."
    need("propagate(fn)", count == 1, "a function that returns one array", count, mend, TypeError)

    def planned(unrolls: bool) -> tuple[Sequence, Propagator]:
        propagator = Propagator(structure, landmarks)

        def argument(x: Any) -> Value:
            if isinstance(x, Posterior):
                return Weight.of(x)
            return _random(propagator, *x) if is_random_input(x) else jnp.asarray(x)

        recorder = Recorder(propagator.repeats, unrolls=unrolls)
        arguments = [argument(x) for x in leaves]
        (propagator.output,) = recorder.run(traced.jaxpr, traced.consts, arguments)
        m = propagator.moments(propagator.output)
        rule = f"at most the number of tokens of the longest sequence, {propagator.longest}"
        right, mend = (landmarks or 0) <= propagator.longest, "None means all of up to 256 tokens."
        need("landmarks", right, rule, landmarks, mend)
        return m.sequence(*arrays.by_last_axis(m.ndim)), propagator

    try:
        return planned(unrolls)
    except PropagationError:  # what a loop cannot carry, its operations one by one may
        return planned(True)


def _random(propagator: Propagator, mean: Any, cov: Any) -> Node:
    """A random input; a belief of its own stands for what makes it random."""
    axes = arrays.by_last_axis(np.ndim(mean))
    rows = arrays.as_rows(mean, *axes)
    right = type(cov) is propagator.structure and tuple(cov.shape) == rows.shape
    rule = f"a covariance in {propagator.structure.__name__} of shape {rows.shape}, its mean's"
    need("propagate(fn)(params, (mean, cov))", right, rule, f"{type(cov).__name__} of {cov.shape}")
    own = Weight.of(Factorized(rows, jnp.zeros_like(rows)))
    places = arrays.ordered(np.shape(mean), *axes)
    moments = arrays.made(lambda: (rows, cov), rows.shape, places)
    moments.base.finish = propagator.finished
    return propagator.given(moments, rows.dtype, [own])
