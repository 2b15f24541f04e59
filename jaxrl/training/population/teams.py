"""Members that train together: their calls are batched into one vmapped program.

Each member remains a run with its own loop on the host, in its own thread. Instead of calling a program, the loop calls
its team, which executes once all running members have called: `width` members make their iterations in one call of a
vmapped program, at the same counters. The state of a member that does not take part, because it waits for a search or
was rolled back to a checkpoint, is saved meanwhile, bit for bit.

A `Team` has the program and the states of its members, side by side. A member's trainer has a `TeamLane` of it where
other runs have a `Lane`, and in place of its state a `StateRef`, which says where in the team the state is.
`MemberPlacement` has the lane and the devices of each member.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import Condition, RLock, Semaphore
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.strategies.base import EpisodeEnds, Strategy
from jaxrl.strategies.population import Member, Population
from jaxrl.training.devices import move_state
from jaxrl.training.evaluator import CompiledEvaluator, Evaluation
from jaxrl.training.loop import Lane
from jaxrl.training.mesh import MeshShape
from jaxrl.training.program import Sums, compile_evaluation_together, compile_together
from jaxrl.training.storage.leaves import HostKeys
from jaxrl.training.storage.run import Storage
from jaxrl.trees import Array, Key, PyTree, is_key, key_impl, tree_bytes, tree_repeat

MEMBER_S = 0.004
"""Target duration of a call for each member, in seconds, some 25 times what the host spends on a member and call."""
MAX_COPY_BYTES = 1 << 28
"""Maximum size of the states of a team that are copied to the host at once."""


class Request(NamedTuple):
    """A member's request to its team."""

    given: tuple[PyTree, PyTree]
    """State and sums; for an evaluation, parameters and key."""
    start: int = -1
    stop: int = -1
    """Range of iterations; negative for an evaluation, so that it comes first."""


class TeamLane(Lane):
    """A member's lane in a team, which its trainer calls instead of its own programs."""

    def __init__(self, team: "Team", index: int, runs_per_worker: float) -> None:
        """Refer to the lane `index` of `team`; `runs_per_worker` runs share a worker on the host, this one included."""
        self.team, self.index, self._runs_per_worker = team, index, runs_per_worker
        self.runner = self
        team.lanes.append(self)
        self.chunk_s = max(Lane.chunk_s, MEMBER_S * team.members)

    def run(self, state: PyTree, sums: Sums, t: int, stop: int) -> tuple[PyTree, Sums, int, list[EpisodeEnds]]:
        """Make iterations from `t`, at most `stop - t`; the iteration reached is returned too, see `ActorPool.run`."""
        return self.team.call(self.index, Request((state, sums), t, stop))

    def __call__(self, params: PyTree, key: Key) -> Evaluation:
        """Evaluate together with the team."""
        return self.team.call(self.index, Request((params, key)))

    def whole(self, state: PyTree) -> PyTree:
        """Return the state itself, read from its lane if necessary."""
        return whole(state)

    def to_save(self, state: PyTree) -> PyTree:
        """Return the state itself for a checkpoint, from the host's copy of all lanes if there can be one."""
        return self.team.copy(state) if isinstance(state, StateRef) else state

    def part(self, state: PyTree, choose: Callable[[PyTree], PyTree]) -> PyTree:
        """Return `choose(state)`, read from its lane if necessary; health is the value that the last call returned."""
        if not isinstance(state, StateRef):
            return choose(state)
        return state.health if choose == self.team.strategy.state_fns.health else state.part(choose)

    def params(self, strategy: Strategy, state: PyTree) -> PyTree:
        """Return the policy's parameters in a state; without a policy, the state."""
        return self.whole(state) if strategy.policy is None else self.part(state, strategy.policy.params)

    def is_time_to_save(self, storage: Storage, t: int, seconds: float) -> bool:
        """Return the team's decision at iteration `t`, made by the first member to ask."""
        decide = lambda held_s: storage.is_time_to_save(seconds, held_s, self._runs_per_worker)
        return self.team.is_time_to_save(t, decide)

    @property
    def actions(self) -> str | None:
        """How actions are chosen in evaluations, see `EvalKind`."""
        return self.team.actions


class StateRef:
    """A member's state while its team has it; the member's next call makes another, and this one is no longer read."""

    def __init__(self, team: "Team", lane: int, health: Any) -> None:
        """Refer to a lane; `health` is the strategy's health of the state."""
        self._team, self.lane, self.health = team, lane, health
        self.kept: PyTree = None
        """A copy of the state, made once its lane was needed."""

    def part(self, choose: Callable[[PyTree], PyTree]) -> PyTree:
        """Return `choose` of the state."""
        return self._team.read(self, choose)


