"""Models: what acts and what judges. `base` is the contract, `networks` builds what is here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from repertory.checkpoints import load, load_model_state, resolve
from repertory.config import RunConfig
from repertory.environments.base import EnvironmentSpec
from repertory.models.networks import ActorCritic, build_model
from repertory.seeds import Stream, global_generator, seed_for

__all__ = ["create", "create_on_cpu", "device_of"]


def create(config: RunConfig, environment: EnvironmentSpec, index: int = 0) -> ActorCritic:
    """The model that a learner or worker of that index starts from, on its device."""
    return create_on_cpu(config, environment).to(device_of(config, index))


def create_on_cpu(config: RunConfig, environment: EnvironmentSpec) -> ActorCritic:
    """The model that a run starts from, the same in every role, where a GPU would be of no use.

    Raises:
        ValueError: The network cannot take the environment's observations.
        CheckpointError: `init_from` cannot be read, or holds another model.
    """
    # One thread: orthogonal kernels differ in their last bits with the number of threads, which is
    # not the same in the parent and in roles.
    with one_thread(), global_generator(seed_for(config.seed, Stream.PARAMETERS)):
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute with a single thread in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_of(config: RunConfig, index: int = 0) -> torch.device:
    """Where a role's model is: `auto` takes a GPU where there is one, and roles take turns."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", index % max(1, torch.cuda.device_count()))
