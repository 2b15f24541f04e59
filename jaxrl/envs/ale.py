"""Atari inside compiled programs: the vector environment of ALE, stepped by calls that XLA makes itself (`jax.ffi`).

The emulators are objects of C++ and no part of a training state. Three rules make them an environment all the same:

- The token in the state is data that each call takes and returns, so that calls stay in order.
- Before a step, what the emulators show is compared to what the state saw last. Where that differs, as after a resume
  or a rollback, no step is taken that anybody counts or learns from, and a new episode starts.
- Episodes that ended restart within the same step, by resets of single emulators. ALE's own reset comes a step late.
"""

import weakref
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.envs import atari
from jaxrl.envs.base import VecEnv, VecEnvState, zero_invalid_rows
from jaxrl.envs.host import HostEnv, HostStep
from jaxrl.envs.suites import check_flag, check_id
from jaxrl.errors import MissingError, SettingsError, error_text, require_extra
from jaxrl.spaces import Box, Discrete, EnvSpec, space_struct
from jaxrl.trees import Array, Key, PyTree
from jaxrl.types import Step

PREFIX = "ale:"
"""Prefix of the names of these environments, as in `ale:Pong`."""
LEAST_VERSION = (0, 12, 1)
"""First version of ale-py whose resets of single emulators leave the others as they are."""
RESET_TARGET = "atari_vector_xla_reset"
"""Name under which `AtariVectorEnv.xla` registers resets; the function that it returns takes no traced rows."""
NO_SEED = -1
"""Seed of a reset that goes on with the random numbers of the emulator."""


class Screens(NamedTuple):
    """What `N` emulators show."""

    obs: Array
    """Uint8 `[N, H, W, C]`."""
    lives: Array
    frame: Array
    """Int32 `[N]`: frames since the ROM was loaded."""


class AleState(NamedTuple):
    """`VecEnvState.env`: the emulators themselves are elsewhere."""

    token: Array
    """Uint8 `[8]`, zeros: the handle of the emulators, xor what it should be. XLA cannot know that."""
    seen: Screens


