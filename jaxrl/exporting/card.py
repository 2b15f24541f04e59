"""Files of a folder for a model hub, without paths of this machine: a card with front matter, results and weights."""

import io
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import yaml

from jaxrl.agents.outside import needs_python
from jaxrl.envs.registry import env_names, is_path, module_to_import
from jaxrl.parsing import parse_value
from jaxrl.registry import split_suite
from jaxrl.training.data.files import MINARI
from jaxrl.training.evaluator import EvaluationReport
from jaxrl.training.policy import GreedyPolicy
from jaxrl.training.storage.files import plain
from jaxrl.trees import named_leaves

FILE_SETTINGS = "data", "demos"
"""Settings that name files."""
ENV_ARGS = "env_args", "eval_env_args"
"""Settings with parameters of environments, among which paths may be."""
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
    policy: GreedyPolicy, report: EvaluationReport, version: str, where: str | None, again: str, film: bool
) -> str:
    """Return the card of a policy, in Markdown.

    Args:
      policy: the policy.
      report: report on its evaluation.
      version: the version of jaxrl that trained it.
      where: the environment of the evaluation, if it differs from that of the training.
      again: how to repeat training and evaluation, from `repeat`.
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
        repeat=again,
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


# --- training and evaluating it again -----------------------------------------------------------------------------


class EvalOptions(NamedTuple):
    """How a policy was evaluated."""

    env: str | None
    """The environment that a person named; `None`: that of the training, with its parameters."""
    env_args: Sequence[str]
    """Names and values in turns, as typed."""
    episodes: int
    seed: int

    def command(self, run: str, which: Sequence[str], settings: Mapping[str, Any]) -> str:
        """Return the command that evaluates a policy of `run`, which `which` names, in the same way."""
        trained = settings.get("env")
        env = self.env or (trained if isinstance(trained, str) and module_to_import(trained) else None)
        flags = [*which, "--episodes", str(self.episodes), "--seed", str(self.seed)]
        algo = str(settings.get("algo"))
        flags += ["--algo", algo] if module_to_import(algo) else []
        flags += ["--env", env] if env else []
        flags += ["--env-args", *self.args()] if self.env_args else []
        return shlex.join(["python", "-m", "jaxrl.evaluate", run, *flags])

    def args(self) -> list[str]:
        """Return the parameters of the environment, with `PATH` for each path."""
        return ["PATH" if i % 2 and is_path(word) else word for i, word in enumerate(self.env_args)]

    def where(self, settings: Mapping[str, Any]) -> str | None:
        """Return the environment, if it is another than that of a training with these settings."""
        trained, known = settings.get("env"), _params(settings, "env_args")
        elsewhere = self.env not in (None, trained)
        pairs = zip(self.env_args[::2], self.env_args[1::2], self.args()[1::2], strict=True)
        other = [f"{name} {notes}" for name, word, notes in pairs if elsewhere or known.get(name) != parse_value(word)]
        return ", ".join([str(self.env or trained), *other]) if elsewhere or other else None


def portable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run without the paths in them."""
    files = {name: [file for file in _files(settings, name) if not _is_local(file)] for name in FILE_SETTINGS}
    params = {
        name: {key: value for key, value in _params(settings, name).items() if not is_path(value)} for name in ENV_ARGS
    }
    # `init_from` and `teacher` are paths in themselves.
    kept = {**files, **params, "init_from": None, "teacher": None}
    return {name: kept.get(name, value) for name, value in settings.items()}


