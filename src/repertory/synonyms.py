"""What to say to somebody who used another name: ours for theirs, or the closest one.

What is here: the names that settings have in other libraries, and hints made of them. What is not
here: the settings themselves (`config`).
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping

NAMES_ELSEWHERE: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "env": ("env_id", "env_name", "gym_id"),
        "env_kwargs": ("env_args", "env_config"),
        "protocol": ("frame_skip", "frameskip", "sticky_actions"),
        "max_episode_steps": ("max_episode_length",),
        "total_steps": (
            *("total_timesteps", "n_timesteps", "num_timesteps", "num_env_steps"),
            *("total_env_steps", "train_for_env_steps", "total_frames", "max_steps"),
        ),
        "num_actors": ("num_workers", "num_env_runners", "num_actor_threads"),
        "num_workers": ("num_actors", "workers"),
        "shared_statistics": ("no_shared", "shared_optimizer", "shared_rmsprop"),
        "sync": ("soft_clone", "soft_sync"),
        "max_lag": ("max_policy_lag", "max_staleness"),
        "num_envs": (
            *("n_envs", "nenv", "num_processes", "local_num_envs"),
            *("num_envs_per_worker", "num_envs_per_env_runner"),
        ),
        "num_learners": ("num_learner_threads",),
        "device": ("cuda", "no_cuda", "gpu"),
        "hidden_sizes": ("net_arch", "fcnet_hiddens"),
        "core": ("use_lstm", "use_rnn", "recurrent_policy", "rnn_type"),
        "core_size": ("lstm_size", "lstm_hidden_size", "lstm_cell_size", "rnn_size", "hidden_size"),
        "unroll_length": (
            *("n_steps", "nsteps", "num_steps", "t_max", "rollout", "rollout_length"),
            "rollout_fragment_length",
        ),
        "discount": ("gamma", "discounting", "discount_factor"),
        "reward_transform": ("reward_clip", "reward_clipping", "clip_rewards"),
        "value_cost": (
            *("vf_coef", "value_loss_coef", "value_loss_coeff", "vf_loss_coeff"),
            *("baseline_cost", "critic_coef"),
        ),
        "entropy_cost": (
            *("ent_coef", "entropy_coef", "entropy_coeff", "entropy_beta"),
            *("exploration_loss_coeff", "beta"),
        ),
        "last_inputs": ("lstm_use_prev_action", "lstm_use_prev_reward", "use_prev_action"),
        "not_finite": ("detect_anomaly", "error_if_nonfinite"),
        "optimizer": ("optim", "optimizer_class", "use_rms_prop"),
        "learning_rate": ("lr",),
        "learning_rate_end": ("anneal_lr", "lr_schedule", "use_linear_lr_decay"),
        "rmsprop_decay": ("alpha", "rms_alpha"),
        "epsilon": ("eps", "rms_prop_eps", "adam_eps"),
        "clip_norm": ("max_grad_norm", "grad_clip", "grad_norm_clipping"),
        "normalize_advantages": ("norm_adv", "normalize_advantage"),
        "passes": ("n_epochs", "update_epochs", "num_epochs", "num_sgd_iter"),
        "clip_range": ("clip_coef", "clip_param", "ppo_clip"),
        "batch_trajectories": ("batch_size",),
        "gae_lambda": ("gae", "use_gae", "lam", "lambda", "lambda_", "tau"),
        "run_dir": ("log_dir", "logdir", "save_dir", "savedir", "train_dir", "tensorboard_log"),
        "init_from": ("trained_agent", "load_checkpoint"),
        "log_every_steps": ("log_interval", "log_freq"),
    }
)
"""What other libraries call a setting, under our name of it: Stable-Baselines3 and its zoo,
CleanRL, RLlib, Sample Factory, TorchBeast, pytorch-a3c, pytorch-a2c-ppo-acktr-gail."""


def name_hint(name: str, known: Iterable[str]) -> str:
    """What to say after an unknown setting: its name here, the closest one, or nothing.

    Args:
        name: The name that was given, hyphens or underscores.
        known: Names that exist, with underscores.

    Returns:
        A clause that starts with `; `, or an empty string.
    """
    known = list(known)
    plain = name.replace("-", "_").lower()
    for ours in known:
        if plain in NAMES_ELSEWHERE.get(ours, ()):
            return f"; it is called {ours} here"
    return closest_hint(plain, known)


def closest_hint(given: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the closest of `known`, or an empty string."""
    by_lower = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(given.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[matches[0]]}?" if matches else ""
