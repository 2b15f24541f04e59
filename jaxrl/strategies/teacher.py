"""A trained policy as a teacher: it labels the steps of rollouts with what it would do, for agents to do likewise.

The student acts, so the teacher is asked in the states to which the student comes, as in DAgger (Ross et al. 2011,
https://arxiv.org/abs/1011.0686). The teacher's parameters are constants of the program: no update changes them, and no
checkpoint holds them. What it remembers of an episode, such as the memory of a core, is part of the processor's state.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.agents.base import Agent
from jaxrl.distributions import (
    Categorical,
    Gaussian,
    Head,
    Joint,
    MultiCategorical,
    TanhGaussian,
    demonstrated_raw,
    part_heads,
)
from jaxrl.errors import SettingsError
from jaxrl.masks import PRIVILEGED, action_sizes, has_entry
from jaxrl.processors.base import Processor, StatsFns
from jaxrl.spaces import Discrete, EnvSpec, MultiDiscrete, Space, is_leaf, space_struct, space_zeros
from jaxrl.strategies.base import Policy
from jaxrl.trees import Array, PyTree
from jaxrl.tuning import without_overrides
from jaxrl.types import Step, Transition

SPREAD = 0.1
"""Standard deviation around the action of a teacher that has none, in raw actions; TD3's noise of exploration."""
NEVER = -1e9
"""Logit of an action of probability 0: exactly 0 in float32, and finite, so that `0 log 0` is 0."""


class TrainedPolicy(Protocol):
    """A policy with its parameters, as `jaxrl.load_policy` returns it."""

    policy: Policy
    params: PyTree
    facts: Any
    """A mapping; of it `opt_steps` alone is read, at which agents with action values explore."""

    @property
    def sha256(self) -> str: ...


class Teacher(NamedTuple):
    """A trained policy, and whom it teaches."""

    policy: Policy
    params: PyTree
    """Arrays of the host, which no device owns."""
    opt_step: np.uint32
    head: Head
    """The student's."""
    actions: Space
    privileged: bool
    """Whether it sees the privileged state alone, instead of the whole observation."""

    def view(self, obs: PyTree) -> PyTree:
        """Return what the teacher sees of observations."""
        return obs[PRIVILEGED] if self.privileged else obs


def make_teacher(trained: TrainedPolicy, student: Agent, spec: EnvSpec) -> Teacher:
    """Return the policy `trained` as a teacher of `student` in the environment `spec`.

    Raises:
      SettingsError: the student does not learn from teachers, or actions or observations are not those of the teacher.
    """
    settings = student.info.settings
    head = None if student.policy_fns is None else student.policy_fns.head
    if head is None or (settings is not None and "teacher_coef" not in settings):
        raise SettingsError(f"{student.name} does not learn from a teacher; ppo, a2c, reinforce and impala do")
    if settings is not None and not settings["teacher_coef"]:
        raise SettingsError("there is a teacher, but agent.teacher_coef, its weight in the loss, is 0; set it, as to 1")
    if not hasattr(trained, "policy"):  # the path of its run, most likely
        raise SettingsError(f"teacher is {str(trained)!r}; expected a policy, as jaxrl.load_policy({str(trained)!r})")
    theirs = trained.policy.spec
    if theirs.action_space != spec.action_space:
        raise SettingsError(
            f"the teacher, of {theirs.name}, has actions {theirs.action_space}, but {spec.name} {spec.action_space}; "
            "choose a teacher of the same actions"
        )
    return Teacher(
        trained.policy,
        jax.tree.map(np.asarray, trained.params),
        np.uint32(trained.facts.get("opt_steps") or 0),
        head,
        spec.action_space,
        _sees_privileged(theirs, spec),
    )


def _sees_privileged(theirs: EnvSpec, spec: EnvSpec) -> bool:
    """Return whether a policy of `theirs` sees the privileged state in `spec`, and not the whole observation."""
    mine: Any = spec.observation_space
    kind = lambda space: (space_struct(space), getattr(space, "n", 0))
    if kind(mine) == kind(theirs.observation_space):
        return False
    hidden = has_entry(mine, PRIVILEGED)
    if hidden and kind(mine[PRIVILEGED]) == kind(theirs.observation_space):
        return True
    shapes = lambda space: str(jax.tree.map(lambda x: list(x.shape), space_struct(space))).replace("'", "")
    raise SettingsError(
        f"the teacher, of {theirs.name}, sees observations {shapes(theirs.observation_space)}, but {spec.name} has "
        f"{shapes(mine)}; expected the same, or those of the teacher as its {PRIVILEGED}"
    )


