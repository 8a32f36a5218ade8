"""Ray for a run: a cluster of this machine's own, or the one that the job was submitted to."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from configs.schema import RunConfig
from rl.errors import RunError


class ClusterError(RunError):
    """The cluster can never run what the recipe asks for."""


@contextmanager
def ray_cluster(config: RunConfig) -> Iterator[None]:
    """Connect to the cluster named by RAY_ADDRESS (`ray job submit` sets it), or start one here that ends with the block.

    Raises ClusterError at once when the cluster has too few CPUs.
    """
    needed = config.rollout.num_workers * config.rollout.torch_threads + config.learner.torch_threads
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
    else:
        # CPUs are counted, not pinned: with fewer cores than threads the run is slower, not impossible.
        cpus = max(needed, os.cpu_count() or 1)
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    try:
        available = ray.cluster_resources().get("CPU", 0)
        if available < needed:
            raise ClusterError(
                f"the cluster must have {needed} CPUs for {config.rollout.num_workers} rollout workers and the learner, "
                f"it has {available:g}: "
                f"lower rollout.num_workers, rollout.torch_threads or learner.torch_threads, or add nodes"
            )
        yield
    finally:
        ray.shutdown()
