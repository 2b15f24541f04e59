"""Runs that begin with the networks of another: what is taken, what is not, and what is refused."""

import io
import shutil
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from toys_actors import counter, replaying, rollouts
from toys_agents import equal
from toys_envs import counting
from toys_trainer import normalising_dqn, small_dqn

import jaxrl
from jaxrl.errors import DivergedError, JaxrlError, SettingsError
from jaxrl.strategies.population import with_values

LAYER_0 = "params/params/MLP_0/Dense_0"
"""The first layer of what most of these runs train."""
LAYER = {"kernel": np.arange(64, dtype=np.float32).reshape(4, 16), "bias": np.arange(16, dtype=np.float32)}
"""Arrays for it."""
SETTINGS: dict[str, Any] = {"max_opts": 20, "eval_interval": 0, "eval_episodes": 0, "save_interval": 10, "quiet": True}


@cache
def dueling() -> jaxrl.Strategy:
    """Return DQN whose head is another one."""
    agent = jaxrl.dqn(features=(16,), dueling=True)
    sizes = {"num_envs": 4, "opt_interval": 4, "warmup": 64}
    return jaxrl.off_policy(jaxrl.make_env("CartPole-v1"), agent, buffer=jaxrl.uniform(400, batch_size=16), **sizes)


@cache
def adapting(desired_kl: float = 1e-6) -> jaxrl.Strategy:
    agent = jaxrl.ppo(features=(16,), desired_kl=desired_kl)
    return jaxrl.on_policy(jaxrl.make_env("CartPole-v1"), agent, num_envs=2, rollout=4)


def begun(made: jaxrl.Strategy, **settings: Any) -> Any:
    """Return the state that a run begins with."""
    found: list[Any] = []

    def look(trainer: jaxrl.Trainer) -> None:
        found.append(jax.tree.map(np.array, trainer.state._replace(key=())))
        trainer.interrupt.stop()

    jaxrl.Trainer(made, hooks=jaxrl.Hooks(start=look), **{**SETTINGS, **settings}).train()
    return found[0]


def said(run: Path) -> str:
    """Return what the log says of what the run begins with."""
    (line,) = [line for line in (run / "metrics.jsonl").read_text().splitlines() if "begins with" in line]
    return line


def saved(run: Path, made: jaxrl.Strategy) -> Any:
    """Train in `run`; return the state at the end."""
    return jaxrl.Trainer(made, run_dir=str(run), **SETTINGS).train().state


