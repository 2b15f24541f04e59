"""Members that train together: their calls meet, and one program answers them all.

Each member stays a run with a loop of its own on the host, in a thread of its own. Where its loop would call a program,
it asks its team, which answers as soon as all members that are on their way have asked: `width` members make their
iterations in one call of a program that `vmap` made, at the same counters. A member that does not take part, since it
waits for a search or has gone back to a checkpoint, is set aside meanwhile, bit for bit.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Condition, Semaphore
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.strategies.base import EpisodeEnds, Strategy
from jaxrl.strategies.population import Member, Population
from jaxrl.training.evaluator import CompiledEvaluator, Evaluation
from jaxrl.training.mesh import MeshShape
from jaxrl.training.program import Sums, compile_together
from jaxrl.trees import Array, Key, PyTree
from jaxrl.xla.options import graph_options


class Call(NamedTuple):
    """What a member asks its team for."""

    given: tuple[PyTree, PyTree]
    """State and sums; parameters and key where it asks for an evaluation."""
    start: int = -1
    stop: int = -1
    """Iterations; those of an evaluation are negative, so it comes first."""


class Lane:
    """A member's place in a team: what its trainer calls in place of programs of its own."""

    def __init__(self, team: "Team", place: int) -> None:
        """Take the lane `place` of `team`."""
        self._team, self._place = team, place
        self.others = self

    def run(self, state: PyTree, sums: Sums, t: int, stop: int) -> tuple[PyTree, Sums, int, list[EpisodeEnds]]:
        """Make iterations from `t` on, `stop - t` at most; return how far they came as well, see `ActorPool.run`."""
        made: tuple[PyTree, Sums, int, list[EpisodeEnds]] = self._team.ask(self._place, Call((state, sums), t, stop))
        return made

    def __call__(self, params: PyTree, key: Key) -> Evaluation:
        """Evaluate beside the others."""
        found: Evaluation = self._team.ask(self._place, Call((params, key)))
        return found

    def whole(self, state: PyTree) -> PyTree:
        """Return a state by itself, wherever it is."""
        return state.part(_itself) if isinstance(state, Away) else state

    def part(self, state: PyTree, choose: Callable[[PyTree], PyTree]) -> PyTree:
        """Return what `choose` takes of a state; of its health, what the last call has told."""
        if not isinstance(state, Away):
            return choose(state)
        return state.health if choose == self._team.strategy.state_fns.health else state.part(choose)

    def params(self, strategy: Strategy, state: PyTree) -> PyTree:
        """Return what the policy needs of a state; without a policy, the state."""
        return self.whole(state) if strategy.policy is None else self.part(state, strategy.policy.params)

    def evaluator_for(self, evaluator: Any) -> Any:
        """Return what evaluates this member in place of `evaluator`."""
        return self if self._team.evaluates else evaluator

    @property
    def actions(self) -> str | None:
        """How actions are chosen in evaluations, see `EvalKind`."""
        return self._team.actions

    def leave(self) -> None:
        """Let the others go on without this member."""
        self._team.leave(self._place)

    def join(self) -> None:
        """Have the others wait for this member again."""
        self._team.join(self._place)


class Away:
    """A state that lies among those of a team, in the lane of a member, until the next call for that member."""

    def __init__(self, team: "Team", place: int, health: Any) -> None:
        """Point to the lane `place`; `health` is what the strategy says of it."""
        self._team, self.place, self.health = team, place, health
        self.kept: PyTree = None
        """The state, once its lane was needed for something else."""

    def whole(self) -> PyTree:
        """Return the state by itself."""
        return self.part(_itself)

    def part(self, choose: Callable[[PyTree], PyTree]) -> PyTree:
        """Return what `choose` takes of the state."""
        return self._team.read(self, choose)


