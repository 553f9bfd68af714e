"""Models: what acts and what judges. `base` is the contract, `networks` builds what is here."""

from __future__ import annotations

from pathlib import Path

import torch

from repertory.checkpoints import load, load_model_state, resolve
from repertory.config import RunConfig
from repertory.environments.base import EnvironmentSpec
from repertory.models.networks import ActorCritic, build_model
from repertory.seeds import Stream, global_generator, seed_for

__all__ = ["create", "create_on_cpu", "device_of"]


def create(config: RunConfig, environment: EnvironmentSpec) -> ActorCritic:
    """The model that a learner starts from, on the run's device; see `create_on_cpu`."""
    return create_on_cpu(config, environment).to(device_of(config))


def create_on_cpu(config: RunConfig, environment: EnvironmentSpec) -> ActorCritic:
    """The model that a run starts from, the same in every role, where a GPU would be of no use.

    Raises:
        ValueError: The network cannot take the environment's observations.
        CheckpointError: `init_from` cannot be read, or holds another model.
    """
    with global_generator(seed_for(config.seed, Stream.PARAMETERS)):
        model = build_model(
            environment,
            network=config.network,
            hidden_sizes=config.hidden_sizes,
            core=config.core,
            core_size=config.core_size,
            last_inputs=config.last_inputs,
            initialization=config.initialization,
            standardize_images=config.standardize_images,
            precision=config.precision,
        )
    start = config.resume_from or config.init_from
    if start is not None:
        load_model_state(model, load(resolve(Path(start)))["model"])
    return model


def device_of(config: RunConfig) -> torch.device:
    """Where models of a run are; `auto` takes a GPU where there is one."""
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)
