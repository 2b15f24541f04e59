"""Networks: torsos for any observation space, heads, recurrent cores, and networks of the user's own."""

from jaxrl.nn.encode import encode
from jaxrl.nn.layers import ACTIVATIONS, DTYPES, MLP, NoisyDense, dense
from jaxrl.nn.networks import COSINES, ActorCritic, Critic, PolicyNetwork, QNetwork, ensemble
from jaxrl.nn.own import Ensemble, Network, from_nnx, require_network
from jaxrl.nn.recurrent import CORES, EachWithMemory, Recurrent, WithMemory, no_memory, unroll
from jaxrl.nn.torsos import (
    TORSOS,
    Convolutions,
    ConvTorso,
    ImpalaCNN,
    Joined,
    JoinedTorso,
    NatureCNN,
    check_torso,
    make_torso,
    torso_kind,
)

__all__ = [
    "ACTIVATIONS",
    "CORES",
    "COSINES",
    "DTYPES",
    "MLP",
    "TORSOS",
    "ActorCritic",
    "ConvTorso",
    "Convolutions",
    "Critic",
    "EachWithMemory",
    "Ensemble",
    "ImpalaCNN",
    "Joined",
    "JoinedTorso",
    "NatureCNN",
    "Network",
    "NoisyDense",
    "PolicyNetwork",
    "QNetwork",
    "Recurrent",
    "WithMemory",
    "check_torso",
    "dense",
    "encode",
    "ensemble",
    "from_nnx",
    "make_torso",
    "no_memory",
    "require_network",
    "torso_kind",
    "unroll",
]