def whole(state: PyTree) -> PyTree:
    """Return a state itself, read from its lane if it is a reference."""
    return state.part(_identity) if isinstance(state, StateRef) else state


class Team:
    """Members of one strategy that share a program with `width` lanes, on one device."""

    def __init__(
        self,
        strategy: Strategy,
        members: int,
        width: int,
        device: Any,
        with_episodes: bool,
        evaluator: Any,
        host: Semaphore,
    ) -> None:
        """Create a team of `members`, which release `host` while they wait; unused lanes repeat the data of another."""
        self.strategy, self.members, self.device = strategy, members, device
        self._evaluate_one = evaluator.run if isinstance(evaluator, CompiledEvaluator) else None
        self.actions: str | None = getattr(evaluator, "actions", None)
        self._width, self._with_episodes, self._host, self._lock = width, with_episodes, host, RLock()
        # A condition for each member: a result wakes the members that it is for, and no others.
        self._conditions = [Condition(self._lock) for _ in range(members)]
        self._expected = set(range(members))
        self._requests: dict[int, Request] = {}
        self._results: dict[int, Any] = {}
        self._run: Any = None
        self._evaluation: Any = None
        self._states: PyTree = None
        self._copies: PyTree = None
        """The leaves of `_states` on the host, see `_on_host`; copied when the first member saves."""
        self._refs: dict[int, StateRef] = {}
        """References to the valid lanes of `_states`."""
        self.lanes: list[TeamLane] = []
        """The lanes of its members."""
        self._save_decision = -1, False
        """The iteration at which the members were last asked whether to save, and the decision."""

    @property
    def evaluates(self) -> bool:
        """Whether it evaluates its members."""
        return self._evaluate_one is not None

    def compile(self) -> None:
        """Compile its programs, which teams of one strategy share."""
        self._run = compile_together(self.strategy, self._width, self._with_episodes)
        if self._evaluate_one is not None:
            self._evaluation = compile_evaluation_together(self.strategy, self._evaluate_one, self._width)

    def call(self, lane: int, request: Request) -> Any:
        """Submit a request and wait for its result."""
        # While this member waits, another may work on the host. The last to call executes for all.
        with self._waiting(), self._lock:
            self._requests[lane] = request
            while lane not in self._results:
                if self._is_complete():
                    self._execute()
                else:
                    self._conditions[lane].wait()
            result = self._results.pop(lane)
            # The requests that are left may need no further one: those of a team that is dissolved, for example.
            self._wake()
        if isinstance(result, BaseException):
            raise result
        return result

    def leave(self, lane: int) -> None:
        """Stop waiting for the member in `lane`."""
        with self._lock:
            self._expected.discard(lane)
            self._wake()

    def join(self, lane: int) -> None:
        """Wait for the member in `lane` again."""
        with self._lock:
            self._expected.add(lane)

    def dissolve(self) -> None:
        """Execute all requests immediately from now on."""
        with self._lock:
            self._expected.clear()
            self._wake()

    def read(self, ref: StateRef, choose: Callable[[PyTree], PyTree]) -> PyTree:
        """Return `choose` of the state that `ref` refers to."""
        with self._lock:
            if ref.kept is not None:
                return choose(ref.kept)
            return _read(choose, self._states, np.int32(ref.lane))

    def copy(self, ref: StateRef) -> PyTree:
        """Return the state that `ref` refers to, its leaves on the host if the states of all members are small.

        Members save at the same time, and one copy of all lanes takes as long as those of a few.
        """
        with self._lock:
            if self._copies is None and ref.kept is None and tree_bytes(self._states) <= MAX_COPY_BYTES:
                self._copies = jax.tree.map(_on_host, self._states)
            if self._copies is None or ref.kept is not None:
                return self.read(ref, _identity)
            return jax.tree.map(lambda rows: rows(ref.lane), self._copies)

    def is_time_to_save(self, t: int, decide: Callable[[float], bool]) -> bool:
        """Return whether the members save at iteration `t`: all of them or none, so that one save holds them all.

        Only the first one that asks there calls `decide`, with the seconds for which the last save held up a member, on
        average: the first to save copies the states of all.
        """
        with self._lock:
            if self._save_decision[0] != t:
                self._save_decision = t, decide(sum(lane.held_s for lane in self.lanes) / len(self.lanes))
            return self._save_decision[1]

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._host.release()
        try:
            yield
        finally:
            self._host.acquire()

    def _is_complete(self) -> bool:
        """Return whether there are requests, those of all members that the team waits for among them."""
        return bool(self._requests) and self._expected <= self._requests.keys()

    def _wake(self) -> None:
        """Have one of the members that wait execute the requests, if they are complete."""
        if self._is_complete():
            self._conditions[min(self._requests)].notify()

    def _execute(self) -> None:
        """Execute the pending evaluations, or else the requests with the earliest iterations."""
        # The earliest first: a member that was rolled back to a checkpoint catches up with the others.
        start = min(request.start for request in self._requests.values())
        due = {lane: self._requests.pop(lane) for lane, one in sorted(self._requests.items()) if one.start == start}
        try:
            results: dict[int, Any] = self._evaluate(due) if start < 0 else self._train(due)
        # The call was shared, so every caller gets the error.
        except Exception as error:
            results = dict.fromkeys(due, error)
        self._results.update(results)
        for lane in due:
            self._conditions[lane].notify()

    def _evaluate(self, due: dict[int, Request]) -> dict[int, Any]:
        first = next(iter(due))
        # Lanes without a request repeat the first one's data; their results are unused.
        rows = [due.get(lane, due[first]).given for lane in range(self._width)]
        made = jax.device_get(self._evaluation(*_stack(rows)))
        return {lane: Evaluation(*jax.tree.map(lambda x, i=lane: x[i], tuple(made))) for lane in due}

    def _train(self, due: dict[int, Request]) -> dict[int, Any]:
        self._put({lane: request.given[0] for lane, request in due.items()})
        # Up to the earliest `stop`; the other members call again.
        stop, first = min(request.stop for request in due.values()), next(iter(due))
        sums = [due.get(lane, due[first]).given[1] for lane in range(self._width)]
        stacked = jax.tree.map(lambda *rows: np.stack(rows), *jax.device_get(sums))
        made = self._run(self._states, stacked, np.uint32(due[first].start), np.uint32(stop))
        # Return references to lanes of these states: a member's state is sliced out only when read.
        self._states = made.state
        of_all = jax.device_get((made.sums, made.ended_rows, made.health))
        results = {}
        for lane in due:
            new, ended, health = jax.tree.map(lambda x, i=lane: x[i], of_all)
            self._refs[lane] = StateRef(self, lane, health)
            results[lane] = self._refs[lane], new, stop, ended
        return results

    def _put(self, given: dict[int, PyTree]) -> None:
        """Write states into their lanes, after copying out the states in other lanes."""
        self._copies = None
        # The program updates and donates all lanes, so states of members that do not take part must be copied first.
        for lane in [lane for lane in self._refs if lane not in given]:
            ref = self._refs.pop(lane)
            ref.kept = whole(ref)
        for lane, state in given.items():
            # Usually the state is in its lane already, from the last call.
            if isinstance(state, StateRef) and self._refs.get(lane) is state:
                continue
            one = move_state(whole(state), self.device)
            # The first state fills all lanes, so that each holds a valid one.
            if self._states is None:
                self._states = _repeat(one, self._width)
            else:
                self._states = _write(self._states, one, np.int32(lane))


