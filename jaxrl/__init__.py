"""jaxrl: a JAX-native reinforcement learning training loop, compiled as a whole.

Names in `__init__.pyi` are imported on first use, so `import jaxrl` takes little longer than `import jax`.
"""

from typing import Any

import lazy_loader

_import, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.47.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'jaxrl' has no attribute {name!r}{_hint(name)}")
    globals()[name] = _import(name)
    return globals()[name]


def _hint(name: str) -> str:
    """Return a suggestion for an unknown name."""
    if name == "train":
        return "; train by jaxrl.Trainer(...).train(), or by `python -m jaxrl.train` in a shell"
    import difflib

    plain = {known.lower(): known for known in reversed(__all__)}
    close = difflib.get_close_matches(name.lower(), plain, n=1, cutoff=0.75)
    return "" if name.startswith("_") or not close else f"; did you mean jaxrl.{plain[close[0]]}?"
