"""jaxrl's names for the settings of other libraries: some are translated, for others there is a hint."""

from typing import NamedTuple


class Hint(NamedTuple):
    """jaxrl's name for a setting of another library."""

    names: tuple[str, ...]
    """Paths of the settings that it may mean; the first that exists in the given context counts."""
    note: str = ""


_ALIASES = {
    "processor.discount": "gamma discount_factor",
    "agent.lr": "learning_rate lr_rate alpha q_lr critic_lr qf_lr value_lr",
    "agent.policy_lr": "actor_lr pi_lr actor_learning_rate",
    "agent.temperature_lr": "alpha_lr ent_lr",
    "agent.lr_decay": "anneal_lr linear_schedule decay_learning_rates",
    "agent.schedules": "lr_schedule lr_scheduler schedule scheduler warmup_steps_lr lr_warmup cosine",
    "agent.value_rescaling": "value_rescale rescale_values value_function_rescaling use_value_rescaling",
    "agent.boltzmann": "boltzmann_temperature softmax_temperature exploration_temperature",
    "buffer.batch_size batch_size minibatches": "batch_size minibatch_size train_batch_size total_batch_size",
    "buffer.capacity": "buffer_size replay_size replay_buffer_size memory_size replay_capacity total_buffer_size",
    "buffer.prioritised": "per prioritized prioritized_replay prioritized_buffer",
    "rollout processor.n_step": "n_steps num_steps rollout_length unroll_length rollout_steps horizon nstep",
    "agent.gae_lambda agent.q_lambda": "gae_lambda gae lam lambda lambd",
    "agent.ent_coef agent.temperature": "ent_coef entropy entropy_coef entropy_coeff entropy_cost",
    "agent.vf_coef": "vf_coef value value_coef value_loss_coef vf_coeff",
    "agent.clip_eps": "clip_eps clip clip_range clip_coef clip_param clip_epsilon clip_ratio",
    "agent.vf_clip_eps": "clip_value clip_range_vf clip_vloss",
    "agent.normalise_advantage": (
        "norm_adv normalize_advantage normalize_advantages advantage_normalization standardize_advantages"
    ),
    "num_envs": "n_envs n_env envs num_environments nenvs total_num_envs",
    "epochs updates": "n_epochs update_epochs num_epochs ppo_epochs epochs",
    "minibatches": "num_minibatches n_minibatches nminibatches",
    "warmup": "learning_starts start_steps initial_steps warmup_steps fill_buffer",
    "opt_interval": "train_freq train_frequency update_every update_frequency",
    "updates": "gradient_steps utd utd_ratio updates_per_step num_updates_per_step",
    "agent.target_interval": "target_update_interval target_network_frequency target_update_freq target_update_period",
    "agent.num_critics": "critics n_critics num_qs ensemble_size",
    "agent.tau": "polyak soft_tau target_update_tau",
    "agent.epsilon_decay": "exploration_fraction exploration_decay eps_decay epsilon_timesteps",
    "agent.epsilon_end": "exploration_final_eps end_e eps_end final_epsilon training_epsilon",
    "agent.epsilon_start": "exploration_initial_eps start_e eps_start initial_epsilon",
    "agent.policy_interval": "policy_frequency policy_delay",
    "agent.noise": "exploration_noise action_noise",
    "agent.features": "net_arch hidden_sizes hidden_size hidden_layer_sizes hidden_dims hidden_dim layers",
    "agent.torso": "policy network",
    "agent.atoms": "n_atoms num_atoms n_quantiles num_quantiles",
    "agent.optimizer": "optim optimiser",
    "env": "env_id env_name environment task gym_id",
    "eval_interval": "eval_freq eval_frequency eval_every num_evaluation num_evaluations",
    "eval_episodes": "n_eval_episodes num_eval_episodes eval_runs",
    "video_interval": "capture_video record_video video video_freq video_frequency save_video",
    "record_interval": "log_interval log_freq log_frequency log_every",
    "save_interval": "save_freq checkpoint_interval checkpoint_freq checkpoint_frequency save_frequency",
    "run_dir": "logdir log_dir log_folder output_dir out save_path save_dir tensorboard_log dir exp_name run_name",
    "resume": "load load_model load_path checkpoint ckpt trained_agent restore",
    "quiet": "verbose silent",
    "processor.normalise_obs": "normalize normalise norm_obs normalize_obs normalize_observations",
    "processor.normalise_reward": "norm_reward normalize_reward normalize_rewards",
    "processor.frame_stack": "n_stack num_stack framestack stack",
}
FLAG_ALIASES = {
    other: ours
    for ours, others in {
        "--processor.discount": "gamma discount-factor",
        "--agent.lr": "lr learning-rate",
        "--buffer.batch-size": "batch-size",
        "--buffer.capacity": "buffer-size",
        "--num-envs": "n-envs num-environments",
        "--max-env-steps": "total-timesteps timesteps n-timesteps num-timesteps",
        "--env": "env-id env-name",
        "--warmup": "learning-starts",
        "--agent.gae-lambda": "gae-lambda",
        "--agent.clip-eps": "clip-range clip-coef clip-eps",
        "--agent.ent-coef": "ent-coef",
        "--agent.max-grad-norm": "max-grad-norm",
    }.items()
    for other in others.split()
}
"""Flags of other libraries that are equivalent to one of ours, in the same unit, in every algorithm that has it."""
_SENTENCES = {
    "algorithm agent model": "the algorithm is the first argument, as in: train ppo --env CartPole-v1",
    "render render_mode": (
        "training shows no pictures, but films with --video-interval; afterwards: jaxrl play RUN_DIR --out episode.gif"
    ),
    "device cuda gpu use_cuda use_gpu no_cuda": (
        "JAX takes a GPU if it can use one; the environment variable JAX_PLATFORMS=cpu (or cuda) chooses"
    ),
}
_STEPS = (
    "total_timesteps timesteps n_timesteps num_timesteps total_steps max_steps max_timesteps total_frames num_frames"
)
_STEPS_NOTE = "the run ends where max_opts or max_env_steps is reached first, so raise max_opts too if that is less"

