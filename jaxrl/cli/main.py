"""Code shared by the commands. They import it first: it installs signal handlers and imports nothing slow."""

from jaxrl.cli.leaving import is_command  # first: it installs signal handlers

# isort: split
import argparse
import contextlib
import errno
import gc
import os
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jaxrl
from jaxrl.cli.arguments import command, normalise, refuse_repeats
from jaxrl.cli.opening import stage
from jaxrl.errors import DISK_ERRORS, JaxrlError, SettingsError, StorageError, print_stderr, safe_str
from jaxrl.hush import hushed
from jaxrl.parsing import as_int
from jaxrl.paths import local


def run_main(main: Callable[[Sequence[str]], int], args: Sequence[str] | None = None) -> None:
    """Run a command with `args` (default: those of the process), and exit with its code.

    Errors that a user can cause, and warnings, are printed as one line on standard error, without a traceback.
    """
    warnings.showwarning = lambda message, *where: print_stderr(f"warning: {safe_str(message)}")
    warnings.filterwarnings("ignore", "coroutine .* was never awaited")  # a failed save's own error says more
    with hushed():
        code = _run(main, sys.argv[1:] if args is None else args)
        if code:  # free event loops and tasks of a failed save while their messages are suppressed
            gc.collect()
    sys.exit(code)


def _run(main: Callable[[Sequence[str]], int], args: Sequence[str]) -> int:
    """Run a command; print an error on one line, and return the exit code."""
    code = 128 + signal.SIGPIPE
    try:
        code = main(args)
        print(end="", flush=True)
    except JaxrlError as error:
        stage.clear()
        print_stderr(f"error: {error}")
        return error.exit_code
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.EPIPE, *DISK_ERRORS):
            raise
        # The reader has closed standard output, perhaps before the end, or its disk is full.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code if error.errno == errno.EPIPE else StorageError.exit_code
    finally:
        stage.clear()
    return code


def hold_standard_streams() -> None:
    """Open `/dev/null` as standard input, output or error if a command was started with it closed.

    Otherwise files of the run would get these descriptors, and libraries would print into them.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # `open` takes the lowest free one: this


def require_temporary_directory() -> None:
    """Exit with a one-line error if no temporary file can be written: libraries would fail on import."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        print_stderr(
            f"error: temporary files can be written nowhere: {error.strerror}; make room there, or lift the limit on "
            "the size of files, or set TMPDIR to a directory that can be written"
        )
        sys.exit(StorageError.exit_code)


def prepare_command() -> None:
    """Prepare a process that is a command, before anything slow is imported."""
    hold_standard_streams()
    require_temporary_directory()


if is_command():
    prepare_command()


class Parser(argparse.ArgumentParser):
    """Parser that raises `SettingsError` for bad arguments, without printing the usage, and has `--version`."""

    def __init__(self, name: str, example: str, **settings: Any) -> None:
        """Create the parser of the command `name`; `example` are arguments to show in its help."""
        line = command(name)
        super().__init__(line, epilog=f"Example: {line} {example}", **settings)
        self.add_argument("--version", action="version", version=f"jaxrl {jaxrl.__version__}")
        # Numbers are written as for training: argparse takes `1e5` for no `int`, and `-1e-3` for a flag.
        self.register("type", int, parse_whole_number)
        self._negative_number_matcher = re.compile(r"-(\d[\d_]*\.?\d*|\.\d+)(e[-+]?\d+)?$", re.IGNORECASE)

    def parse(self, args: Sequence[str]) -> argparse.Namespace:
        """Parse a command line; raise `SettingsError` if an argument is invalid or a flag is repeated."""
        words = normalise(args)
        flags = self._option_string_actions
        whole = [word.partition("=")[0] for word in words if word.startswith("--")]
        meant = {flag: [known for known in flags if known.startswith(flag)] for flag in whole if flag not in flags}
        in_full = {flag: known[0] for flag, known in meant.items() if len(known) == 1}  # argparse accepts prefixes
        refuse_repeats([in_full.get(word, word) for word in words], repeatable=())
        return self.parse_args(words)

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def parse_whole_number(text: str) -> int:
    """Convert an argument that is a whole number."""
    number = as_int(text)
    if type(number) is not int:
        raise argparse.ArgumentTypeError(f"it is {text!r}; expected a whole number, as in 5000 or 5e3")
    return number


def path_arg(text: str) -> str:
    """Convert an argument that names a directory or a file, expanding `~`."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; expected a directory or a file")
    try:
        return local(text)
    except SettingsError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def cache_compilations() -> None:
    """Cache compiled programs on disk between processes, unless JAX is configured otherwise."""
    import jax

    if not getattr(jax.config, "jax_compilation_cache_dir", None) and (cache := compilation_cache()):
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def compilation_cache() -> str | None:
    """Return the directory in which commands cache compiled programs; `None` if there is none."""
    import jax

    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    configured: str | None = getattr(jax.config, "jax_compilation_cache_dir", None)
    return configured or (os.path.join(cache, "jaxrl", "compiled") if os.path.isabs(cache) else None)


def without_compilation_cache() -> None:
    """Disable the compilation cache in this process."""
    import jax

    jax.config.update("jax_enable_compilation_cache", False)


MAX_CPU_DEVICES = 1024
"""Devices that JAX makes of a CPU within a second; tens of thousands take minutes, and gigabytes."""


def divide_cpu(devices: int) -> None:
    """Make JAX treat the CPU as `devices` devices, before it is initialised; other platforms are unaffected.

    Above `MAX_CPU_DEVICES` it stays one, and missing devices are reported later.
    """
    import jax

    if 1 < devices <= MAX_CPU_DEVICES:
        with contextlib.suppress(RuntimeError):  # already initialised; missing devices are reported later
            jax.config.update("jax_num_cpu_devices", devices)


def require_devices() -> Any:
    """Return JAX's devices; raise `SettingsError` if the configured platform is not available."""
    import jax

    asked = getattr(jax.config, "jax_platforms", None)
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        # JAX fails with an assertion if a known platform has no device, and with a longer message if it does not know
        # the platform.
        reason = " ".join(str(error).split()).split(". (set ")[0].split(": ", 1)[-1]
    there = _devices_there()
    raise SettingsError(
        f"JAX_PLATFORMS={asked} asks for devices that JAX cannot use here{f' ({reason})' if reason else ''}; "
        f"there is: {there}; unset JAX_PLATFORMS, or choose one of these"
    )


def _devices_there() -> str:
    """Return the names of the platforms that JAX finds by default."""
    import jax

    asked = getattr(jax.config, "jax_platforms", None)
    try:
        jax.config.update("jax_platforms", "")
        return ", ".join(sorted({device.platform for device in jax.devices()}))
    except (RuntimeError, AssertionError):
        return "nothing"
    finally:
        jax.config.update("jax_platforms", asked)
