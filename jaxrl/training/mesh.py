"""Device meshes: groups of devices for the members of a population, and within a group the shards of a run.

`jaxrl.training.devices` places a training state on them.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jaxrl.errors import SettingsError, check_count, suggest
from jaxrl.parsing import as_int

EXAMPLE = "members=4,envs=2"
MOST = 1 << 20
"""Maximum length of an axis."""


class MeshShape(NamedTuple):
    """The axis lengths of a device mesh."""

    members: int = 1
    """Number of device groups; each trains different members."""
    envs: int = 1
    """Devices per group, over which the shards of each run are spread."""

    def __str__(self) -> str:
        return f"members={self.members},envs={self.envs}"

    @property
    def devices(self) -> int:
        """Total number of devices."""
        return self.members * self.envs


def as_text(mesh: Any) -> Any:
    """Convert a mesh given as a dict, such as `{"members": 4, "envs": 2}`, to text."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items()) if isinstance(mesh, Mapping) else mesh


def read_mesh(text: object) -> MeshShape:
    """Parse a mesh, such as `members=4,envs=2`; a missing axis has length 1.

    Raises:
      SettingsError: a syntax error, an unknown or repeated axis, or an invalid length.
    """
    sizes: dict[str, int] = {}
    for part in text.split(",") if isinstance(text, str) else [""]:
        axis, equals, size = (word.strip() for word in part.partition("="))
        if not equals or not axis:
            raise SettingsError(f"mesh is {text!r}; expected lengths of its axes, as in {EXAMPLE}")
        if axis not in MeshShape._fields:
            raise SettingsError(f"mesh has no axis {axis!r}; {suggest(axis, MeshShape._fields)}")
        if axis in sizes:
            raise SettingsError(f"mesh is {text!r}, which names {axis} twice; expected {EXAMPLE}")
        sizes[axis] = check_count(f"mesh {axis}", as_int(size), most=MOST)
    return MeshShape(**sizes)


def shape_of(mesh: str | None, devices: int, of_members: bool) -> MeshShape:
    """Return the mesh from the settings; by default all `devices` are for members, or for the shards of a single run.

    Raises:
      SettingsError: the mesh is invalid, has groups for members in a single run, or does not have `devices` devices.
    """
    if mesh is None:
        return MeshShape(members=devices) if of_members else MeshShape(envs=devices)
    shape = read_mesh(mesh)
    if shape.members > 1 and not of_members:
        raise SettingsError(
            f"mesh is {mesh}, but a single run has no members to divide devices among; set mesh to envs={shape.envs}, "
            "or train a population"
        )
    if devices > 1 and shape.devices != devices:
        near = near_shape(shape, devices, lambda fit: of_members or fit.members == 1)
        raise SettingsError(f"mesh {shape} has {shape.devices} devices, but devices is {devices}; set mesh to {near}")
    return shape


def require_all_used(shape: MeshShape, there: int, fits: Callable[[MeshShape], bool]) -> None:
    """Raise `SettingsError`, naming the nearest mesh that `fits`, unless `shape` uses all devices or a single one."""
    if shape.devices in (1, there):
        return
    few = f"devices to {shape.devices}, to leave the others alone"
    more = f"before JAX starts, on a CPU, jax_num_cpu_devices to {shape.devices}"
    raise SettingsError(
        f"mesh {shape} has {shape.devices} devices, but JAX has {there} here; set mesh to "
        f"{near_shape(shape, there, fits)}, or {few if shape.devices < there else more}"
    )


def near_shape(shape: MeshShape, devices: int, fits: Callable[[MeshShape], bool]) -> MeshShape:
    """Return the mesh nearest to `shape` that `fits`, of exactly `devices` devices or, if there is none, of fewer."""
    for count in range(devices, 0, -1):
        found = [MeshShape(n, count // n) for n in range(1, count + 1) if count % n == 0]
        far = lambda fit: (abs(fit.members - shape.members) + abs(fit.envs - shape.envs), fit)
        if fitting := [fit for fit in found if fits(fit)]:
            return min(fitting, key=far)
    return MeshShape()


def require_even(shards: int, devices: int, what: str, most: int | None = None) -> None:
    """Raise `SettingsError`, naming the nearest numbers, unless shards divide evenly among devices."""
    if shards % devices:
        fits = [n for n in range(1, (most or shards) + 1) if shards % n == 0]
        near = sorted({max(n for n in fits if n < devices), *[n for n in fits if n > devices][:1]})
        raise SettingsError(
            f"{what} is {devices}, but the {shards} shards of a run are divided evenly among devices; set shards to a "
            f"multiple of {devices}, or {what} to {' or '.join(map(str, near))}"
        )


def check_there(devices: int) -> int:
    """Return the number of available devices (1 if `devices` is); raise `SettingsError` if there are too few."""
    there = len(jax.devices()) if check_count("devices", devices) > 1 else 1
    if devices > there:
        raise SettingsError(
            f"devices is {devices}, but JAX has {there} here; set devices to {there}, or before JAX starts, on a CPU, "
            f"jax_num_cpu_devices to {devices}"
        )
    return there