class Carry(NamedTuple):
    """What a teacher remembers, by a name that tells it from the student's own statistics in a checkpoint."""

    teacher: PyTree


def carry_teacher(processor: Processor, teacher: Teacher, spec: EnvSpec) -> Processor:
    """Add the teacher's word on each step to its transition, `extras["teacher"]`, see `label`.

    `spec` is that of the environment: the teacher sees observations before `processor`, and has a processor of its own.
    What is made of the returned processor for acting, by `freeze`, has no teacher.
    """
    policy, params = teacher.policy, teacher.params
    # The parts of a chain keep their places in its state, so that statistics have the same paths in checkpoints with
    # and without a teacher.
    chained = type(jax.eval_shape(processor.init, space_zeros(spec.observation_space, 1))) is tuple
    join = lambda inner, carry: (*inner, Carry(carry)) if chained else (inner, Carry(carry))
    inner_of = lambda state: state[:-1] if chained else state[0]

    def init(obs: PyTree) -> PyTree:
        inner = processor.init(obs)
        with without_overrides():  # a sweep is of the student's settings
            return join(inner, policy.begin(params, teacher.view(obs)))

    def process(state: PyTree, step: Step) -> tuple[PyTree, Transition]:
        carry = state[-1].teacher
        extras = {**step.extras, "teacher": label(teacher, carry)}
        inner, transition = processor.process(inner_of(state), step._replace(extras=extras))
        # A memory goes on with `act`, and all else with the step that the student took.
        carry, _ = policy.act(params, carry)
        seen = step._replace(extras=(), final_obs=teacher.view(step.final_obs), obs=teacher.view(step.obs))
        return join(inner, policy.observe(params, carry, seen)), transition

    return processor._replace(
        init=init,
        process=process,
        observe=lambda state: processor.observe(inner_of(state)),
        stats=StatsFns(
            get=lambda state: processor.get_stats(inner_of(state)),
            freeze=processor.freeze,
            merge=processor.merge_stats,
            get_shared=lambda state: processor.for_actors.get_stats(inner_of(state)),
        ),
        replay_fns=None,
    )


def label(teacher: Teacher, carry: PyTree) -> Array:
    """Return outputs of the student's head that would make its policy the teacher's at the present step, `[N, K]`.

    They are those of the teacher's own distribution where it is of the same kind. Of any other teacher they are those
    of its action: probability 1, or a Gaussian of the deviation `SPREAD` around it. Parts of a dict or tuple of actions
    are labelled one by one.
    """
    policy, head = teacher.policy, teacher.head
    found = None
    if policy.outputs is not None and policy.outputs.distribution is not None:
        found = policy.outputs.distribution(teacher.params, carry, jnp.asarray(teacher.opt_step), ())
    act = lambda: policy.act(teacher.params, carry)[1]
    if not (heads := part_heads(head)):
        return _label_part(head, found, teacher.actions, act)
    spaces = jax.tree.leaves(teacher.actions, is_leaf=is_leaf)
    parts = found.flatten()[0] if isinstance(found, Joint) else [None] * len(heads)
    of_part = lambda i: _label_part(heads[i], parts[i], spaces[i], lambda: jax.tree.leaves(act())[i])
    return head.join([of_part(i) for i in range(len(heads))])


def _label_part(head: Head, found: Any, space: Space, act: Callable[[], Array]) -> Array:
    """Return the outputs of `head` for one space; `found` is the teacher's distribution, `act` returns its action."""
    if isinstance(found, Categorical | MultiCategorical):
        return jnp.maximum(found.logits, NEVER)
    # Only the type is looked at: whether the student's Gaussians are squashed.
    like = head.distribution(jnp.zeros((1, head.outputs)))
    if isinstance(found, Gaussian | TanhGaussian) and type(found) is type(like):
        base: Any = found.base if isinstance(found, TanhGaussian) else found
        return jnp.concatenate([base.mean, base.log_std], axis=-1)
    action = act()
    if isinstance(space, Discrete | MultiDiscrete):
        sizes = action_sizes(space)
        chosen = action.reshape(action.shape[0], -1)
        taken = [jax.nn.one_hot(chosen[:, i], size) for i, size in enumerate(sizes)]
        return NEVER * (1 - jnp.concatenate(taken, axis=-1))
    raw = demonstrated_raw(head, action)
    return jnp.concatenate([raw, jnp.full_like(raw, math.log(SPREAD))], axis=-1)


def settings_of_teacher(trained: TrainedPolicy | None) -> Mapping[str, Any]:
    """Return the settings that say who the teacher is; none without one, so that runs without have no such settings."""
    return {} if trained is None else {"teacher_sha256": trained.sha256}