@pytest.fixture(scope="module")
def old_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a run, and its state at the end."""
    run = tmp_path_factory.mktemp("runs") / "old"
    return run, saved(run, small_dqn())


def test_networks_are_taken_and_nothing_else(old_run: tuple[Path, Any]) -> None:
    fast = with_values(small_dqn(), {"agent.lr": 0.5})
    (run, old), plain = old_run, begun(fast)
    new = begun(fast, init_from=str(run))
    assert equal((new.agent.params, new.agent.target), (old.agent.params, old.agent.target))
    assert not equal(new.agent.params, plain.agent.params)
    rest = lambda state: state._replace(agent=state.agent._replace(params=(), target=()))
    assert equal(rest(new), rest(plain))
    assert float(new.agent.hyper.lr) == 0.5
    earlier = begun(small_dqn(), init_from=str(run / "checkpoints" / "10"))
    assert not equal(earlier.agent.params, new.agent.params)


def test_statistics_of_observations_go_with_the_networks(tmp_path: Path) -> None:
    old = saved(tmp_path / "old", normalising_dqn())
    new = begun(normalising_dqn(), init_from=str(tmp_path / "old"))
    moments = lambda state: jax.tree.leaves(state.processor[0].moments)
    assert equal(moments(new), moments(old))


@pytest.mark.every_day("rollouts")
@pytest.mark.parametrize("make", [replaying, rollouts])
def test_actors_go_on_from_the_statistics_of_the_other_run(make: Any, tmp_path: Path) -> None:
    strategy = make(counter(), processor=jaxrl.chain(jaxrl.normalise_obs(), jaxrl.one_step()))
    state = lambda **settings: jaxrl.Trainer(strategy, **{**SETTINGS, "max_opts": 8, **settings}).train().state
    count = lambda **settings: float(strategy.policy.params(state(**settings)).processor[0][0].count)
    old = count(run_dir=str(tmp_path / "old"))
    assert count(init_from=str(tmp_path / "old")) == 2 * old > 0


@pytest.mark.slow
def test_statistics_go_from_one_shard_to_several_and_back(tmp_path: Path) -> None:
    old = saved(tmp_path / "old", normalising_dqn())
    moments = lambda state: jax.tree.leaves(state.processor[0].moments)
    sharded = normalising_dqn(shards=2)
    two = moments(begun(sharded, init_from=str(tmp_path / "old")))
    assert all(equal(moment[i], x) for moment, x in zip(two, moments(old), strict=True) for i in range(2))
    wanted = moments(saved(tmp_path / "two", sharded))
    one = moments(begun(normalising_dqn(), init_from=str(tmp_path / "two")))
    assert equal(one, [x[0] for x in wanted])


@pytest.mark.every_day("1")
@pytest.mark.parametrize("shards", [1, 2])
def test_the_warm_up_is_acted_by_the_networks_that_the_run_begins_with(shards: int) -> None:
    ring = jaxrl.uniform(400, batch_size=128)
    agent = jaxrl.dqn(features=(16,), epsilon_start=0.0, epsilon_end=0.0)
    sizes = {"num_envs": 4, "opt_interval": 4, "warmup": 200, "random_warmup": False, "shards": shards}
    made = jaxrl.off_policy(jaxrl.make_env("CartPole-v1"), agent, buffer=ring, **sizes)
    always_right = {"bias": np.array([0, 1e3], np.float32)}
    state = begun(made, init_from=always_right, init_parts=["params/params/Dense_0/bias=bias"])
    first = jax.tree.map(lambda x: jnp.asarray(x[0] if shards > 1 else x), state.buffer)
    batch = ring.shard(shards).sample(first, jax.random.key(0), jnp.uint32(50), jnp.uint32(0))
    assert (np.asarray(batch.items.action) == 1).all()


@pytest.mark.slow
def test_what_was_learnt_from_data_goes_on_online(tmp_path: Path) -> None:
    env = jaxrl.make_env("CartPole-v1")
    online = small_dqn()
    data = jaxrl.gather(env, online.policy, online.policy.params(online.init(jax.random.key(0))), jax.random.key(1), 60)
    offline = jaxrl.offline(data, jaxrl.cql_dqn(features=(16,)), batch_size=8, env=env)
    old = jaxrl.Trainer(offline, run_dir=str(tmp_path / "old"), **SETTINGS).train().state
    assert equal(begun(online, init_from=str(tmp_path / "old")).agent.params, old.agent.params)


def test_a_run_that_goes_on_needs_the_other_no_more(old_run: tuple[Path, Any], tmp_path: Path) -> None:
    shutil.copytree(old_run[0], tmp_path / "old")
    settings = {**SETTINGS, "init_from": str(tmp_path / "old")}
    whole = jaxrl.Trainer(small_dqn(), **settings).train().state
    jaxrl.Trainer(small_dqn(), run_dir=str(tmp_path / "new"), **{**settings, "max_opts": 10}).train()
    shutil.rmtree(tmp_path / "old")
    resumed = jaxrl.Trainer(small_dqn(), resume=str(tmp_path / "new"), **settings).train().state
    assert equal(resumed._replace(key=()), whole._replace(key=()))
    events = (tmp_path / "new" / "metrics.jsonl").read_text()
    assert events.count(f"begins with the networks of {tmp_path / 'old'} after 20 optimisation steps") == 1


@pytest.mark.parametrize(
    ("made", "place", "parts", "told"),
    [
        (small_dqn, "nowhere", [], "nowhere is no run directory"),
        (small_dqn, "old/checkpoints/15", [], "keeps no checkpoint of step 15; kept are 10, 20"),
        (dueling, "old", [], r"init_from: this run has params/params/Dense_1/bias, but .*old has not; begin"),
        (normalising_dqn, "old", [], r"init_from: this run has processor.*moments.*, but .*old has not"),
        (adapting, "old", [], "init_from: .*; begin with a run of the same agent"),
        (small_dqn, "old", ["parms"], "init_parts: parms is no part of what this agent learns; did you mean params"),
        (small_dqn, "old", ["opt_state"], "init_parts: opt_state is no part of what this agent learns"),
        (small_dqn, "old", ["params="], "init_parts has 'params='; expected a path"),
        (small_dqn, "old", ["params/*=target/*"], r"init_parts has 'params/\*=target/\*'; expected a path"),
        (small_dqn, "old", [f"{LAYER_0}=params/params/MLP_1"], "old has no params/params/MLP_1/bias; did you mean"),
        (
            *(small_dqn, "old", [f"params/params/Dense_0={LAYER_0}"]),
            r"MLP_0/Dense_0/bias of .*old is float32\[16\], expected float32\[2\] for params/params/Dense_0/bias",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_no_directory(
    old_run: tuple[Path, Any], tmp_path: Path, made: Any, place: str, parts: list[str], told: str
) -> None:
    settings = {**SETTINGS, "init_from": str(old_run[0].parent / place), "init_parts": parts}
    with pytest.raises(JaxrlError, match=told):
        jaxrl.Trainer(made(), **settings, run_dir=str(tmp_path / "new")).train()
    assert not (tmp_path / "new").exists()


# --- parts of networks ------------------------------------------------------------------------------------------


def kernels(state: Any, field: str = "params") -> list[Any]:
    """Return the matrices of a network, that of its torso first."""
    leaves = jax.tree_util.tree_leaves_with_path(getattr(state.agent, field))
    return [leaf for path, leaf in reversed(leaves) if "kernel" in jax.tree_util.keystr(path)]


def test_parts_are_taken_where_the_rest_is_of_another_shape(old_run: tuple[Path, Any], tmp_path: Path) -> None:
    """The first layer, of the network and of its target; the head is a dueling one, which the other run has not."""
    (run, old), plain = old_run, begun(dueling(), seed=1)
    given = begun(dueling(), seed=1, init_from=str(run), init_parts=["*/params/MLP_0"], run_dir=str(tmp_path / "new"))
    for field in ("params", "target"):
        (first, *heads), (drawn, *others) = kernels(given, field), kernels(plain, field)
        assert equal(first, kernels(old, field)[0])
        assert not equal(first, drawn)
        assert equal(heads, others)
    line = said(tmp_path / "new")
    assert f"begins with {LAYER_0}, target/params/MLP_0/Dense_0 of" in line
    assert "drawn anew: params/params/Dense_0, params/params/Dense_1, target" in line


def test_another_agent_gives_what_it_calls_otherwise(old_run: tuple[Path, Any]) -> None:
    """PPO begins with a network of action values, whose torso and head have other names; it has more than these."""
    (run, state) = old_run
    parts = ["params/params/actor_torso=params/params/MLP_0", "params/params/policy=params/params/Dense_0"]
    new = begun(adapting(), init_from=str(run), init_parts=parts).agent.params["params"]
    old = state.agent.params["params"]
    assert equal((new["actor_torso"], new["policy"]), (old["MLP_0"], old["Dense_0"]))


def test_a_learning_rate_that_was_adapted_stays_with_its_run(tmp_path: Path) -> None:
    made = adapting()
    old = jaxrl.Trainer(made, run_dir=str(tmp_path / "old"), **SETTINGS).train().state.agent
    assert float(old.lr_scale) < 1
    new = begun(made, init_from=str(tmp_path / "old")).agent
    assert equal(new.params, old.params)
    assert float(new.lr_scale) == 1


@pytest.mark.slow
def test_networks_of_a_rate_that_was_adapted_go_to_a_run_whose_rate_is_not(tmp_path: Path) -> None:
    old = jaxrl.Trainer(adapting(), run_dir=str(tmp_path / "old"), **SETTINGS).train().state.agent
    assert equal(begun(adapting(0.0), init_from=str(tmp_path / "old")).agent.params, old.params)


@pytest.mark.parametrize("name", ["weights.npz", "weights.safetensors"])
def test_arrays_of_a_file_are_taken_by_their_paths(tmp_path: Path, name: str) -> None:
    given = LAYER["kernel"]
    arrays = {f"{LAYER_0}/kernel": given, "encoder/kernel": given + 1, "encoder/bias": given[0]}
    if name.endswith(".npz"):
        np.savez(tmp_path / name, **arrays)
    else:
        pytest.importorskip("safetensors.numpy").save_file(
            {path.replace("/", "."): array for path, array in arrays.items()}, tmp_path / name
        )
    parts = [f"{LAYER_0}/kernel", "target.params.MLP_0.Dense_0=encoder"]
    new = begun(small_dqn(), init_from=str(tmp_path / name), init_parts=parts)
    assert equal((kernels(new)[0], kernels(new, "target")[0]), (given, given + 1))
    assert equal(new.agent.target["params"]["MLP_0"]["Dense_0"]["bias"], given[0])


def shorter_than_it_says() -> bytes:
    """Return an archive of an array whose header tells of more than there is."""
    header = {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)}
    with zipfile.ZipFile(found := io.BytesIO(), "w") as archive, archive.open(f"{LAYER_0}/bias.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, header)
    return found.getvalue()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "there is no file"),
        (b"no archive", "cannot be read"),
        (shorter_than_it_says(), r"bias.npy is said to have shape \[1099511627776\], but is shorter"),
        (np.zeros(8), r"is float64\[8\], expected float32\[16\]"),
        (np.zeros((1 << 40, 0)), r"is float64\[1099511627776, 0\], expected"),
        (np.array([object()]), "cannot be read: ValueError: Object arrays"),
    ],
    ids=["missing", "damaged", "shorter", "another dtype", "huge", "pickled"],
)
def test_files_that_cannot_be_are_refused(tmp_path: Path, content: Any, told: str) -> None:
    path = tmp_path / "weights.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.savez(path, **{f"{LAYER_0}/bias": content})
    with pytest.raises(SettingsError, match=told):
        begun(small_dqn(), init_from=str(path))


# --- trees of arrays: on disk by Orbax, and in memory ---------------------------------------------------------------


def write_tree(path: Path, tree: Any) -> Path:
    """Write a tree as users of Orbax do."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


