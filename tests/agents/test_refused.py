"""Settings, networks and spaces that an agent cannot have are refused at once, in one line that says what to do."""

from functools import partial
from typing import Any

import numpy as np
import optax
import pytest
from toys_composite import SPACE

import jaxrl
from jaxrl.errors import SettingsError
from jaxrl.spaces import Box, Discrete, EnvSpec, MultiDiscrete

SEEN = Box(-1.0, 1.0, (3,))


def acting_in(actions: Any) -> EnvSpec:
    return EnvSpec("Toy", SEEN, actions)


def seeing(obs: Any, actions: Any) -> EnvSpec:
    return EnvSpec("Toy", obs, actions)


def squared(q: Any, target: Any) -> Any:
    return (target[None] - q) ** 2


NUMBERS, BOX = acting_in(Discrete(4)), acting_in(Box(-1.0, 1.0, (2,)))
BUILT_AT_ONCE = None
"""In place of a spec: the call itself refuses, before there is an environment."""
PARTS = {"a": Discrete(2)}
OPEN, HALF_OPEN = Box(-np.inf, np.inf, (2,)), Box((-1.0, -1.0), (1.0, np.inf), (2,))
WHOLE = Box(0, 9, (2,), "int32")
THREE, FIVE = Box(0, 1, (3,), bool), Box(0, 1, (5,), bool)
"""Masks."""
own_critic = {"make_critic": lambda spec: None}
own_target = {"target": lambda items, values: items.reward}
small_image = Box(0, 255, (8, 8, 1), "uint8")