def _identity(state: PyTree) -> PyTree:
    return state


def _on_host(lanes: Array) -> Callable[[int], Any]:
    """Copy an array `[W, ...]` to the host; return a function from a lane to its row there."""
    # A copy also where the device shares the host's memory: the next call donates the array.
    rows = np.array(jax.random.key_data(lanes) if is_key(lanes) else lanes, copy=True)
    if not is_key(lanes):
        return lambda lane: rows[lane, ...]
    impl = key_impl(lanes)
    return lambda lane: HostKeys(rows[lane], impl)


@partial(jax.jit, static_argnums=0)
def _read(choose: Callable[[PyTree], PyTree], states: PyTree, lane: Array) -> PyTree:
    return choose(jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, lane, keepdims=False), states))


@partial(jax.jit, donate_argnums=0)
def _write(states: PyTree, one: PyTree, lane: Array) -> PyTree:
    return jax.tree.map(lambda all, x: jax.lax.dynamic_update_index_in_dim(all, x, lane, 0), states, one)


_repeat = jax.jit(tree_repeat, static_argnums=1)


@jax.jit
def _stack(rows: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *x: jnp.stack(x), *rows)


class MemberPlacement(NamedTuple):
    """Placement of a population's members on devices and in teams."""

    lanes: dict[int, TeamLane]
    """Lanes of members in teams, by number."""
    devices: dict[int, Any]
    """First device of each member, by number; `None` for JAX's default."""
    teams: list[Team]
    several: int = 1
    """Devices per member."""

    def on(self, number: int, strategy: Strategy) -> Strategy:
        """Return `strategy` placed on the devices of a member."""
        if self.several == 1:
            return strategy
        first = jax.devices().index(self.devices[number])
        placement = strategy.placement._replace(devices=self.several, first_device=first)
        return strategy._replace(placement=placement)

    def is_free(self, number: int, going: Iterable[int]) -> bool:
        """Return whether a member may train while others are `going`.

        Programs on the same devices, launched by two threads, could deadlock.
        """
        return self.several == 1 or self.devices[number] not in {self.devices[other] for other in going}

    def leave(self, number: int) -> None:
        """Have a member's team no longer wait for it."""
        if number in self.lanes:
            self.lanes[number].team.leave(self.lanes[number].index)

    def join(self, number: int) -> None:
        """Have a member's team wait for it again."""
        if number in self.lanes:
            self.lanes[number].team.join(self.lanes[number].index)

    def dissolve(self) -> None:
        """Have no team wait for any member."""
        for team in self.teams:
            team.dissolve()

    def default_device(self, number: int) -> AbstractContextManager[None]:
        """Make the first device of a member JAX's default inside."""
        return jax.default_device(self.devices[number]) if self.devices[number] else nullcontext()


