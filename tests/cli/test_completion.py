"""What the scripts of `jaxrl completion` offer, asked of real shells."""

import shutil
import subprocess
from pathlib import Path

import pytest

from jaxrl import completion

ASK = {
    "bash": 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _jaxrl; printf "%s\\n" "${COMPREPLY[@]}"',
    "zsh": (
        # What zsh has only while somebody types.
        'compdef() { :; }; compadd() { shift; print -l -- "$@"; }; _files() { print -- FILES; }; '
        'source "$1"; shift; words=("$@"); CURRENT=$#; PREFIX="${@[-1]}"; _jaxrl'
    ),
}
CASES = {
    ("",): ({"train", "evaluate", "completion", "--version"}, {"ppo"}),
    ("train", ""): ({"ppo", "dqn", "--resume"}, {"train"}),
    ("train", "ppo", "--"): ({"--rollout", "--agent.clip-eps", "--seeds", "--no-quiet"}, {"--buffer.capacity"}),
    ("train", "dqn", "--"): ({"--buffer.capacity", "--agent.tau"}, {"--rollout"}),
    ("train", "--env", "A", "--"): ({"--agent.tau"}, {"ppo"}),
    ("train", "ppo", "--env", "Cart"): ({"CartPole-v1"}, {"--seed"}),
    ("train", "ppo", "--env", ""): ({"CartPole-v1"}, {"memory:Recall"}),
    ("train", "ppo", "--agent.core", ""): ({"none", "gru", "lstm"}, {"--seed"}),
    ("evaluate", "runs/a", "--"): ({"--episodes", "--step"}, {"--fps"}),
    ("play", "--"): ({"--fps"}, {"--episodes"}),
    ("completion", ""): ({"bash", "zsh"}, {"--env"}),
}


@pytest.fixture(scope="module", params=ASK)
def shell(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param} here")
    script = tmp_path_factory.mktemp("shell") / "jaxrl"
    script.write_text(completion.script(request.param))
    return request.param, script


@pytest.mark.parametrize("typed", CASES, ids=" ".join)
def test_what_may_follow_is_offered_and_nothing_else(shell: tuple[str, Path], typed: tuple[str, ...]) -> None:
    name, script = shell
    command = [name, *(["--norc"] if name == "bash" else ["-f"]), "-c", ASK[name], "ask", str(script), "jaxrl", *typed]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    there, absent = CASES[typed]
    offered = set(done.stdout.split())
    assert there <= offered
    assert not absent & offered
