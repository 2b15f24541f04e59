"""Any checkpoint of a run can be used: its policy, a run that branches off there."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys_trainer import small_dqn

import jaxrl
from jaxrl import evaluate
from jaxrl.errors import NoCheckpointError, SettingsError

KEEP: dict[str, Any] = {"save_interval": 10, "record_interval": 10, "keep": 9, "quiet": True}
UNJUDGED: dict[str, Any] = {**KEEP, "eval_interval": 0, "eval_episodes": 0}
OBS = np.linspace(-0.5, 0.5, 12, dtype=np.float32).reshape(3, 4)


def dqn(**processors: Any) -> jaxrl.Strategy:
    parts = [jaxrl.normalise_obs(), jaxrl.n_step(2)] if processors.get("normalise") else [jaxrl.n_step(2)]
    return jaxrl.off_policy(
        jaxrl.make_env("CartPole-v1"),
        jaxrl.dqn(features=(8,)),
        buffer=jaxrl.uniform(200, batch_size=8),
        processor=jaxrl.chain(*parts),
        num_envs=4,
        opt_interval=4,
        warmup=64,
    )


def params_by_step(strategy: jaxrl.Strategy, run: Path, **settings: Any) -> dict[int, Any]:
    """Train, and return the policy's parameters at each boundary, on the host."""
    trainer = jaxrl.Trainer(strategy, max_opts=30, run_dir=str(run), **{**UNJUDGED, **settings})
    assert strategy.policy is not None
    return {report.opt_steps: jax.device_get(strategy.policy.params(trainer.state)) for report in trainer}


def assert_same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.fixture(scope="module")
def unjudged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """A run of 30 optimisation steps without evaluations, whose observations are normalised; do not write it."""
    run = tmp_path_factory.mktemp("unjudged") / "run"
    return run, params_by_step(dqn(normalise=True), run)


# --- policies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "number"), [(10, 10), ("20", 20), ("latest", 30), ("final", 30), (None, 30)])
def test_the_policy_of_any_checkpoint_is_loaded(unjudged: Any, step: Any, number: int) -> None:
    run, params = unjudged
    policy = jaxrl.load_policy(run, step=step)
    assert_same(policy.params, params[number])
    assert {name: policy.facts[name] for name in ("opt_steps", "kept_as")} == {
        "opt_steps": number,
        "kept_as": "checkpoint",
    }
    assert policy(OBS).shape == (3,)


def test_a_strategy_given_in_python_loads_the_same(unjudged: Any) -> None:
    run, params = unjudged
    assert_same(jaxrl.load_policy(run, dqn(normalise=True), step=10).params, params[10])
    with pytest.raises(SettingsError, match="the strategy is not what trained"):
        jaxrl.load_policy(run, small_dqn(), step=10)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (15, "keeps no checkpoint of step 15; kept are 10, 20, 30"),
        ("newest", "expected best, latest, final or a number"),
    ],
)
def test_a_step_that_is_none_is_refused_by_name(unjudged: Any, step: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        jaxrl.load_policy(unjudged[0], step=step)


def test_a_best_policy_that_was_named_is_not_replaced_by_another(unjudged: Any) -> None:
    with pytest.raises(NoCheckpointError, match="no best policy"):
        jaxrl.load_policy(unjudged[0], step="best")


def test_nothing_is_final_before_the_end(unjudged: Any, tmp_path: Path) -> None:
    run = shutil.copytree(unjudged[0], tmp_path / "run")
    (run / "metadata.json").write_text((run / "metadata.json").read_text().replace('"max_opts"', '"SIGINT"'))
    with pytest.raises(SettingsError, match=r"its status is SIGINT.*'latest'"):
        jaxrl.load_policy(run, step="final")
    assert jaxrl.load_policy(run, step="latest").facts["opt_steps"] == 30


def test_a_damaged_step_is_named_and_the_latest_passes_it_over(unjudged: Any, tmp_path: Path) -> None:
    run = shutil.copytree(unjudged[0], tmp_path / "run")
    (run / "checkpoints" / "30" / "manifest.json").write_text("{")
    with pytest.raises(NoCheckpointError, match=r"checkpoint 30 of .* is damaged"):
        jaxrl.load_policy(run, step=30)
    with pytest.warns(UserWarning, match="passed over"):
        assert jaxrl.load_policy(run, step="latest").facts["opt_steps"] == 20


def test_evaluate_takes_a_step_and_says_which_it_took_unasked(
    unjudged: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "cache_compilations", lambda: None)
    run = str(unjudged[0])
    assert evaluate.main([run, "--episodes", "2", "--step", "10"]) == 0
    assert capsys.readouterr().err == ""
    assert evaluate.main([run, "--episodes", "2"]) == 0
    shown = capsys.readouterr()
    assert shown.err == f"{run} has no best policy: the latest is used, of checkpoint 30\n"
    assert shown.out.startswith("return ")
