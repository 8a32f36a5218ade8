"""All environments by id: built-in ones and those of plugins."""

import importlib
import inspect
import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import gymnasium

from envs.tool_env import ToolEnv
from envs.tools import did_you_mean

PLUGIN_GROUP = "cairn.envs"
"""Entry points of this group are modules that register environments when imported, or functions that register them when called."""

SPLITS = ("train", "validation", "test")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnvRecord:
    """What is known of an environment without making it.

    entry_point: `module:Class` of a ToolEnv whose keyword arguments are the options. splits: ranges of seeds, by split, that never meet.
    Example: `EnvRecord("cairn/Ledger-v0", "envs.ledger.env:LedgerEnv", "cairn-rl", "Apache-2.0", "A bank's back office.",
    {"train": range(0, 100), "validation": range(100, 110), "test": range(110, 120)}, has_oracle=True)`.
    """

    id: str
    entry_point: str
    package: str
    licence: str
    description: str
    splits: dict[str, range]
    has_oracle: bool

    def __post_init__(self) -> None:
        if set(self.splits) != set(SPLITS):
            raise ValueError(f"an environment must have the splits {', '.join(SPLITS)}, {self.id} has {', '.join(self.splits) or 'none'}")
        if any(seeds.step != 1 or seeds.start < 0 or not seeds for seeds in self.splits.values()):
            raise ValueError(f"a split must be a range of seeds from 0 up, with step 1 and not empty, {self.id} has {self.splits}")
        ordered = sorted(self.splits.values(), key=lambda seeds: seeds.start)
        if any(left.stop > right.start for left, right in itertools.pairwise(ordered)):
            raise ValueError(f"the splits of an environment must not share a seed, {self.id} has {self.splits}")


_records: dict[str, EnvRecord] = {}
_loaded_plugins: set[str] = set()
_failed_plugins: dict[str, str] = {}


def register_env(record: EnvRecord) -> None:
    """Make an environment known here and to gymnasium; registering the same record again does nothing.

    Raises ValueError when the id belongs to another record.
    """
    if _records.get(record.id, record) != record:
        raise ValueError(f"an id must name one environment, {record.id} is already that of {_records[record.id].package}: choose another")
    if record.id not in _records:
        gymnasium.register(record.id, entry_point=record.entry_point, order_enforce=False, disable_env_checker=True)
        _records[record.id] = record


def list_envs() -> tuple[EnvRecord, ...]:
    """Return the records of all environments, by id."""
    return tuple(_records[env_id] for env_id in sorted(_records))


def find_record(env_id: str) -> EnvRecord:
    """Return the record of an id; `package.module:Name-v0` imports the module first.

    Raises ValueError naming the nearest id when there is none, ImportError when the module cannot be imported.
    """
    module, colon, name = env_id.rpartition(":")
    if colon:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ImportError(f"the part before the colon of an environment's id must be a module, {module} is none: {error}") from error
    if name not in _records:
        failed = "".join(f"; the plugin {plugin} could not be loaded: {error}" for plugin, error in _failed_plugins.items())
        known = did_you_mean(name, _records) or f", known are {', '.join(sorted(_records))}"
        raise ValueError(f"an environment must be registered, {name} is not{known}{failed}")
    return _records[name]


def make_env(env_id: str, options: Mapping[str, Any] | None = None) -> ToolEnv:
    """Return a new environment, without wrappers.

    Raises ValueError on an unknown id or option, with the nearest name, and what the environment raises on a wrong value.
    """
    record = find_record(env_id)
    options = dict(options or {})
    known = option_names(record)
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known) or f", it has {', '.join(known) or 'none'}"
            raise ValueError(f"{record.id} has no option {name}{hint}")
    env = gymnasium.make(record.id, disable_env_checker=True, **options).unwrapped
    if not isinstance(env, ToolEnv):
        raise TypeError(f"the entry point of an environment must be a ToolEnv, {record.entry_point} is {type(env).__name__}")
    return env


def option_names(record: EnvRecord) -> list[str]:
    """Return the names of the options that an environment takes."""
    module, _, name = record.entry_point.partition(":")
    return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)


def split_seeds(env_id: str, split: str) -> range:
    """Return the seeds of a split; raises ValueError on an unknown id or split."""
    if split not in SPLITS:
        raise ValueError(f"a split must be one of {', '.join(SPLITS)}, got {split}{did_you_mean(split, SPLITS)}")
    return find_record(env_id).splits[split]


def load_plugins() -> None:
    """Load the entry points of the group `cairn.envs`, each once.

    A plugin that cannot be loaded is logged and skipped; asking for an unknown id then names it.
    """
    for entry_point in metadata.entry_points(group=PLUGIN_GROUP):
        key = f"{entry_point.name} ({entry_point.value})"
        if key in _loaded_plugins:
            continue
        _loaded_plugins.add(key)
        try:
            plugin = entry_point.load()
            if callable(plugin):
                plugin()
        except Exception as error:
            _failed_plugins[key] = f"{type(error).__name__}: {error}"
            logger.warning("the plugin %s could not be loaded: %s", key, _failed_plugins[key])