_SERVICES = (
    "track wandb use_wandb with_wandb wandb_project wandb_project_name wandb_entity wandb_mode mlflow use_mlflow "
    "tensorboard use_tensorboard csv logger loggers logging callback callbacks"
)
_SERVICES_NOTE = (
    "names, as in console tensorboard wandb; environment variables such as WANDB_PROJECT and MLFLOW_TRACKING_URI say "
    "where a service is"
)

HINTS: dict[str, Hint] = {
    # jaxrl's own names, which are unknown where they do not belong.
    **{name.rpartition(".")[2]: Hint((name,)) for name in " ".join(_ALIASES).split() if not name.startswith("agent.")},
    **{word: Hint(tuple(names.split())) for names, words in _ALIASES.items() for word in words.split()},
    **{word: Hint(("max_env_steps",), _STEPS_NOTE) for word in _STEPS.split()},
    **{word: Hint(("recorders",), _SERVICES_NOTE) for word in _SERVICES.split()},
    **{word: Hint((), sentence) for words, sentence in _SENTENCES.items() for word in words.split()},
}

ELSEWHERE = {
    "processor": "the discount and what else is done to steps belong to the processor, as in "
    "off_policy(..., processor=jaxrl.n_step(1, discount=0.99))",
    "buffer": "that belongs to the buffer, as in off_policy(..., buffer=jaxrl.uniform(capacity, batch_size))",
    "agent": "that belongs to the agent, as in jaxrl.dqn(lr=1e-3) or jaxrl.ppo(clip_eps=0.2)",
}
"""The function or class that takes a setting in Python, by the first part of the setting's path."""
TRAINERS = (
    "max_opts",
    "max_env_steps",
    "eval_interval",
    "eval_episodes",
    "record_interval",
    "save_interval",
    "run_dir",
    "recorders",
)


def hint_of(word: str) -> Hint | None:
    """Return jaxrl's names for `word`, a flag or a name in any spelling."""
    plain = word.lstrip("-").replace("-", "_").lower()
    return HINTS.get(plain) or HINTS.get(plain.rpartition(".")[2])


def elsewhere(word: str, hint: Hint) -> str:
    """Return a hint on where the misplaced setting `word` belongs."""
    head, _, tail = hint.names[0].rpartition(".")
    if head:
        return ELSEWHERE[head] if word == tail else f"jaxrl calls it {tail}; {ELSEWHERE[head]}"
    whose = "Trainer(...)" if tail in TRAINERS else "off_policy(...) or on_policy(...)"
    return f"it is a setting of {whose}" if word == tail else f"jaxrl calls it {tail}, a setting of {whose}"
