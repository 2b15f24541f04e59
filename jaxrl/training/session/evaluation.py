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


class Recording(NamedTuple):
    """The film so far of the first counted episode of environment 0 in an evaluation."""

    draw: Callable[[], Any]
    """Renders the current state of that environment, `[H, W, 3]` uint8."""
    form: str
    pictures: tuple[np.ndarray, ...] = ()
    total: float | None = None
    """The episode's return, once it is over."""
    failed: str = ""
    """Why there is no film."""

    def begin(self) -> "Recording":
        """Take the first frame of an episode; drop those of an episode that was abandoned."""
        # Once the film is complete, later episodes are not filmed.
        return self if self.total is not None else self._replace(pictures=()).take_frame()

    def after(self, total: float, ended: bool) -> "Recording":
        """Take a frame after a step; `total` is the return so far, and `ended` whether the step ended the episode."""
        if self.total is not None:
            return self
        recording = self.take_frame()
        return recording._replace(total=total) if ended else recording

    def take_frame(self) -> "Recording":
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
    recording: Recording | None = None
    """The film of the first counted episode of environment 0."""

    @property
    def is_over(self) -> bool:
        """Whether no episode remains."""
        return not self.left.any()

    @property
    def result(self) -> Evaluation:
        """The counted episodes."""
        returns, lengths = (np.array(numbers) for numbers in zip(*self.found, strict=True))
        return Evaluation(returns, lengths, np.ones(len(returns), bool))

    def start_episodes(self, spoilt: np.ndarray) -> "EpisodeEvaluation":
        """Return the evaluation with new episodes where some ended; `spoilt` `[N]`: the observation is not finite."""
        # NaN stays NaN to the end of the episode.
        returns = np.where(spoilt, np.nan, np.where(self.ended, 0.0, self.returns))
        lengths = np.where(self.ended, 0, self.lengths)
        return self._replace(returns=returns, lengths=lengths, ended=np.zeros_like(self.ended))

    def after(self, result: StepResult, reset: np.ndarray) -> "EpisodeEvaluation":
        """Return the evaluation after a step; where `reset` `[N]`, the step was a reset and begins an episode."""
        reward, _, _, valid = result.numbers
        returns = np.where(np.asarray(valid) > 0, self.returns + reward, np.nan)
        lengths, ended = self.lengths + 1, ends(result)
        # Count an episode only if it began in the evaluation and its environment has episodes left.
        counted = ended & self.counts & (self.left > 0) & ~reset
        recording = self.recording
        if recording is not None and self.counts[0] and not reset[0]:
            recording = recording.after(returns[0], bool(ended[0]))
        found = [(float(returns[i]), int(lengths[i])) for i in np.flatnonzero(counted)]
        return self._replace(
            left=self.left - counted,
            # After an end, the next episode begins in the evaluation.
            counts=self.counts | ended,
            ended=ended,
            returns=returns,
            lengths=lengths,
            seen=result.next_obs,
            found=(*self.found, *found),
            recording=recording,
        )

    def cut(self) -> "EpisodeEvaluation":
        """Return the evaluation with its running episodes discarded, uncounted, and new ones begun."""
        yes = np.ones_like(self.ended)
        return self._replace(ended=yes, counts=yes)


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

    def act(self, now: EpisodeEvaluation, given: Observations) -> EpisodeEvaluation:
        """Return the evaluation with greedy actions for these observations."""
        if now.chosen is None:
            chosen = self._begin(now.params, given.obs)
        else:
            chosen = self._follow(now.params, *now.chosen, now.seen, given.obs, now.ended)
        begins = bool(now.ended[0] and now.counts[0])
        recording = now.recording.begin() if now.recording is not None and begins else now.recording
        return now.start_episodes(~given.valid)._replace(chosen=chosen, seen=given.obs, recording=recording)


def _follow(
    policy: Policy, params: PyTree, carry: PyTree, action: PyTree, seen: PyTree, obs: PyTree, ended: Any
) -> tuple[PyTree, PyTree]:
    """Return the policy's carry and its next actions; where `ended` `[N]`, `obs` begins another episode."""
    zeros = jnp.zeros(ended.shape, jnp.float32)
    carry = policy.observe(params, carry, Step(action, (), zeros, ended, zeros > 0, final_obs=seen, obs=obs))
    return policy.act(params, carry)