class Team:
    """Members of one strategy that share a program with `width` lanes, on one device."""

    def __init__(
        self, strategy: Strategy, members: int, width: int, device: Any, tells: bool, evaluator: Any, host: Semaphore
    ) -> None:
        """Expect so many members; `host` is held by each but while it waits. Lanes without a member repeat another."""
        self.strategy, self.device, self.evaluates = strategy, device, isinstance(evaluator, CompiledEvaluator)
        self.actions: str | None = getattr(evaluator, "actions", None)
        self._width, self._tells, self._host, self._turn = width, tells, host, Condition()
        run = evaluator.run if isinstance(evaluator, CompiledEvaluator) else None
        self._evaluation: Any = run and jax.jit(jax.vmap(run), compiler_options=graph_options())
        self._expected = set(range(members))
        self._asked: dict[int, Call] = {}
        self._answers: dict[int, Any] = {}
        self._states: PyTree = None
        self._away: dict[int, Away] = {}
        """Whose state is in its lane of `_states`."""

    def compile(self) -> Any:
        """Return the program of the iterations."""
        return compile_together(self.strategy, self._width, self._tells)

    def ask(self, place: int, call: Call) -> Any:
        """Wait for the others; return what the call comes to."""
        # While this member waits, another may have its place on the host. Whoever comes last answers for all.
        with self._waiting(), self._turn:
            self._asked[place] = call
            self._turn.notify_all()
            while place not in self._answers:
                if self._asked and self._expected <= self._asked.keys():
                    self._answer()
                else:
                    self._turn.wait()
            answer = self._answers.pop(place)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def leave(self, place: int) -> None:
        """Answer the others without the member `place`."""
        with self._turn:
            self._expected.discard(place)
            self._turn.notify_all()

    def join(self, place: int) -> None:
        """Wait for the member `place` again."""
        with self._turn:
            self._expected.add(place)

    def dissolve(self) -> None:
        """Answer from now on whoever asks at once."""
        with self._turn:
            self._expected.clear()
            self._turn.notify_all()

    def read(self, away: Away, choose: Callable[[PyTree], PyTree]) -> PyTree:
        """Return what `choose` takes of a state."""
        with self._turn:
            if away.kept is not None:
                return choose(away.kept)
            return _read(choose, self._states, np.int32(away.place))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._host.release()
        try:
            yield
        finally:
            self._host.acquire()

    def _answer(self) -> None:
        """Answer all that ask for evaluations, or for the earliest iterations."""
        # Only those at the earliest iterations: a member that has gone back to a checkpoint first catches up.
        start = min(call.start for call in self._asked.values())
        due = {place: self._asked.pop(place) for place, call in sorted(self._asked.items()) if call.start == start}
        try:
            answers: dict[int, Any] = self._evaluated(due) if start < 0 else self._trained(due)
        # All who have asked are told, for none of them would get another answer.
        except Exception as error:
            answers = dict.fromkeys(due, error)
        self._answers.update(answers)
        self._turn.notify_all()

    def _evaluated(self, due: dict[int, Call]) -> dict[int, Any]:
        first = next(iter(due))
        # A lane without a member that asks repeats the first: its result is not used.
        rows = [due.get(place, due[first]).given for place in range(self._width)]
        made = jax.device_get(self._evaluation(*_stacked(rows)))
        return {place: Evaluation(*jax.tree.map(lambda x, i=place: x[i], tuple(made))) for place in due}

    def _trained(self, due: dict[int, Call]) -> dict[int, Any]:
        self._put({place: call.given[0] for place, call in due.items()})
        # As far as the first of them wants to go; the others ask again.
        stop, first = min(call.stop for call in due.values()), next(iter(due))
        sums = [due.get(place, due[first]).given[1] for place in range(self._width)]
        stacked = jax.tree.map(lambda *rows: np.stack(rows), *jax.device_get(sums))
        made = self.compile()(self._states, stacked, np.uint32(due[first].start), np.uint32(stop))
        # The answers refer to lanes of these states; each member's is cut out only where someone reads it.
        self._states = made.state
        of_all = jax.device_get((made.sums, made.ended_rows, made.health))
        answers = {}
        for place in due:
            new, ended, health = jax.tree.map(lambda x, i=place: x[i], of_all)
            self._away[place] = Away(self, place, health)
            answers[place] = self._away[place], new, stop, ended
        return answers

    def _put(self, given: dict[int, PyTree]) -> None:
        """Put states into their lanes; what is in other lanes is set aside."""
        # The program works on every lane and donates it, so the state of a member that takes no part is copied out
        # before.
        for place in [place for place in self._away if place not in given]:
            away = self._away.pop(place)
            away.kept = away.whole()
        for place, state in given.items():
            # It lies in its lane already, as after most calls.
            if isinstance(state, Away) and self._away.get(place) is state:
                continue
            one = jax.device_put(state.whole() if isinstance(state, Away) else state, self.device)
            # The first state fills all lanes, so that each holds one that can be computed with.
            if self._states is None:
                self._states = _repeated(one, self._width)
            else:
                self._states = _write(self._states, one, np.int32(place))


def _itself(state: PyTree) -> PyTree:
    return state


@partial(jax.jit, static_argnums=0)
def _read(choose: Callable[[PyTree], PyTree], states: PyTree, place: Array) -> PyTree:
    return choose(jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, place, keepdims=False), states))


