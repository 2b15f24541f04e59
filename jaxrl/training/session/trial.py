"""An evaluation in the user's loop: complete episodes of the greedy policy, without learning."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import SettingsError, error_text
from jaxrl.strategies.base import Policy
from jaxrl.strategies.stepwise import StepResult
from jaxrl.training.evaluator import Evaluation
from jaxrl.training.film import LONGEST, as_picture
from jaxrl.training.policy import begin
from jaxrl.training.session.inputs import Observations, ends
from jaxrl.trees import PyTree
from jaxrl.types import Step


class Shot(NamedTuple):
    """The film so far of the first counted episode of environment 0 in an evaluation."""

    draw: Callable[[], Any]
    """Renders the current state of that environment, `[H, W, 3]` uint8."""
    form: str
    pictures: tuple[np.ndarray, ...] = ()
    total: float | None = None
    """The episode's return, once it is over."""
    failed: str = ""
    """Why there is no film."""

    def begin(self) -> "Shot":
        """Take the first frame of an episode; drop those of an episode that was abandoned."""
        # Once the film is complete, later episodes are not filmed.
        return self if self.total is not None else self._replace(pictures=()).take_frame()

    def after(self, total: float, ended: bool) -> "Shot":
        """Take a frame after a step; `total` is the return so far, and `ended` whether the step ended the episode."""
        if self.total is not None:
            return self
        shot = self.take_frame()
        return shot._replace(total=total) if ended else shot

    def take_frame(self) -> "Shot":
        """Take a frame; an error fails the film, not the loop."""
        if self.failed or len(self.pictures) > LONGEST:
            return self
        try:
            return self._replace(pictures=(*self.pictures, _seen(self.draw())))
        except Exception as error:
            return self._replace(failed=error_text(error))

    def result(self) -> tuple[tuple[np.ndarray, ...], float]:
        """Return the frames and the return; raise `SettingsError` if there is no film."""
        if self.failed or self.total is None:
            raise SettingsError(self.failed or "the episode did not end")
        return self.pictures, self.total


def _seen(drawn: Any) -> np.ndarray:
    if drawn is None:
        raise SettingsError("film drew nothing; make a Gymnasium environment with render_mode='rgb_array'")
    return as_picture(drawn, "the environment")


class EpisodeEvaluation(NamedTuple):
    """The state of an evaluation; arrays are `[N]`, or for the policy `[N, ...]`."""

    params: PyTree
    """Parameters of the evaluated policy."""
    left: np.ndarray
    """Remaining episodes of each environment: a fixed number, to avoid a bias towards short ones."""
    counts: np.ndarray
    """Whether the running episode counts; one begun before the evaluation is played to its end, uncounted."""
    ended: np.ndarray
    """Whether the next observation begins an episode."""
    returns: np.ndarray
    """Returns of the running episodes; NaN after a non-finite step."""
    lengths: np.ndarray
    seen: PyTree
    """The latest observations."""
    found: tuple[tuple[float, int], ...] = ()
    """Returns and lengths of the counted episodes."""
    chosen: tuple[PyTree, PyTree] | None = None
    """The policy's carry and its latest actions."""
    shot: Shot | None = None
    """The film of the first counted episode of environment 0."""

    @property
    def over(self) -> bool:
        return not self.left.any()

    @property
    def evaluation(self) -> Evaluation:
        returns, lengths = (np.array(numbers) for numbers in zip(*self.found, strict=True))
        return Evaluation(returns, lengths, np.ones(len(returns), bool))


class EpisodeEvaluator:
    """Runs evaluations of one policy, compiled once."""

    def __init__(self, policy: Policy) -> None:
        self._begin, self._follow = jax.jit(partial(begin, policy)), jax.jit(partial(_follow, policy))

    def first(self, params: PyTree, episodes: int, seen: PyTree, ended: np.ndarray) -> EpisodeEvaluation:
        """Return a new evaluation over `episodes` episodes; where `ended`, the next observation begins one."""
        num_envs = len(ended)
        # Divided evenly; the first environments play the remainder.
        left = episodes // num_envs + (np.arange(num_envs) < episodes % num_envs)
        returns, lengths = np.zeros(num_envs), np.zeros(num_envs, int)
        return EpisodeEvaluation(params, left, ended.copy(), ended.copy(), returns, lengths, seen)

    def act(self, trial: EpisodeEvaluation, given: Observations) -> EpisodeEvaluation:
        """Return the evaluation with greedy actions for these observations."""
        if trial.chosen is None:
            chosen = self._begin(trial.params, given.obs)
        else:
            chosen = self._follow(trial.params, *trial.chosen, trial.seen, given.obs, trial.ended)
        begins = bool(trial.ended[0] and trial.counts[0])
        shot = trial.shot.begin() if trial.shot is not None and begins else trial.shot
        return _start_episodes(trial, trial.ended, ~given.valid)._replace(chosen=chosen, seen=given.obs, shot=shot)


def _follow(
    policy: Policy, params: PyTree, carry: PyTree, action: PyTree, seen: PyTree, obs: PyTree, ended: Any
) -> tuple[PyTree, PyTree]:
    """Return the policy's carry and its next actions; where `ended` `[N]`, `obs` begins another episode."""
    zeros = jnp.zeros(ended.shape, jnp.float32)
    carry = policy.observe(params, carry, Step(action, (), zeros, ended, zeros > 0, final_obs=seen, obs=obs))
    return policy.act(params, carry)


def _start_episodes(trial: EpisodeEvaluation, where: np.ndarray, spoilt: np.ndarray) -> EpisodeEvaluation:
    # NaN stays NaN to the end of the episode.
    returns = np.where(spoilt, np.nan, np.where(where, 0.0, trial.returns))
    return trial._replace(returns=returns, lengths=np.where(where, 0, trial.lengths), ended=np.zeros_like(where))


def after(trial: EpisodeEvaluation, result: StepResult, reset: np.ndarray) -> EpisodeEvaluation:
    """Return the evaluation after a step; where `reset` `[N]`, the step was a reset and begins an episode."""
    reward, _, _, valid = result.numbers
    returns = np.where(np.asarray(valid) > 0, trial.returns + reward, np.nan)
    lengths, ended = trial.lengths + 1, ends(result)
    # Count an episode only if it began in the evaluation and its environment has episodes left.
    counted = ended & trial.counts & (trial.left > 0) & ~reset
    shot = trial.shot
    if shot is not None and trial.counts[0] and not reset[0]:
        shot = shot.after(returns[0], bool(ended[0]))
    found = [(float(returns[i]), int(lengths[i])) for i in np.flatnonzero(counted)]
    return trial._replace(
        left=trial.left - counted,
        # After an end, the next episode begins in the evaluation.
        counts=trial.counts | ended,
        ended=ended,
        returns=returns,
        lengths=lengths,
        seen=result.next_obs,
        found=(*trial.found, *found),
        shot=shot,
    )


def cut(trial: EpisodeEvaluation) -> EpisodeEvaluation:
    """Return the evaluation with its running episodes discarded, uncounted, and new ones begun."""
    yes = np.ones_like(trial.ended)
    return trial._replace(ended=yes, counts=yes)