@pytest.mark.parametrize("how", ["on disk", "in memory"])
def test_parts_of_a_flax_tree_of_somebody_else_are_taken(tmp_path: Path, how: str) -> None:
    """The tree has other things beside: numbers, lists, text."""
    encoder = {"params": {"Encoder_0": jax.tree.map(jax.numpy.asarray, LAYER)}}
    tree = {**encoder, "step": 7, "history": [np.float32(1), jax.numpy.zeros(3)]}
    place: Any = str(write_tree(tmp_path / "tree", tree)) if how == "on disk" else {**tree, "by": "somebody"}
    run = tmp_path / "new"
    new = begun(small_dqn(), init_from=place, init_parts=[f"{LAYER_0}=params/Encoder_0"], run_dir=str(run))
    assert equal(new.agent.params["params"]["MLP_0"]["Dense_0"], LAYER)
    plain = begun(small_dqn())
    assert equal(kernels(new)[1:], kernels(plain)[1:])
    assert equal(new.agent.target, plain.agent.target)
    name = "arrays given in Python" if how == "in memory" else str(tmp_path / "tree")
    assert f"begins with {LAYER_0} of {name}; drawn anew: " in said(run)
    assert f"init_from: {name}" in (run / "config.yaml").read_text()


@pytest.mark.parametrize("how", ["in a file", "on disk", "in memory"])
def test_arrays_without_named_parts_are_all_taken_and_no_others_may_be_there(tmp_path: Path, how: str) -> None:
    def give(name: str, tree: Any) -> Any:
        if how == "on disk":
            return str(write_tree(tmp_path / name, tree))
        if how == "in a file":
            leaves = jax.tree_util.tree_leaves_with_path(tree)
            named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
            np.savez(tmp_path / f"{name}.npz", **named)
            return str(tmp_path / f"{name}.npz")
        return tree

    old = begun(small_dqn())
    whole = jax.tree.map(lambda x: x + 1, old.agent.params)
    new = begun(small_dqn(), init_from=give("whole", {"params": whole}))
    assert equal(new.agent.params, whole)
    assert equal(new.agent.target, old.agent.target)
    with pytest.raises(SettingsError, match="has step, and the agent no such array"):
        begun(small_dqn(), init_from=give("more", {"params": whole, "step": np.int32(3)}))
    other = {"params": {"params": {"MLP_0": {"Dense_0": {"bias": np.zeros(9, np.float32)}}}}}
    with pytest.raises(SettingsError, match=r"MLP_0/Dense_0/bias of .* is float32\[9\], expected float32\[16\]"):
        begun(small_dqn(), init_from=give("other", other))