Row = tuple[Any, dict[str, Any], EnvSpec | None, str]
REFUSED: dict[str, list[Row]] = {
    "numbers": [
        (jaxrl.dqn, {"lr": float("nan")}, BUILT_AT_ONCE, r"agent\.lr is nan"),
        (jaxrl.dqn, {"lr": "fast"}, BUILT_AT_ONCE, r"agent\.lr is 'fast'"),
        (jaxrl.dqn, {"lr": optax.cosine_decay_schedule(1e-3, 9)}, BUILT_AT_ONCE,
         r"agent\.lr is a function; .* schedule .* make_optimizer"),
        (jaxrl.dqn, {"tau": 1.5}, BUILT_AT_ONCE, r"agent\.tau is 1\.5; expected a number from 0 to 1"),
        (jaxrl.dqn, {"epsilon_end": 2.0}, BUILT_AT_ONCE, r"agent\.epsilon_end is 2\.0"),
        (jaxrl.dqn, {"max_grad_norm": float("inf")}, BUILT_AT_ONCE, r"agent\.max_grad_norm is inf"),
        (jaxrl.dqn, {"target_interval": 0}, BUILT_AT_ONCE, r"target_interval is 0; expected a whole number of"),
        (jaxrl.dqn, {"accumulate": 1.5}, BUILT_AT_ONCE, r"agent\.accumulate is 1\.5"),
        (jaxrl.dqn, {"lr_decay": -1}, BUILT_AT_ONCE, r"agent\.lr_decay is -1"),
        (jaxrl.dqn, {"epsilon_decay": True}, BUILT_AT_ONCE, r"agent\.epsilon_decay is True"),
        (jaxrl.dqn, {"features": 64}, BUILT_AT_ONCE, r"agent\.features is 64"),
        (jaxrl.sac, {"temperature": 0.0}, BUILT_AT_ONCE, r"agent\.temperature is 0\.0"),
        (jaxrl.sac, {"policy_lr": -1.0}, BUILT_AT_ONCE, r"agent\.policy_lr is -1\.0"),
        (jaxrl.sac, {"num_critics": 0}, BUILT_AT_ONCE, r"num_critics is 0; expected a whole number of at least 1"),
        (jaxrl.td3, {"noise": -0.1}, BUILT_AT_ONCE, r"agent\.noise is -0\.1"),
        (jaxrl.td3, {"policy_interval": 0}, BUILT_AT_ONCE, r"agent\.policy_interval is 0"),
        (jaxrl.td3, {"target_noise_clip": -1.0}, BUILT_AT_ONCE, r"agent\.target_noise_clip is -1\.0"),
        (jaxrl.iql, {"expectile": 1.0}, BUILT_AT_ONCE, r"agent\.expectile is 1\.0"),
        (jaxrl.awac, {"beta": -1.0}, BUILT_AT_ONCE, r"agent\.beta is -1\.0"),
        (jaxrl.cql, {"cql": -1.0}, BUILT_AT_ONCE, r"agent\.cql is -1\.0"),
        (jaxrl.cql, {"cql_actions": 0}, BUILT_AT_ONCE, r"agent\.cql_actions is 0"),
        (jaxrl.td3_bc, {"bc_alpha": np.inf}, BUILT_AT_ONCE, r"agent\.bc_alpha is inf"),
        (jaxrl.reppo, {"kl_bound": 0.0}, BUILT_AT_ONCE, r"agent\.kl_bound is 0\.0"),
        (jaxrl.sac, {"critic_subset": -1}, BOX, r"critic_subset is -1"),
        (jaxrl.sac, {"dropout": 1.0}, BOX, r"agent\.dropout is 1\.0"),
        (jaxrl.sac, {"dropout": -0.1}, BOX, r"agent\.dropout is -0\.1"),
    ],
    "words": [
        (jaxrl.dqn, {"loss": "hubr"}, BUILT_AT_ONCE, r"unknown agent\.loss 'hubr'; did you mean huber"),
        (jaxrl.dqn, {"activation": "rel"}, BUILT_AT_ONCE, r"unknown agent\.activation 'rel'; did you mean relu"),
        (jaxrl.td3, {"core": "lrru"}, BOX, "unknown agent.core 'lrru'; did you mean lru"),
        (jaxrl.td3, {"critic_target": "max"}, BOX, r"unknown agent\.critic_target 'max'"),
        (jaxrl.bc, {"tau": 0.5}, BUILT_AT_ONCE, "bc has no setting 'tau'"),
        (jaxrl.reppo, {"core": "gru"}, BUILT_AT_ONCE, "reppo has no setting 'core'"),
    ],
    "actions": [
        (jaxrl.sac, {}, acting_in(OPEN), "sac needs actions with a bound on both sides, but Toy has Box"),
        (jaxrl.sac, {}, acting_in(HALF_OPEN), "sac needs actions with a bound on both sides"),
        (jaxrl.sac, {}, acting_in((Discrete(2), Discrete(2))), "but Toy has tuple actions"),
        (jaxrl.reppo, {}, acting_in(MultiDiscrete((2, 3))), "reppo takes continuous or discrete .*has MultiDiscrete"),
        *[
            (make, {}, acting_in(PARTS), f"{name} takes .*but Toy has dict actions of Discrete"
             ".*agents for such actions: ppo, a2c, reinforce and impala$")
            for name, make in (("dqn", jaxrl.dqn), ("iql", jaxrl.iql))
        ],
        (jaxrl.ppo, {}, acting_in({"arm": (Discrete(2), WHOLE)}),
         r"Toy has actions\['arm'\]\[1\] Box.*int32.*expected Discrete"),
        (jaxrl.ppo, {"squash": True}, acting_in({"arm": OPEN}),
         r"agent\.squash needs bounds, but actions\['arm'\] of Toy have none"),
        (jaxrl.ppo, {}, acting_in({}), r"Toy has actions \{\}, which have no part"),
    ],
    "optimizers": [
        (jaxrl.dqn, {"optimizer": "sgd", "optimizer_eps": 1e-5}, BUILT_AT_ONCE,
         "optimizer_eps is set, which sgd does not have; optimizers that do: adam, adamw, nadam"),
        (jaxrl.dqn, {"weight_decay": 0.1}, BUILT_AT_ONCE,
         "weight_decay is set, which adam does not have; optimizers that do: adamw and lion"),
        (jaxrl.dqn, {"optimizer": "rmsprop", "optimizer_b1": 0.5}, BUILT_AT_ONCE,
         "optimizer_b1 is set, which rmsprop does not have"),
        (jaxrl.dqn, {"optimizer_b2": 1.5}, BUILT_AT_ONCE, "agent.optimizer_b2 is 1.5"),
        (jaxrl.dqn, {"optimizer_eps": 1e-5, "make_optimizer": optax.adam}, BUILT_AT_ONCE,
         "optimizer_eps is set beside make_optimizer, which takes its place"),
        (jaxrl.simba, {"weight_decay": 0.5, "make_optimizer": optax.adam}, BUILT_AT_ONCE,
         "weight_decay is set beside make_optimizer"),
        (jaxrl.simba, {"weight_decay": 0.5, "optimizer": "adam"}, BUILT_AT_ONCE, "set, which adam does not have"),
    ],
    "schedules": [
        (jaxrl.dqn, {"lr": "linear(1e-3,0)"}, BUILT_AT_ONCE,
         r"cannot read the schedule 'linear\(1e-3,0\)'; expected linear\(START,END,STEPS\)"),
        (jaxrl.dqn, {"lr": "linear(1e-3,0,x)"}, BUILT_AT_ONCE, "cannot read the schedule"),
        (jaxrl.dqn, {"lr": "linear(1e-3,0,10"}, BUILT_AT_ONCE, "cannot read the schedule"),
        (jaxrl.dqn, {"lr": "linear(1e-3,0,10.5)"}, BUILT_AT_ONCE, "linear: steps is 10.5"),
        (jaxrl.dqn, {"lr": "constant(1,warmup=-3)"}, BUILT_AT_ONCE, "constant: warmup is -3"),
        (jaxrl.dqn, {"lr": "linear(1e-3,nan,10)"}, BUILT_AT_ONCE, "linear: end is nan"),
        (jaxrl.dqn, {"lr": "exponential(1,0,10)"}, BUILT_AT_ONCE,
         "exponential from 1 to 0; expected both above 0, or both below it"),
        (jaxrl.dqn, {"tau": "linear(0,1.5,10)"}, BUILT_AT_ONCE, r"agent\.tau, in its schedule, is 1\.5"),
        (jaxrl.dqn, {"lr": "linear(-1,1,10)"}, BUILT_AT_ONCE, r"agent\.lr, in its schedule, is -1"),
        *[
            (jaxrl.dqn, {"epsilon": jaxrl.linear(1, 0.1, 100), name: value}, BUILT_AT_ONCE,
             r"agent\.epsilon is a schedule of epsilon_start and epsilon_end, but agent\.epsilon_.* is set as well")
            for name, value in (
                ("epsilon_end", 0.01),
                ("epsilon_start", jaxrl.linear(0.5, 0.2, 10)),
                ("schedules", ["epsilon_end=constant(0.1)"]),
            )
        ],
        (jaxrl.dqn, {"schedules": ["lr"]}, BUILT_AT_ONCE, "agent.schedules has 'lr'; expected NAME=SCHEDULE"),
        (jaxrl.dqn, {"schedules": 3}, BUILT_AT_ONCE, "agent.schedules is 3; expected a list"),
        (jaxrl.dqn, {"schedules": ["featuers=constant(1)"]}, BUILT_AT_ONCE,
         "dqn has no setting 'featuers' for a schedule; did you mean features"),
    ],
    "rescaled values": [
        *[
            (make, {"value_rescaling": True, **settings}, BUILT_AT_ONCE, said)
            for make, settings, said in (
                (jaxrl.dqn, {"values": "qr"}, r"agent\.values is qr, .* set it to expected, or value_rescaling"),
                (jaxrl.dqn, {"munchausen": 0.9}, r"agent\.munchausen is 0\.9, but agent\.value_rescaling"),
                (jaxrl.dqn, {"cql": 1.0}, r"agent\.cql is 1\.0, but agent\.value_rescaling"),
                (jaxrl.dqn, own_target, r"agent\.value_rescaling is True"),
                (jaxrl.rainbow, {}, r"but agent\.value_rescaling is for expected values alone"),
                (jaxrl.cql_dqn, {}, r"but agent\.value_rescaling is for expected values alone"),
            )
        ],
    ],
    "atoms": [
        (jaxrl.td3, {"atoms": 1}, BOX, r"agent\.atoms is 1; expected at least 2, or 0"),
        (jaxrl.td3, {"atoms": 5, "v_min": 1.0, "v_max": 1.0}, BOX, r"v_min is 1\.0 and agent\.v_max 1\.0"),
        (jaxrl.td3, {"atoms": 5, "core": "gru"}, BOX, r"atoms is 5 and agent\.core gru, which do not go together"),
        (jaxrl.td3, {"atoms": 5, **own_critic}, BOX, r"which a critic made in Python does not have"),
        (jaxrl.sac, {"atoms": 5, "quantiles": 5}, BOX, r"agent\.quantiles 5.*set quantiles to 0, or atoms to 0"),
        (jaxrl.sac, {"atoms": 5, "critic_subset": 1}, BOX, r"atoms is 5 and agent\.critic_subset 1"),
        (jaxrl.sac, {"atoms": 5, "cql": 1.0}, BOX, r"atoms is 5 and agent\.cql 1\.0"),
        (jaxrl.sac, {"atoms": 5, "target_network": False}, BOX, r"target_network False.*set target_network to True"),
        (jaxrl.sac, {"critic_target": "mean", "critic_subset": 1}, BOX,
         r"critic_subset is 1 and agent\.critic_target mean.*set critic_target to min"),
        (jaxrl.sac, {"critic_target": "mean", "quantiles": 5}, BOX, r"quantiles is 5 and agent\.critic_target mean"),
        (jaxrl.sac, {"atoms": 5}, NUMBERS, r"atoms is 5, but Toy has Discrete actions.*dqn with values c51"),
        (jaxrl.reppo, {"v_min": 3.0, "v_max": 3.0}, BUILT_AT_ONCE,
         r"agent\.v_min is 3\.0 and agent\.v_max 3\.0; expected v_min below v_max"),
        (jaxrl.reppo, {"atoms": 1}, BUILT_AT_ONCE, r"agent\.atoms is 1"),
    ],
    "quantiles and subsets": [
        *[
            (jaxrl.sac, settings, BOX, said)
            for settings, said in (
                ({"quantiles": 2}, r"quantiles is 2 and agent\.drop_quantiles 2; expected"),
                ({"quantiles": 1, "drop_quantiles": 0}, r"expected at least 2 quantiles"),
                ({"quantiles": 3, "num_critics": 1}, r"and 2 of all critics that are left"),
                ({"quantiles": 5, "cql": 1.0}, r"is 5 and agent\.cql 1\.0.*set cql to 0\.0, or quantiles to 0"),
                ({"quantiles": 5, "critic_subset": 1}, r"quantiles is 5 and agent\.critic_subset 1.*or quantiles to"),
                ({"quantiles": 5, "core": "gru"}, r"is 5 and agent\.core gru.*set core to none, or quantiles to 0"),
                ({"quantiles": 5, **own_critic}, r"which a critic made in Python does not have"),
                ({"quantiles": 5, "target_network": False}, r"quantiles is 5 and agent\.target_network False"),
                ({"critic_subset": 2, "target_network": False}, r"is 2 and agent\.target_network False.*to True"),
                ({"critic_subset": 3}, r"critic_subset is 3, but agent\.num_critics 2; draw at most"),
            )
        ],
        (jaxrl.sac, {"quantiles": 5}, NUMBERS, r"quantiles is 5, but Toy has Discrete actions.*dqn with values qr"),
    ],
    "a loss of one's own": [
        (partial(make, **{"critic_loss": squared, **settings}), {}, BOX, said)
        for make, settings, said in (
            (jaxrl.td3, {"atoms": 11}, "is a function, of mean returns, but agent.atoms is 11; set atoms to 0"),
            (jaxrl.xqc, {}, r"agent\.atoms is 101"),
            (jaxrl.tqc, {}, r"but agent\.quantiles is 25; set quantiles to 0, or leave critic_loss out"),
            (jaxrl.sac, {"critic_loss": 0.5}, "is float; expected a function of a batch, as in lambda q, target"),
            (jaxrl.sac, {"critic_loss": "huber"}, r"unknown agent\.critic_loss 'huber'; known: c51, hl_gauss"),
            (jaxrl.iql, {"critic_loss": "c51"}, r"critic_loss is str; expected a function"),
        )
    ],
    "terms and targets of one's own": [
        (jaxrl.ppo, {"extra_loss": 0.1}, BUILT_AT_ONCE, "is float; expected a function of a batch, as in lambda param"),
        (jaxrl.ppo, {"extra_loss": lambda items, q: 0.0}, BUILT_AT_ONCE,
         r"extra_loss takes .*\(items, q\); expected \(params, sample,"),
        (jaxrl.bc, {"extra_loss": lambda a, b, c, d: 0.0}, BUILT_AT_ONCE,
         r"extra_loss takes the arguments \(a, b, c, d\); expected"),
        (jaxrl.sac, {"extra_policy_loss": lambda items: 0.0}, BUILT_AT_ONCE,
         r"extra_policy_loss takes .*; expected \(params, items, o"),
        (jaxrl.dqn, {"target": lambda items: 0.0}, BUILT_AT_ONCE,
         r"target takes the arguments \(items\); expected \(items, values\)"),
        (jaxrl.dqn, {"target": 1.0}, NUMBERS, "target is float; expected a function of a batch, as in lambda items, v"),
        (jaxrl.dqn, {**own_target, "values": "c51"}, NUMBERS, "agent.values is c51; `target` needs expected values"),
        (jaxrl.dqn, {**own_target, "core": "gru"}, NUMBERS,
         "agent.core is gru; `target` needs expected values without a core"),
        (jaxrl.dqn, {**own_target, "munchausen": 0.9}, NUMBERS,
         "agent.munchausen is 0.9; `target` needs .*: set it to 0.0"),
    ],
    "normalisation and dropout": [
        *[
            (jaxrl.sac, settings, BOX, said)
            for settings, said in (
                ({"batch_norm": "batch", "layer_norm": True}, r"layer_norm is True and agent\.batch_norm batch.*none"),
                ({"batch_norm": "batch", "core": "gru"}, r"is gru and agent\.batch_norm batch.*set batch_norm to none"),
                ({"dropout": 0.1, "core": "gru"}, r"core is gru and agent\.dropout 0\.1.*set dropout to 0\.0"),
                ({"dropout": 0.1, "batch_norm": "renorm"}, r"is 0\.1, which agent\.batch_norm renorm does not have"),
                ({"dropout": 0.1, "torso": "simba"}, r"is 0\.1, which torso simba does not have; set dropout to 0"),
                ({"dropout": 0.1, **own_critic}, r"which a critic made in Python does not have"),
                ({"joint_batch": True}, r"is on, but critics with agent\.batch_norm none have no statistics"),
                (
                    {"joint_batch": True, "batch_norm": "batch", "target_network": False},
                    r"joint_batch is True and agent\.target_network False.*or joint_batch to False",
                ),
                ({"joint_batch": True, "core": "gru"}, r"joint_batch is True and agent\.core gru.*set core to none"),
                ({"pre_activation_norm": True}, r"is on, but agent\.batch_norm none; set batch_norm to"),
                ({"pre_activation_norm": True, "core": "gru"}, r"is gru and agent\.pre_activation_norm True.*to False"),
                ({"weight_norm": True, "core": "gru"}, r"is gru and agent\.weight_norm True.*weight_norm to False"),
            )
        ],
        *[
            (make, {"core": "gru", **settings}, BOX, said)
            for make, settings, said in (
                (jaxrl.simba, {}, r"core is gru and agent\.critic_features \(512, 512\).*set critic_features to \(\)"),
                (jaxrl.simba, {"critic_features": ()}, r"features is \(128,\), .* no block of torso simba before it"),
                (jaxrl.droq, {}, r"core is gru and agent\.dropout 0\.01.*set dropout to 0\.0, or core to none"),
            )
        ],
        (jaxrl.sac, {"batch_norm": "batch"}, seeing(small_image, Discrete(2)),
         r"batch_norm is batch, but Toy has images.*set agent\.torso to mlp"),
    ],
    "cores": [
        (jaxrl.ppo, {"core": "minigru"}, NUMBERS, "unknown agent.core 'minigru'; did you mean mingru"),
        (jaxrl.ppo, {"core": "gla", "core_features": 6}, NUMBERS, "core_features is 6; gla needs a multiple of 4"),
        (jaxrl.ppo, {"core": "gtrxl", "core_features": 6}, NUMBERS, "core_features is 6; gtrxl needs a multiple of 4"),
        (jaxrl.ppo, {"core": "gru", "core_layers": 0}, NUMBERS, "core_layers is 0"),
        *[
            (make, {"core": "gru", network: lambda spec, head=None: None}, spec,
             rf"a network of {network} has no memory; set agent\.core to none")
            for make, network, spec in (
                (jaxrl.dqn, "make_network", BUILT_AT_ONCE), (jaxrl.pqn, "make_network", BUILT_AT_ONCE),
                (jaxrl.sac, "make_policy", BUILT_AT_ONCE), (jaxrl.sac, "make_critic", BUILT_AT_ONCE),
                (jaxrl.td3, "make_critic", BOX),
            )
        ],
        (jaxrl.sac, {"core": "gru", "target_network": False}, BUILT_AT_ONCE,
         r"core is gru and agent\.target_network False.*set target_network to True"),
        (jaxrl.ppo, {"core": "gru", "critic_core": "none", "shared": True}, BUILT_AT_ONCE,
         r"agent\.shared is on, but with agent\.critic_core none.*turn shared off"),
    ],
    "noise that lasts": [
        (jaxrl.td3, {"noise_memory": 1.5}, BUILT_AT_ONCE, r"agent\.noise_memory is 1\.5"),
        (jaxrl.sac, {"noise_memory": 1.0}, BUILT_AT_ONCE, r"agent\.noise_memory is 1\.0"),
        (jaxrl.sac, {"noise_memory": 0.5}, NUMBERS, r"noise_memory is 0\.5, but Toy has Discrete actions"),
        (jaxrl.td3, {"noise_min": 0.2}, BUILT_AT_ONCE,
         r"agent\.noise_min is 0\.2 and agent\.noise 0\.1; expected noise_min at most noise"),
        *[
            (make, {"core": "gru", "noise_memory": 0.5}, BUILT_AT_ONCE,
             r"noise_memory is 0\.5 and agent\.core gru.*set core to none, or noise_memory to 0")
            for make in (jaxrl.sac, jaxrl.td3)
        ],
        (jaxrl.td3, {"noise_min": 0.05, "core": "gru"}, BUILT_AT_ONCE,
         r"noise_min is 0\.05 and agent\.core gru.*set core to none, or noise_min to 0"),
    ],
    "agents for data": [
        (jaxrl.td3_bc, {"actor_bc_coef": 0.1}, BUILT_AT_ONCE,
         r"bc_alpha is 2\.5 and agent\.actor_bc_coef 0\.1.*set actor_bc_coef to 0\.0, or bc_alpha to 0"),
        (jaxrl.edac, {"num_critics": 1}, BUILT_AT_ONCE, r"eta is 1\.0, but agent\.num_critics 1 has no pairs"),
        (jaxrl.sac, {"eta": 1.0, "core": "gru"}, BUILT_AT_ONCE,
         r"eta is 1\.0 and agent\.core gru.*set core to none, or eta to 0"),
        (jaxrl.sac, {"eta": 1.0}, NUMBERS, r"agent\.eta is 1\.0, but Toy has Discrete actions"),
    ],
    "policy gradients": [
        (jaxrl.ppo, {"surrogate": "weighted"}, BUILT_AT_ONCE, "weighted needs V-trace"),
        (jaxrl.a2c, {"init_std": 0.5, "free_scale": False}, BUILT_AT_ONCE,
         r"agent\.init_std is 0\.5, but with agent\.free_scale off .*; turn free_scale on, or set init_std to 1"),
        *[(jaxrl.ppo, {"init_std": std}, BUILT_AT_ONCE, rf"agent\.init_std is {std}; ") for std in (0.001, 20.0)],
    ],
    "residual blocks": [
        (make, {"torso": "simba", **settings}, NUMBERS, said)
        for make, settings, said in (
            (jaxrl.dqn, {}, r"agent\.features is \(120, 84\), but the blocks of torso simba are all of one width"
             r".*\(120, 120\)"),
            (jaxrl.ppo, {"features": (8, 16, 8)}, r"agent\.features is .*the nearest is \(16, 16, 16\)"),
            (jaxrl.pqn, {"features": (8, 4)}, r"agent\.features is \(8, 4\)"),
            (jaxrl.bc, {"features": (8, 4)}, r"agent\.features is \(8, 4\)"),
            (jaxrl.sac, {"features": (8, 4)}, r"agent\.features is \(8, 4\)"),
            (jaxrl.sac, {"critic_features": (8, 4)}, r"agent\.critic_features is \(8, 4\).*nearest is \(8, 8\)"),
            (jaxrl.iql, {"critic_features": (4, 8)}, r"agent\.critic_features is \(4, 8\)"),
            (jaxrl.sac, {"batch_norm": "batch"},
             r"batch_norm is batch, which torso simba does not have; set agent\.torso to mlp"),
        )
    ],
    "torsos": [
        (make, settings, spec, said)
        for make in (jaxrl.dqn, jaxrl.pqn, jaxrl.reppo, jaxrl.ppo, jaxrl.bc, jaxrl.sac, jaxrl.iql)
        for settings, spec, said in (
            ({"torso": "nature"}, seeing(small_image, Discrete(2)), "use torso minatar, impala or mlp"),
            ({"channels": (0,)}, BUILT_AT_ONCE, r"agent\.channels is 0"),
            ({"dtype": "float16"}, BUILT_AT_ONCE, r"unknown agent\.dtype 'float16'"),
        )
    ],
    "masks": [
        (jaxrl.ppo, {}, seeing({"action_mask": mask, "seen": SEEN}, actions), said)
        for mask, actions, said in (
            (Box(0, 1, (3,), bool), Box(-1.0, 1.0, (3,)), "actions are Box; a mask is for Discrete and MultiDiscrete"),
            (Box(0, 1, (4,), bool), Discrete(3), r"is \[4\]; expected \[3\], true for each allowed action"),
            (Box(0, 1, (3, 2), bool), MultiDiscrete((3, 3)), r"is \[3, 2\]; expected \[2, 3\] or \[6\]"),
            (Box(0, 1, (2, 3), bool), MultiDiscrete((3, 2)), r"is \[2, 3\]; expected \[5\]"),
            (Box(0.0, 1.0, (3,)), Discrete(3), "is float32; expected bool"),
            (Discrete(3), Discrete(3), r"is \[\]; expected \[3\]"),
            (THREE, SPACE, r"the action_mask of Toy is Box.*; expected a dict of masks, as its actions are"),
            ({"moves": THREE}, SPACE, r"has an entry 'moves', which its actions have not"),
            ({"move": FIVE}, SPACE, r"the action_mask\['move'\] of Toy is \[5\]; expected \[3\]"),
            ({"aim": (THREE,)}, SPACE, r"the action_mask\['aim'\] of Toy is a tuple of 1; expected 2.*with \(\) for"),
            ({"aim": (THREE, ())}, SPACE,
             r"an action_mask\['aim'\]\[0\], but its actions\['aim'\]\[0\] are Box"),
            ({"a": THREE}, (Discrete(3), Discrete(5)), r"expected a tuple of masks"),
            ((THREE, Box(0.0, 1.0, (5,))), (Discrete(3), Discrete(5)), r"the action_mask\[1\] of Toy is float32"),
        )
    ],
    "nothing to see": [
        (jaxrl.dqn, {}, seeing({"action_mask": Box(0, 1, (4,), bool)}, Discrete(4)),
         "are action_mask, none of which a policy sees"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "settings", "spec", "said"),
    [pytest.param(*row, id=f"{about}-{i}") for about, rows in REFUSED.items() for i, row in enumerate(rows)],
)
def test_what_cannot_be_is_refused_in_one_line(make: Any, settings: dict[str, Any], spec: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as refused:
        make(**settings) if spec is BUILT_AT_ONCE else make(**settings)(spec)
    assert "\n" not in str(refused.value)
