"""The files by which the page on devices starts a run on several machines, each process on this one, on real files.

Slurm and Kubernetes themselves are not here: what they give to each process is.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from test_processes import address, saved
from test_readme import block

SMALL = "--num-envs 32 --rollout 4 --epochs 1 --minibatches 1 --agent.features 4 --max-opts 64 --eval-interval 0"
PROCESSES = 2

pytestmark = pytest.mark.slow


def small(text: str) -> str:
    """Return a file whose run is over soon."""
    assert "--num-envs 1024" in text
    return text.replace("--num-envs 1024", f"{SMALL} --eval-episodes 0")


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, str]:
    """Where `python` is this one; what each process is given."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    return {**env, "JAX_PLATFORMS": "cpu", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def all_end_well(begun: Sequence["subprocess.Popen[str]"]) -> None:
    try:
        said = [process.communicate(timeout=600)[1][-2_000:] for process in begun]
    finally:
        for process in begun:
            process.kill()
    assert [process.returncode for process in begun] == [0] * len(begun), said


def resumed(run: Path) -> bool:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return any(row.get("event") == "resume" for row in rows)


def test_the_script_for_slurm_begins_a_run_and_goes_on_with_it_when_it_is_submitted_again(
    tmp_path: Path, commands: dict[str, str]
) -> None:
    """`srun` here starts the processes that the job has, with the variables by which JAX knows Slurm."""
    job, srun = tmp_path / "job.sh", tmp_path / "bin" / "srun"
    job.write_text(small(block("slurm")))
    slurm = f"SLURM_JOB_ID={os.getpid()} SLURM_STEP_NODELIST=localhost SLURM_NTASKS={PROCESSES}"
    each = f'{slurm} SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & all+=($!)'
    srun.write_text(f"#!/bin/bash\nfor i in 0 1; do {each}; done\nfor one in ${{all[@]}}; do wait $one || exit; done\n")
    srun.chmod(0o755)
    run = tmp_path / "run"
    for again in (False, True):
        script = ["bash", str(job)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        all_end_well([subprocess.Popen(script, env={**commands, "SCRATCH": str(tmp_path)}, text=True, **pipes)])
        assert saved(run)[0] == 64
        assert (run / "checkpoints" / "64" / "arrays" / "ocdbt.process_1").exists()
        assert resumed(run) is again


def test_the_pods_of_the_jobset_make_one_run_and_go_on_with_it(tmp_path: Path, commands: dict[str, str]) -> None:
    (pods,) = yaml.safe_load(block("jobset"))["spec"]["replicatedJobs"]
    assert pods["template"]["spec"]["parallelism"] == pods["template"]["spec"]["completions"] == PROCESSES
    (container,) = pods["template"]["spec"]["template"]["spec"]["containers"]
    (line,) = container["args"]
    for again in (False, True):
        here = small(line).replace("train-gpu-0-0.train:1234", address()).replace("/runs/a", str(tmp_path / "a"))
        command, pipes = [*container["command"], here], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        envs = [{**commands, "JOB_COMPLETION_INDEX": str(i)} for i in range(PROCESSES)]
        all_end_well([subprocess.Popen(command, env=env, text=True, **pipes) for env in envs])
        assert saved(tmp_path / "a")[0] == 64
        assert resumed(tmp_path / "a") is again


KILL = """
    import signal, threading
    from ray.train import get_context
    if get_context().get_world_rank() == 1 and not goes_on:
        def kill_once_saved():
            while not os.path.exists(f"{RUN}/checkpoints/4"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        import time
        threading.Thread(target=kill_once_saved, daemon=True).start()
"""
CLUSTER = """
import ray
from ray.train.v2.jax import JaxConfig
ray.init(num_cpus=3, include_dashboard=False, runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}})
"""


def test_ray_begins_a_run_again_whose_worker_was_killed(tmp_path: Path, commands: dict[str, str]) -> None:
    pytest.importorskip("ray.train.v2.jax", reason="needs ray[train] >= 2.49")
    code = block("ray-train")
    for text, here in {
        "/shared/run": str(tmp_path / "run"),
        "ppo(), num_envs=1024": "ppo(features=(4,)), num_envs=8, rollout=4, epochs=1, minibatches=1",
        "shards=16": "shards=2",
        "max_opts=10_000": "max_opts=2_000, save_interval=4, keep=600, eval_interval=0, eval_episodes=0, quiet=True",
        "num_workers=8, use_gpu=True": f"num_workers={PROCESSES}",
        "JaxTrainer(train,": "JaxTrainer(train, jax_config=JaxConfig(use_gpu=True),",  # by which Ray joins CPUs as well
        "    jaxrl.Trainer(": f"{KILL}    jaxrl.Trainer(",
    }.items():
        assert text in code
        code = code.replace(text, here)
    begun = [sys.executable, "-c", CLUSTER + code]
    all_end_well([subprocess.Popen(begun, env=commands, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)])
    assert saved(tmp_path / "run")[0] == 2_000
    assert resumed(tmp_path / "run")
