"""Networks: torsos for any observation space, heads, recurrent cores, and custom networks."""

from jaxrl.nn.custom import (
    Ensemble,
    Network,
    check_network,
    forward,
    from_nnx,
    join_variables,
    split_variables,
    training_key,
)
from jaxrl.nn.encode import encode
from jaxrl.nn.layers import ACTIVATIONS, DTYPES, MLP, NoisyDense, dense
from jaxrl.nn.networks import COSINES, ActorCritic, BatchNormNetwork, Critic, PolicyNetwork, QNetwork, ensemble
from jaxrl.nn.recurrent import CORES, Recurrent, RecurrentEnsemble, RecurrentNetwork, initial_memory, unroll
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
    "BatchNormNetwork",
    "ConvTorso",
    "Convolutions",
    "Critic",
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
    "RecurrentEnsemble",
    "RecurrentNetwork",
    "check_network",
    "check_torso",
    "dense",
    "encode",
    "ensemble",
    "forward",
    "from_nnx",
    "initial_memory",
    "join_variables",
    "make_torso",
    "split_variables",
    "torso_kind",
    "training_key",
    "unroll",
]
