"""Strategies: environment, processor, buffer and agent composed into one pure training step."""

from jaxrl.strategies.base import ComposedStep, EvalFns, Policy, StateFns, Strategy, StrategyInfo, fold
from jaxrl.strategies.host_actors import ActorsConfig
from jaxrl.strategies.off_policy import off_policy
from jaxrl.strategies.offline import offline
from jaxrl.strategies.on_policy import on_policy