def test_arrays_of_the_caller_are_copied_and_given_again_where_nothing_was_saved(tmp_path: Path) -> None:
    layer = jax.tree.map(np.copy, LAYER)
    settings = {"init_parts": [f"{LAYER_0}=layer"], "run_dir": str(tmp_path / "new")}
    trainer = jaxrl.Trainer(small_dqn(), init_from={"layer": layer}, **{**SETTINGS, **settings})
    trainer.train()
    assert equal(layer, LAYER)
    # A resume goes on from the checkpoint, whatever it is given.
    jaxrl.Trainer(small_dqn(), resume=True, **{**SETTINGS, "run_dir": str(tmp_path / "new"), "max_opts": 30}).train()
    with pytest.raises(SettingsError, match="began with arrays given in Python; give them again"):
        begun(small_dqn(), init_from="arrays given in Python")


def test_a_second_call_that_goes_back_to_the_beginning_takes_them_again() -> None:
    make = jaxrl.dqn(lr=1e-9, features=(4,))

    def diverging(spec: Any) -> Any:
        """What was begun with diverges, and random networks would not."""
        agent = make(spec)

        def update(state: Any, batch: Any, key: Any, opt_step: Any) -> Any:
            spoilt = (opt_step >= 12) & (state.params["params"]["Dense_0"]["bias"][0] > 5)
            state, metrics, priority = agent.update(state, batch, key, opt_step)
            return state, {**metrics, "loss": jnp.where(spoilt, jnp.nan, metrics["loss"])}, priority

        return agent._replace(update=update)

    strategy = jaxrl.off_policy(counting(), diverging, buffer=jaxrl.uniform(40, 8), num_envs=2, opt_interval=2)
    sevens = {"params": {"params": {"Dense_0": {"bias": np.full(2, 7.0, np.float32)}}}}
    settings = {"eval_interval": 0, "eval_episodes": 0, "quiet": True, "max_skips": 2, "max_rollbacks": 1}
    trainer = jaxrl.Trainer(strategy, max_opts=8, init_from=sevens, **settings)
    trainer.train()
    with pytest.raises(DivergedError):
        trainer.train(max_opts=30)


