"""Every sampler of `jax.random`, and parts of one's own that draw from them and note what kind of key they got."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxrl
from jaxrl.agents import Agent

random = jax.random
SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "ball": lambda key: random.ball(key, 3),
    "bernoulli": lambda key: random.bernoulli(key, 0.3, (2,)),
    "beta": lambda key: random.beta(key, 2.0, 3.0),
    "binomial": lambda key: random.binomial(key, 20, 0.4),
    "bits": random.bits,
    "categorical": lambda key: random.categorical(key, jnp.arange(3.0)),
    "cauchy": random.cauchy,
    "chisquare": lambda key: random.chisquare(key, 3.0),
    "choice": lambda key: random.choice(key, 5, (2,), replace=False),
    "clone": lambda key: random.bits(random.clone(key)),
    "dirichlet": lambda key: random.dirichlet(key, jnp.ones(3)),
    "double_sided_maxwell": lambda key: random.double_sided_maxwell(key, 0.0, 1.0),
    "exponential": random.exponential,
    "f": lambda key: random.f(key, 3.0, 4.0),
    "fold_in": lambda key: random.bits(random.fold_in(key, 7)),
    "gamma": lambda key: random.gamma(key, 2.5),
    "generalized_normal": lambda key: random.generalized_normal(key, 1.5),
    "geometric": lambda key: random.geometric(key, 0.3),
    "gumbel": random.gumbel,
    "laplace": random.laplace,
    "loggamma": lambda key: random.loggamma(key, 2.5),
    "logistic": random.logistic,
    "lognormal": random.lognormal,
    "maxwell": random.maxwell,
    "multinomial": lambda key: random.multinomial(key, 9.0, jnp.array([0.2, 0.3, 0.5])),
    "multivariate_normal": lambda key: random.multivariate_normal(key, jnp.zeros(2), jnp.eye(2)),
    "normal": random.normal,
    "orthogonal": lambda key: random.orthogonal(key, 2),
    "pareto": lambda key: random.pareto(key, 3.0),
    "permutation": lambda key: random.permutation(key, 4),
    "poisson": lambda key: random.poisson(key, 6.0, (2,)),
    "rademacher": random.rademacher,
    "randint": lambda key: random.randint(key, (), 0, 9),
    "rayleigh": lambda key: random.rayleigh(key, 1.0),
    "split": lambda key: random.bits(random.split(key)[1]),
    "t": lambda key: random.t(key, 4.0),
    "triangular": lambda key: random.triangular(key, 0.0, 0.5, 1.0),
    "truncated_normal": lambda key: random.truncated_normal(key, -1.0, 2.0),
    "uniform": random.uniform,
    "wald": lambda key: random.wald(key, 1.0),
    "weibull_min": lambda key: random.weibull_min(key, 1.0, 1.5),
}
"""By name, what draws with a key: floats and whole numbers of any shape."""
FEW = ("poisson", "uniform")
"""One that draws in a loop until it has enough, and another."""


class Drawn(NamedTuple):
    """What was drawn from a key, beside the words of that key."""

    words: jax.Array
    numbers: dict[str, jax.Array]


def draw(names: tuple[str, ...], key: Any, kinds: list[Any] | None = None) -> Drawn:
    """Draw from each sampler, and note the kind of the key in `kinds`."""
    if kinds is not None:
        kinds.append(str(random.key_impl(key)))
    numbers = {name: SAMPLERS[name](random.fold_in(key, i)) for i, name in enumerate(names)}
    return Drawn(random.key_data(key), {name: jnp.asarray(x, jnp.result_type(x)) for name, x in numbers.items()})


def seen(drawn: Drawn) -> jax.Array:
    """Return numbers between -1 and 1 that depend on all that was drawn."""
    return jnp.stack([jnp.tanh(jnp.sum(jnp.asarray(x, jnp.float32)) / 16) for x in drawn.numbers.values()])


class Pair(NamedTuple):
    """The state of an environment: what its reset drew, and its last step."""

    reset: Drawn
    step: Drawn


def drawing_env(names: tuple[str, ...] = FEW, kinds: list[Any] | None = None) -> jaxrl.Env:
    """An environment of four steps whose observations are drawn, in `reset` and in `step`."""

    def reset(key: Any) -> tuple[Pair, Any]:
        first = draw(names, key, kinds)
        return Pair(first, first), seen(first)

    def step(state: Pair, action: Any, key: Any) -> tuple[Pair, jaxrl.TimeStep]:
        now = draw(names, key, kinds)
        return Pair(state.reset, now), jaxrl.TimeStep(seen(now), jnp.float32(action), False)

    spec = jaxrl.EnvSpec("drawing", jaxrl.Box(-1.0, 1.0, (len(names),)), jaxrl.Discrete(2), 4)
    return jaxrl.Env(spec, reset, step)


class Held(NamedTuple):
    """The state of `drawing_agent`: what its `init` drew, and its last update."""

    init: Drawn
    update: Drawn


def drawing_agent(names: tuple[str, ...] = FEW, kinds: list[Any] | None = None) -> Callable[[jaxrl.EnvSpec], Agent]:
    """An agent that is given keys to act and to update with, and draws from them."""

    def act(state: Any, obs: Any, key: Any, opt_step: Any, mode: str) -> tuple[Any, Any]:
        if mode == "exploit":
            return jnp.zeros(obs.shape[0], jnp.int32), ()
        score = seen(draw(names, key, kinds)).sum()
        return jnp.broadcast_to(score > 1, obs.shape[:1]).astype(jnp.int32), ()

    def update(state: Held, batch: Any, key: Any, opt_step: Any) -> tuple[Held, Any, Any]:
        now = draw(names, key, kinds)
        return Held(state.init, now), {"loss": seen(now).sum()}, batch.weight

    def init(key: Any) -> Held:
        first = draw(names, key, kinds)
        return Held(first, first)

    return lambda spec: Agent("drawing", init, act, update, strip=lambda state: state)


def all_drawn(tree: Any) -> list[Drawn]:
    """Return every `Drawn` in a tree."""
    is_drawn = lambda x: isinstance(x, Drawn)
    return [x for x in jax.tree.leaves(tree, is_leaf=is_drawn) if is_drawn(x)]