def repeat(settings: Mapping[str, Any], opt_steps: int, best: bool, changed: bool, asked: EvalOptions) -> str:
    """Return the commands that train and evaluate a policy again, and notes on them, in Markdown.

    Args:
      settings: those of the run.
      opt_steps: after how many optimisation steps the policy was kept.
      best: whether it is the best of its run.
      changed: whether settings or versions may have changed before.
      asked: how it was evaluated.
    """
    if (why := _obstacle(settings)) is not None:
        which = [] if best else ["--step", str(opt_steps)]
        return (
            f"{why}, so no command trains it again. `config.yaml` has its settings. It was evaluated, where RUN is its "
            f"directory, by\n\n```sh\n{asked.command('RUN', which, settings)}\n```"
        )
    ends, kept = (["--max-opts", str(opt_steps)], "latest") if opt_steps else ([], "best")
    algo = str(settings.get("algo"))
    again = ["python", "-m", "jaxrl.train", algo, "--config", "config.yaml", *_missing(settings)]
    lines = [shlex.join([*again, *ends, "--run-dir", "again"]), asked.command("again", ["--step", kept], settings)]
    envs = [settings.get("env"), settings.get("eval_env"), asked.env]
    named = [("environment", env) for env in envs if isinstance(env, str)]
    notes = [*_aside(lines, [("algorithm", algo), *named]), _exactly(settings, changed)]
    return "\n".join(["```sh", *lines, "```", "", *notes])


def _obstacle(settings: Mapping[str, Any]) -> str | None:
    """Return why no command can train with these settings; `None` if one can."""
    if custom := needs_python(settings):
        return f"Parts of its training were made in Python ({', '.join(map(str, custom))})"
    for env in (settings.get("env"), settings.get("eval_env")):
        if isinstance(env, str) and not (module_to_import(env) or split_suite(env)[0] or env in env_names()):
            return f"Its environment {env} was made known in Python"
    return None


def _missing(settings: Mapping[str, Any]) -> list[str]:
    """Return flags for what `portable` leaves out, and for environments that are imported only where one names them."""
    flags = []
    for name in ("env", "eval_env"):
        env = settings.get(name)
        flags += [f"--{name}".replace("_", "-"), env] if isinstance(env, str) and module_to_import(env) else []
    for name in ENV_ARGS:
        given = _params(settings, name)
        if any(map(is_path, given.values())):
            words = [(key, "PATH" if is_path(value) else _word(value)) for key, value in given.items()]
            flags += [f"--{name}".replace("_", "-"), *(word for pair in words for word in pair)]
    for name in FILE_SETTINGS:
        named = ["FILE" if _is_local(file) else file for file in _files(settings, name)]
        flags += [f"--{name}", *named] if "FILE" in named else []
    flags += ["--teacher", "TEACHER"] if settings.get("teacher") else []
    return [*flags, "--init-from", "RUN"] if settings.get("init_from") else flags


def _aside(lines: Sequence[str], named: Sequence[tuple[str, str]]) -> list[str]:
    """Return notes on the words in capitals, and on code that is not part of jaxrl, by kind and name."""
    words = {word for line in lines for word in shlex.split(line)}
    own = sorted({(kind, module) for kind, name in named if (module := module_to_import(name))})
    notes = [f"The code of the {kind}, `{module}`, is not part of jaxrl." for kind, module in own]
    notes += ["PATH is a file of the environment's."] * ("PATH" in words)
    notes += ["FILE is what it learnt from; `config.yaml` has the SHA-256 of its arrays."] * ("FILE" in words)
    notes += ["TEACHER is its teacher's run; `config.yaml` has the SHA-256 of that policy."] * ("TEACHER" in words)
    return notes + ["RUN is the run whose networks it began with."] * ("RUN" in words)


def _exactly(settings: Mapping[str, Any], changed: bool) -> str:
    """Return a note on whether that makes the same bits."""
    why = ["its settings or versions may have changed on the way"] if changed else []
    why += ["it began with the networks of another run"] if settings.get("init_from") else []
    if why:
        return f"This trains such a policy again, but not to the same bits: {', and '.join(why)}."
    remote = settings.get("actors") is not None
    also = "and environments that do the same again, " if remote else ""
    return f"On the same kind of machine, with the versions in `results.json`, {also}this makes the same bits."


def _files(settings: Mapping[str, Any], name: str) -> list[str]:
    found = settings.get(name)
    return [file for file in found if isinstance(file, str)] if isinstance(found, list) else []


def _params(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, Mapping) else {}


def _is_local(file: str) -> bool:
    return not file.startswith(MINARI)


def _word(value: Any) -> str:
    """Return a parameter as one types it."""
    if isinstance(value, list):
        return f"[{','.join(map(_word, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
