"""Files of a folder for a model hub: a card with front matter, results and weights."""

import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import yaml

from jaxrl.training.evaluator import EvaluationReport
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.storage.run_dir import plain
from jaxrl.trees import named_leaves

CARD = """---
{front}---

# {algo} on {env}

A policy trained with jaxrl {version}: **{mean:.6g} ± {std:.6g}** over {episodes} fresh greedy episodes{where}, after
{opt_steps:,} optimisation steps{env_steps}.
{picture}
| returns | {heads} |
|---|{rules}|
| of {episodes} episodes | {values} |

## Use

Without jaxrl, see `policy/README.md`; with it, from the run itself: `jaxrl.load_policy(RUN)`. `weights.npz` has the
parameters by name.

## Repeat

{repeat}
"""


def card(
    policy: GreedyPolicy, report: EvaluationReport, version: str, where: str | None, repeat: str, film: bool
) -> str:
    """Return the card of a policy, in Markdown.

    Args:
      policy: the policy.
      report: report on its evaluation.
      version: the version of jaxrl that trained it.
      where: the environment of the evaluation, if it differs from that of the training.
      repeat: instructions for repeating training and evaluation.
      film: whether the folder has a film of an episode.
    """
    facts = policy.facts
    settings = facts.get("settings", {})
    algo, env, results = settings.get("algo", "custom"), training_env(policy), report.returns
    metric = {"type": "mean_reward", "name": "mean_reward", "value": f"{results['mean']:.6g} +/- {results['std']:.6g}"}
    result = {
        "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
        "dataset": {"name": where or env, "type": where or env},
        "metrics": [{**metric, "verified": False}],
    }
    front = {
        "library_name": "jaxrl",
        "tags": [env, algo, "reinforcement-learning", "deep-reinforcement-learning", "jax"],
        "model-index": [{"name": f"{algo}-{env}", "results": [result]}],
    }
    steps = facts.get("env_steps")
    return CARD.format(
        front=yaml.safe_dump(front, sort_keys=False),
        algo=algo,
        env=env,
        version=version,
        mean=results["mean"],
        std=results["std"],
        episodes=report.episodes,
        where=f" in {where}" if where else "",
        opt_steps=facts.get("opt_steps") or 0,
        env_steps=f" and {steps:,} environment steps" if steps else "",
        picture="\n![an episode](episode.gif)\n" if film else "",
        heads=" | ".join(results),
        rules="|".join("---" for _ in results),
        values=" | ".join(f"{value:.6g}" for value in results.values()),
        repeat=repeat,
    )


def training_env(policy: GreedyPolicy) -> str:
    """Return the name of the training environment."""
    return str(policy.facts.get("settings", {}).get("env") or policy.policy.spec.name)


def weights(policy: GreedyPolicy) -> bytes:
    """Return the parameters as an `.npz`, each array under its path."""
    held = io.BytesIO()
    named = {path: _plain(leaf) for path, leaf in named_leaves(policy.params).items()}
    np.savez(held, **named)  # type: ignore[arg-type]
    return held.getvalue()


def _plain(leaf: Any) -> np.ndarray:
    """Return an array in one of NumPy's dtypes: bfloat16 becomes float32."""
    array = np.asarray(leaf)
    return array if array.dtype.isbuiltin == 1 else array.astype(np.float32)


def results(
    policy: GreedyPolicy, report: EvaluationReport, versions: Mapping[str, str], env: str, seed: int, digest: str
) -> str:
    """Return the results as JSON, with the environment, the seed, the versions and the digest of the parameters."""
    results = {
        "evaluation": {"env": env, "seed": seed, **plain(asdict(report))},
        "score": policy.facts.get("score"),
        "opt_steps": policy.facts.get("opt_steps"),
        "env_steps": policy.facts.get("env_steps"),
        "digest": digest,
        "versions": dict(versions),
    }
    return json.dumps(results, indent=2) + "\n"