@partial(jax.jit, donate_argnums=0)
def _write(states: PyTree, one: PyTree, place: Array) -> PyTree:
    return jax.tree.map(lambda all, x: jax.lax.dynamic_update_index_in_dim(all, x, place, 0), states, one)


@partial(jax.jit, static_argnums=1)
def _repeated(one: PyTree, times: int) -> PyTree:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (times, *x.shape)), one)


@jax.jit
def _stacked(rows: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *x: jnp.stack(x), *rows)


class Places(NamedTuple):
    """Where the members of a population train."""

    lanes: dict[int, Lane]
    """Of those that train together, by number."""
    devices: dict[int, Any]
    """Of each member, by number, the first of its devices; `None` for JAX's default."""
    teams: list[Team]
    several: int = 1
    """Devices of each member."""

    def on(self, number: int, strategy: Strategy) -> Strategy:
        """Return the strategy of a member on its devices."""
        if self.several == 1:
            return strategy
        first = jax.devices().index(self.devices[number])
        placement = strategy.placement._replace(devices=self.several, first_device=first)
        return strategy._replace(placement=placement)

    def free(self, number: int, going: Iterable[int]) -> bool:
        """Say whether a member may train while others are `going`.

        Programs of the same devices, begun by two threads, could wait for each other for ever.
        """
        return self.several == 1 or self.devices[number] not in {self.devices[other] for other in going}

    def leave(self, number: int) -> None:
        """Have nobody wait for a member."""
        if number in self.lanes:
            self.lanes[number].leave()

    def join(self, number: int) -> None:
        """Have the others of its team wait for a member again."""
        if number in self.lanes:
            self.lanes[number].join()

    def dissolve(self) -> None:
        """Have nobody wait for anybody."""
        for team in self.teams:
            team.dissolve()

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """Run on the first device of a member."""
        with jax.default_device(self.devices[number]) if self.devices[number] else nullcontext():
            yield


def widths(population: Population) -> list[list[Member]]:
    """Return the teams of members that train together: those of one strategy, at most `width` each."""
    by_strategy: dict[int, list[Member]] = {}
    for member in population.members:
        by_strategy.setdefault(id(member.strategy.step), []).append(member)
    width = population.layout.width or len(population.members)
    return [group[i : i + width] for group in by_strategy.values() for i in range(0, len(group), width)]


def placed(
    population: Population,
    shape: MeshShape,
    tells: Callable[[Strategy], bool],
    evaluator: Callable[[Strategy], Any],
    host: Semaphore,
) -> Places:
    """Place the members of a population on devices, and those that train together in teams.

    Args:
      population: the members.
      shape: how many groups of devices there are for members, and how many each has.
      tells: whether the training of a strategy also tells which episodes ended.
      evaluator: what evaluates members of a strategy.
      host: how many members work on the host at the same time.
    """
    # Teams, or members, go round the groups of devices.
    first = lambda place: place % shape.members * shape.envs
    device = lambda place: jax.devices()[first(place)] if shape.devices > 1 else None
    if population.layout.name != "together":
        devices = {m.number: device(place) for place, m in enumerate(population.members)}
        return Places({}, devices, [], shape.envs)
    groups = widths(population)
    places = Places({}, {}, [])
    widest: dict[int, int] = {}
    for group in groups:
        step = id(group[0].strategy.step)
        widest[step] = max(widest.get(step, 0), len(group))
    for number, group in enumerate(groups):
        strategy = group[0].strategy
        # All teams of a strategy have the same width, and so share one program.
        width, tell = widest[id(strategy.step)], tells(strategy)
        team = Team(strategy, len(group), width, device(number), tell, evaluator(strategy), host)
        places.teams.append(team)
        places.lanes.update({member.number: Lane(team, place) for place, member in enumerate(group)})
        places.devices.update(dict.fromkeys((member.number for member in group), team.device))
    return places


def outline(population: Population, mesh: MeshShape, workers: int, programs: int) -> str:
    """Say how many members there are, of how many settings, and how they train."""
    count = len(population.members)
    settings = len({tuple(member.swept.items()) for member in population.members})
    made = f"{settings} setting{'s' * (settings > 1)} with {count // settings} seed{'s' * (count > settings)} each"
    shared = "one program" if programs == 1 else f"{programs} programs"
    layout = population.layout.name
    at_once = len(widths(population)[0]) if layout == "together" else workers
    each = f", {mesh.envs} each" if mesh.envs > 1 else ""
    over = f" on {mesh.devices} devices{each}" if mesh.devices > 1 else ""
    return f"{count} members: {made}, {at_once} at a time{over} ({layout}), {shared}"