def split_teams(population: Population) -> list[list[Member]]:
    """Return the members of each team: at most `width` of one strategy."""
    by_strategy: dict[int, list[Member]] = {}
    for member in population.members:
        by_strategy.setdefault(id(member.strategy.step), []).append(member)
    width = population.layout.width or len(population.members)
    return [group[i : i + width] for group in by_strategy.values() for i in range(0, len(group), width)]


def place_members(
    population: Population,
    shape: MeshShape,
    with_episodes: Callable[[Strategy], bool],
    evaluator: Callable[[Strategy], Any],
    host: Semaphore,
    workers: int,
) -> MemberPlacement:
    """Place the members of a population on devices, and with the layout `together` in teams.

    Args:
      population: the members.
      shape: number of device groups for members, and devices in each.
      with_episodes: returns whether a strategy's training also returns which episodes ended.
      evaluator: returns the evaluator of a strategy.
      host: limits the members that work on the host at the same time.
      workers: to how many.
    """
    # Teams, or members, are assigned to device groups round-robin.
    first = lambda i: i % shape.members * shape.envs
    device = lambda i: jax.devices()[first(i)] if shape.devices > 1 else None
    if population.layout.name != "together":
        devices = {m.number: device(i) for i, m in enumerate(population.members)}
        return MemberPlacement({}, devices, [], shape.envs)
    groups = split_teams(population)
    placement = MemberPlacement({}, {}, [])
    widest: dict[int, int] = {}
    for group in groups:
        step = id(group[0].strategy.step)
        widest[step] = max(widest.get(step, 0), len(group))
    # A team trains on once all of its members have called.
    runs_per_worker = max(1.0, len(population.members) / workers)
    for number, group in enumerate(groups):
        strategy = group[0].strategy
        # All teams of a strategy have the same width, so they share one program.
        width, reports = widest[id(strategy.step)], with_episodes(strategy)
        team = Team(strategy, len(group), width, device(number), reports, evaluator(strategy), host)
        placement.teams.append(team)
        placement.lanes.update(
            {member.number: TeamLane(team, lane, runs_per_worker) for lane, member in enumerate(group)}
        )
        placement.devices.update(dict.fromkeys((member.number for member in group), team.device))
    return placement


def describe(population: Population, mesh: MeshShape, workers: int, programs: int) -> str:
    """Describe the population in one line: members, settings, layout, devices and programs."""
    count = len(population.members)
    settings = len({tuple(member.swept.items()) for member in population.members})
    made = f"{settings} setting{'s' * (settings > 1)} with {count // settings} seed{'s' * (count > settings)} each"
    shared = "one program" if programs == 1 else f"{programs} programs"
    layout = population.layout.name
    at_once = len(split_teams(population)[0]) if layout == "together" else workers
    each = f", {mesh.envs} each" if mesh.envs > 1 else ""
    over = f" on {mesh.devices} devices{each}" if mesh.devices > 1 else ""
    return f"{count} members: {made}, {at_once} at a time{over} ({layout}), {shared}"
