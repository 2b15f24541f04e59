"""What the front doors share."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from jaxrl.errors import JaxrlError, SettingsError


def run_main(main: Callable[[Sequence[str]], int]) -> None:
    """Run a front door with the command line's arguments; end the process with its exit code.

    What a user can cause is one line on standard error, never a traceback; so is a warning.
    """
    warnings.showwarning = lambda message, *where: print(f"warning: {message}", file=sys.stderr)
    try:
        code = main(sys.argv[1:])
    except JaxrlError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


class Parser(argparse.ArgumentParser):
    """Refuse bad arguments by a `SettingsError`, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def cache_compilations() -> None:
    """Keep compiled programs on disk between processes, where JAX was not told otherwise."""
    import jax

    if not getattr(jax.config, "jax_compilation_cache_dir", None):
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "jaxrl" / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
