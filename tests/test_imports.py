"""`import jaxrl` stays light. What a room may import is in `pyproject.toml`, for import-linter."""

import subprocess
import sys


def test_importing_jaxrl_stays_light() -> None:
    """Nothing heavy comes with it; `rich` comes with flax, so it counts only where flax alone would not bring it."""
    heavy = "[m for m in ('gymnax', 'orbax', 'matplotlib', 'plotly', 'rich') if m in sys.modules]"
    program = f"import sys, flax.linen, optax; before = {heavy}; import jaxrl, jaxrl.envs.gymnax"
    run = subprocess.run(
        [sys.executable, "-c", f"{program}; print(set({heavy}) - set(before))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "set()"