def test_members_begin_with_the_arrays_that_are_given(tmp_path: Path) -> None:
    population = jaxrl.population(small_dqn(), seeds=2)
    settings = {**SETTINGS, "init_from": {"layer": LAYER}, "init_parts": [f"{LAYER_0}=layer"]}
    found: list[Any] = []
    copy = lambda trainer: found.append(np.array(kernels(trainer.state)[0]))
    jaxrl.Trainer(population, hooks=jaxrl.Hooks(start=copy), **settings).train()
    assert equal(found, [LAYER["kernel"]] * 2)


def test_a_directory_that_is_nothing_to_begin_with_is_refused_in_one_line(tmp_path: Path) -> None:
    refuse = lambda place, told: pytest.raises(SettingsError, match=f"^init_from: {place} {told}")
    (tmp_path / "empty").mkdir()
    with refuse(tmp_path / "empty", "is neither a run, which has a config.yaml, nor a tree of .*_METADATA$"):
        begun(small_dqn(), init_from=str(tmp_path / "empty"))
    manager = ocp.CheckpointManager(tmp_path / "checkpoints")
    manager.save(100, args=ocp.args.StandardSave({"layer": LAYER}))
    manager.wait_until_finished()
    manager.close()
    step = tmp_path / "checkpoints" / "100"
    for place in (step, step.parent):
        with refuse(place, f"is neither a run.*; there is one of these in it, {step / 'default'}$"):
            begun(small_dqn(), init_from=str(place))
    parts = [f"{LAYER_0}=layer"]
    assert equal(kernels(begun(small_dqn(), init_from=str(step / "default"), init_parts=parts))[0], LAYER["kernel"])


