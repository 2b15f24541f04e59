"""The devices that programs are compiled for, none of which has to be there.

XLA compiles for a TPU where `libtpu` is installed, for an NVIDIA GPU where `jax[cuda13]` is. Without the device nothing
is tuned by the clock, so the choice among kernels for a product of matrices is XLA's default.

Nothing here imports JAX, which reads the environment when it is imported.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple


class Target(NamedTuple):
    """A kind of device."""

    title: str
    forms: str
    """Which forms of `jaxrl.xla` programs for it take."""
    topology: Mapping[str, Any]
    """What JAX is told of it; empty for the machine that compiles."""
    variables: Mapping[str, str]
    """What the environment must hold before JAX starts."""
    needs: str
    """What to install."""
    devices: int = 1
    """Over which shards are spread."""


_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 151397597184
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a" device_address_bits: 64
  pcie_bandwidth: 34359738368 ecc_enabled: true name: "NVIDIA H200" dnn_version: "9.12.0"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
device_description_str: "NVIDIA H200"
"""
_CUDA = {"platform": "cuda", "topology_name": "h200", "target_config": _H200}
_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

TARGETS = {
    "h200": Target(
        "one NVIDIA H200",
        "cuda",
        {**_CUDA, "topology": "1x1x1"},
        {},
        "jax[cuda13]",
    ),
    "v5e": Target("one TPU v5e", "tpu", {"platform": "tpu", "topology_name": "v5e:2x2"}, _TPU, "libtpu"),
    "cpu": Target("this machine's CPU", "cpu", {}, {}, "jax"),
}
SEVERAL = {
    "8-h200": Target("eight NVIDIA H200", "cuda", {**_CUDA, "topology": "1x1x8"}, {}, "jax[cuda13]", 8),
    "16-v5e": Target(
        "a slice of 4 x 4 TPU v5e",
        "tpu",
        {"platform": "tpu", "topology_name": "v5e:4x4"},
        {**_TPU, "TPU_ACCELERATOR_TYPE": "v5litepod-16"},
        "libtpu",
        16,
    ),
    "8-cpu": Target("this machine's CPU as eight", "cpu", {}, {"JAX_NUM_CPU_DEVICES": "8"}, "jax", 8),
}
"""Several devices of a kind, for `benchmarks.compiled.shards`."""


def prepare(target: Target) -> None:
    """Set the environment. JAX must not have begun to look for devices."""
    os.environ.update({"JAX_PLATFORMS": "cpu", **target.variables})