def ale_env(name: str, /, *, life_loss: bool | float = False, **params: Any) -> HostEnv:
    """Return the game `name`, such as `ale:Pong`: uint8 frames `[84, 84, 1]`, of which none are stacked yet.

    Spaces, parameters and their defaults are those of `ALE/Pong-v5` in `jaxrl.envs.atari`. It is stepped in compiled
    programs in training without actors, and by ALE's threads in evaluation and by actors.

    Args:
      name: the game in camel case, with or without `ale:`.
      life_loss: in training, end an episode with each life; the next one continues the game. Evaluation and `play` use
        whole games.
      **params: `noop_max`, `frame_skip`, `screen_size`, `grayscale_obs`, `repeat_action_probability`,
        `full_action_space` and `max_num_frames_per_episode`.

    Raises:
      SettingsError: ALE is not installed or too old, or a name or parameter is unknown or invalid.
    """
    ale = require_extra("ale_py", atari.PURPOSE, "atari")
    _check_version(ale.__version__)
    registry = require_extra("gymnasium", atari.PURPOSE, "atari").registry
    games = {id_[len(atari.ATARI) : -len("-v5")]: id_ for id_ in registry if fnmatchcase(id_, f"{atari.ATARI}*-v5")}
    title, lives = check_id(PREFIX, name, games), check_flag("life_loss", life_loss)
    registered = registry[games[title]].kwargs
    # ALE's vector environment has no modes.
    known = [word for word in atari.PARAM_TYPES if word not in ("mode", "difficulty")]
    given = atari.check_settings(PREFIX + title, params, (*known, "life_loss"))
    played = {word: given.get(word, registered[word]) for word in atari.GAME_PARAMS if word in registered}
    shaped = {word: given.get(word, value) for word, value in atari.PREPROCESSING.items()}
    skip, side = shaped["frame_skip"], shaped["screen_size"]
    limit = max(1, played["max_num_frames_per_episode"] // skip)
    arguments = {
        "frameskip": skip,
        "img_height": side,
        "img_width": side,
        "grayscale": shaped["grayscale_obs"],
        "noop_max": shaped["noop_max"] + 1,  # ALE draws from 0 up to one less
        **played,
        "max_num_frames_per_episode": limit * skip,
        "stack_num": 1,
        "use_fire_reset": False,
        "reward_clipping": False,
    }
    settings = {"env": PREFIX + title, "env_args": {**params, **({"life_loss": True} if lives else {})}}
    maker = _Maker(registered["game"], tuple(arguments.items()))
    actions = maker.make(1).single_action_space.n
    frame = Box(0, 255, (side, side, 1 if shaped["grayscale_obs"] else 3), "uint8")
    spec = EnvSpec(PREFIX + title, frame, Discrete(int(actions)), time_limit=limit)
    film = partial(atari.make_game, games[title], played, shaped, False, render_mode="rgb_array")
    whole = HostEnv(spec, partial(_AleVector, maker, spec, False), film, settings)
    env = whole._replace(vectorise=partial(_vectorise, maker, spec, lives))
    return env._replace(open=partial(_AleVector, maker, spec, True), eval_env=whole) if lives else env


def _check_version(version: str) -> None:
    if tuple(int(part) for part in version.split(".")[:3] if part.isdecimal()) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise MissingError(f"{PREFIX}NAME needs ale-py {least}, and {version} is installed: pip install -U ale-py")


class _Maker(NamedTuple):
    """What makes emulators of one kind; hashable."""

    rom: str
    arguments: tuple[tuple[str, Any], ...]

    def make(self, num_envs: int) -> Any:
        """Return an `AtariVectorEnv` of `num_envs` emulators."""
        module = require_extra("ale_py.vector_env", atari.PURPOSE, "atari")
        return module.AtariVectorEnv(self.rom, num_envs, **dict(self.arguments))


# --- in compiled programs -------------------------------------------------------------------------------------------

_UNUSED: dict[tuple[_Maker, int], list[Any]] = {}
"""Emulators whose `VecEnv` is gone. They are used again and never destroyed: a program may outlive its `VecEnv`."""


class _Emulators:
    """`N` emulators of one `VecEnv`, made when a program is first traced that steps them."""

    def __init__(self, maker: _Maker, spec: EnvSpec, num_envs: int) -> None:
        self._kind, self.num_envs = (maker, num_envs), num_envs
        self._shape = (num_envs, *space_struct(spec.observation_space).shape)
        self._opened: tuple[np.ndarray, Any] | None = None

    def _open(self) -> tuple[np.ndarray, Any]:
        """Return the handle of the emulators, uint8 `[8]`, and ALE's function that steps them."""
        if self._opened is None:
            unused = _UNUSED.setdefault(self._kind, [])
            vector = unused.pop() if unused else self._kind[0].make(self.num_envs)
            weakref.finalize(self, unused.append, vector)
            vector.reset()  # without a seed: no state has seen what they show now
            with jax.ensure_compile_time_eval():
                self._opened = np.frombuffer(vector.ale.handle(), np.uint8), vector.xla()[2]
                self._try_once()
        return self._opened

    def _try_once(self) -> None:
        """Raise `SettingsError` if ale-py has no calls for the device."""
        try:
            jax.block_until_ready(jax.jit(self.read)(jnp.zeros(8, jnp.uint8)))
        except jax.errors.JaxRuntimeError as error:
            self._opened = None
            raise SettingsError(f"ale-py cannot step on this device; add --actors 1 ({error_text(error)})") from None

    def step(self, token: Array, action: Array) -> tuple[Array, Screens, Array, Array, Array]:
        """Advance all emulators; return token, screens, rewards, and whether games are over or cut off."""
        handle, advance = self._open()
        after, (obs, reward, over, cut, info) = advance(token ^ handle, action)
        return after ^ handle, Screens(obs.reshape(self._shape), info["lives"], info["frame_number"]), reward, over, cut

    def reset(self, token: Array, rows: Array, seeds: Array) -> tuple[Array, Screens]:
        """Start a game in the emulators `rows`, with int32 `seeds`; return the token and the screens of all."""
        handle, _ = self._open()
        struct = jax.ShapeDtypeStruct
        numbers = [struct((self.num_envs,), jnp.int32)] * 4  # of which the first and the last are not used
        shapes = (struct((8,), jnp.uint8), struct(self._shape, jnp.uint8), *numbers)
        call = jax.ffi.ffi_call(RESET_TARGET, shapes, has_side_effect=True)
        after, obs, _, lives, frame, _ = call(token ^ handle, rows.astype(jnp.int32), seeds)
        return after ^ handle, Screens(obs, lives, frame)

    def read(self, token: Array) -> tuple[Array, Screens]:
        """Return the token and the screens as they are."""
        none = jnp.zeros(0, jnp.int32)
        return self.reset(token, none, none)

    def restart(self, token: Array, seen: Screens, where: Array, seeds: Array) -> tuple[Array, Screens]:
        """Start games where `where` `[N]` is true, one after the other; return the token and all screens."""
        rows, count = jnp.argsort(~where), jnp.sum(where)  # those to start come first, in order

        def one(carry: tuple[Array, Array, Screens]) -> tuple[Array, Array, Screens]:
            i, token, _ = carry
            row = jax.lax.dynamic_slice(rows, (i,), (1,))
            return i + 1, *self.reset(token, row, seeds[row])

        return jax.lax.while_loop(lambda carry: carry[0] < count, one, (jnp.int32(0), token, seen))[1:]


def _vectorise(maker: _Maker, spec: EnvSpec, life_loss: bool, num_envs: int) -> VecEnv:
    """Run `num_envs` games in one compiled program, with the auto-reset of `jaxrl.vectorise`."""
    emulators = _Emulators(maker, spec, num_envs)
    return VecEnv(spec, num_envs, partial(_reset, emulators), partial(_step, emulators, life_loss), resets="fresh")


def _seeds(key: Key, count: int) -> Array:
    """Return int32 seeds `[count]` from 0. The key is consumed."""
    return (jax.random.bits(key, (count,), jnp.uint32) >> 1).astype(jnp.int32)


def _reset(emulators: _Emulators, key: Key) -> tuple[VecEnvState, PyTree]:
    count = emulators.num_envs
    token, seen = emulators.reset(jnp.zeros(8, jnp.uint8), jnp.arange(count), _seeds(key, count))
    return VecEnvState(AleState(token, seen), jnp.zeros(count, jnp.float32), jnp.zeros(count, jnp.int32)), seen.obs


def _step(
    emulators: _Emulators, life_loss: bool, state: VecEnvState, action: Array, key: Key
) -> tuple[VecEnvState, Step]:
    before = state.env.seen
    token, now = emulators.read(state.env.token)
    # False where the emulator is not where this state left it: its step is absent, and cuts the episode.
    there = (now.frame == before.frame) & (now.lives == before.lives)
    there = there & jnp.all(now.obs == before.obs, axis=(1, 2, 3))
    token, after, reward, over, cut = emulators.step(token, action.astype(jnp.int32))
    lost = (after.lives < before.lives) & ~cut if life_loss else jnp.zeros_like(over)
    terminated = (over | lost) & there
    truncated = (cut & ~over) | ~there
    reward = jnp.where(there, reward.astype(jnp.float32), 0.0)
    # A seeded reset loads the ROM again and takes ten times as long, so that the others go on with ALE's own numbers.
    # Where these have begun is unknown of emulators that are not this state's.
    seeds = jnp.where(there, jnp.int32(NO_SEED), _seeds(key, emulators.num_envs))
    token, seen = emulators.restart(token, after, over | cut | ~there, seeds)
    total, length, done = state.episode_return + reward, state.episode_length + 1, terminated | truncated
    step = Step(
        action=action,
        extras=(),
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        final_obs=zero_invalid_rows(there, after.obs),
        obs=seen.obs,
        info={"lives": after.lives, "episode_return": total, "episode_length": length},
        valid=there,
        present=there,
    )
    bookkeeping = jnp.where(done, 0.0, total), jnp.where(done, 0, length)
    return VecEnvState(AleState(token, seen), *bookkeeping), step


# --- on the host ----------------------------------------------------------------------------------------------------


class _AleVector:
    """`N` games stepped by ALE's threads, as a `HostVector`."""

    def __init__(
        self, maker: _Maker, spec: EnvSpec, lives: bool, num_envs: int, seed: int, processes: bool = False
    ) -> None:
        del processes  # ALE has its own threads
        self._vector, self._seed, self._lives = maker.make(num_envs), seed % 2**31, lives
        self._shape = (num_envs, *space_struct(spec.observation_space).shape)
        self._left = np.zeros(num_envs, np.int32)
        self._over = np.ones(num_envs, bool)
        """Whether the game is over; with lives, an episode may end earlier."""

    def reset(self, which: np.ndarray | None = None) -> PyTree:
        if which is None:
            seeds = (self._seed + np.arange(self._vector.num_envs)) % 2**31
            obs, info = self._vector.reset(seed=seeds.astype(np.int32))
        else:
            # Without a new game, the next life begins with the current frame, which is returned for all other rows.
            obs, info = self._vector.reset(options={"reset_mask": which & self._over})
        self._left = info["lives"]
        return obs.reshape(self._shape)

    def step(self, action: PyTree) -> HostStep:
        obs, reward, over, cut, info = self._vector.step(np.asarray(action, np.int32))
        terminated = over | (info["lives"] < self._left) & ~cut if self._lives else over
        self._over, self._left = over | cut, info["lives"]
        scalars: Mapping[str, np.ndarray] = {"lives": info["lives"].astype(np.float32)}
        return HostStep(obs.reshape(self._shape), reward, terminated, cut & ~over, scalars)

    def close(self, kill: bool = False) -> None:
        """Leave the emulators to the collector of garbage, which ends their threads."""