@pytest.mark.parametrize("damaged", ["_METADATA", "manifest.ocdbt", "the end"])
def test_a_tree_that_is_damaged_or_unfinished_is_refused_in_one_line(tmp_path: Path, damaged: str) -> None:
    tree, said = write_tree(tmp_path / "tree", {"layer": LAYER}), "cannot be read: "
    if damaged == "the end":
        tree, said = tree.rename(tmp_path / "tree.orbax-checkpoint-tmp"), "was never finished by Orbax"
    else:
        (tree / damaged).write_bytes(b"no")
    with pytest.raises(SettingsError, match=f"^init_from: {tree} {said}") as caught:
        begun(small_dqn(), init_from=str(tree), init_parts=[f"{LAYER_0}=layer"])
    assert "\n" not in str(caught.value)


def test_a_tree_with_text_beside_its_arrays_may_have_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "trees" / "layer", {"layer": LAYER, "by": "somebody"})
    monkeypatch.chdir(tmp_path)
    new = begun(small_dqn(), init_from="trees/layer", init_parts=[f"{LAYER_0}=layer"])
    assert equal(kernels(new)[0], LAYER["kernel"])


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({}, "^init_from: arrays given in Python has no arrays"),
        ({"params": {}}, "^init_from: arrays given in Python has no arrays"),
        ({1: np.zeros(3), "b": np.zeros(3)}, "^init_from: arrays given in Python cannot be read: ValueError"),
        (
            {"params": {"params": {"MLP_0": {"Dense_0": {"bias": jax.random.key(0)}}}}},
            "^init_from: arrays given in Python cannot be read: TypeError",
        ),
        ([np.zeros(3)], "^init_from is a list; expected a path, or a nested dict of arrays"),
        ({"a": {"b": np.zeros(3)}, "a/b": np.zeros(3)}, "given in Python: two have the same path, as 'a/b'"),
        (np.zeros(3), "^init_from is a ndarray; expected a path, or a nested dict of arrays"),
    ],
    ids=["empty", "hollow", "keys", "typed", "list", "twice", "array"],
)
def test_what_is_no_tree_of_arrays_is_refused_in_one_line(tree: Any, told: str) -> None:
    with pytest.raises(SettingsError, match=told) as caught:
        begun(small_dqn(), init_from=tree)
    assert "\n" not in str(caught.value)


def test_parts_need_what_they_are_parts_of() -> None:
    with pytest.raises(SettingsError, match="set init_from"):
        jaxrl.Trainer(small_dqn(), init_parts=["params"], **SETTINGS)
