"""The folder of one run: where everything lies, and the checks that come before anything is started."""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from configs.load import dump_config
from configs.schema import RunConfig
from rl.errors import RunError

MIN_FREE_BYTES = 500 * 2**20
"""Room for logs, trajectories and the checkpoints of a small policy."""
RECORDED_PACKAGES = (
    "cairn-rl",
    "gymnasium",
    "numpy",
    "peft",
    "pydantic",
    "ray",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "trl",
)
GIT_TIMEOUT_S = 10.0
MIB = 2**20


class RunFolderError(RunError):
    """A run folder cannot be made, written or read."""


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run.

    Example: `RunFolder(Path("runs/quickstart-20260102-030405")).checkpoints`.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The resolved recipe; `load_config` reads it."""
        return self.path / "config.toml"

    @property
    def environment(self) -> Path:
        """Where and with what the run was started: commit, versions, machine, command line."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """One JSON record per step."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """One JSON record per held-out evaluation, with the outcome of each task."""
        return self.path / "evaluations.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint, in Hugging Face format."""
        return self.path / "checkpoints"

    @property
    def trajectories(self) -> Path:
        """Every trajectory, as JSON lines by step."""
        return self.path / "trajectories"

    @property
    def learning_curve(self) -> Path:
        """The picture."""
        return self.path / "learning_curve.png"

    @property
    def summary(self) -> Path:
        """The summary for people; it exists once the run is done."""
        return self.path / "summary.md"

    @property
    def summary_json(self) -> Path:
        """The summary for programs."""
        return self.path / "summary.json"


def free_bytes(folder: Path) -> int:
    """Return what an ordinary user may still write to the folder's disk."""
    return shutil.disk_usage(folder).free


def create_run_folder(
    config: RunConfig,
    *,
    now: datetime | None = None,
    estimated_bytes: int = 0,
    measure_free_bytes: Callable[[Path], int] = free_bytes,
) -> RunFolder:
    """Make `<output.folder>/<name>-<YYYYmmdd-HHMMSS>` (with -2, -3, .. when it exists), holding config.toml and environment.json.

    now: local time, for the name. estimated_bytes: what the run's checkpoints will need beyond `MIN_FREE_BYTES`.
    Raises RunFolderError when the place is no folder, cannot be written, or has too little room; then nothing is left behind.
    """
    parent = Path(config.output.folder)
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise RunFolderError(f"output.folder must be a folder, got {parent}, where a file is in the way: choose another") from None
    except OSError as error:
        raise RunFolderError(f"output.folder must be writable, got {parent} ({error.strerror}): choose another") from None
    check_room(parent, needed_bytes=MIN_FREE_BYTES + estimated_bytes, measure_free_bytes=measure_free_bytes)
    path = _make_new_folder(parent, f"{config.name}-{now or datetime.now():%Y%m%d-%H%M%S}")
    folder = RunFolder(path)
    try:
        folder.checkpoints.mkdir()
        folder.trajectories.mkdir()
        write_text_atomically(folder.config, dump_config(config))
        write_json_atomically(folder.environment, describe_environment())
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)
        raise RunFolderError(f"the run folder must be writable, got {path} ({error.strerror}): choose another output.folder") from error
    return folder


def open_run_folder(path: Path) -> RunFolder:
    """Return the run folder at `path`; raises RunFolderError when it is none, naming the runs beside it."""
    folder = RunFolder(Path(path))
    if folder.config.is_file() and folder.environment.is_file():
        return folder
    inside = next((parent for parent in folder.path.parents if RunFolder(parent).config.is_file()), None)
    if inside is not None:
        advice = f"did you mean {inside}?"
    else:
        parent = folder.path if folder.path.is_dir() else folder.path.parent
        runs = sorted(child for child in parent.glob("*/") if RunFolder(child).config.is_file())
        advice = f"the newest run in {parent} is {max(runs, key=_age)}" if runs else f"there is no run in {parent}"
    problem = "which has no config.toml and environment.json" if folder.path.exists() else "which does not exist"
    raise RunFolderError(f"a run folder is needed, got {folder.path}, {problem}: {advice}")


def check_room(folder: Path, *, needed_bytes: int = MIN_FREE_BYTES, measure_free_bytes: Callable[[Path], int] = free_bytes) -> None:
    """Raise RunFolderError unless the existing folder can be written and its disk has room for `needed_bytes`."""
    free = measure_free_bytes(folder)
    if free < needed_bytes:
        raise RunFolderError(
            f"the disk of {folder} must have {needed_bytes / MIB:,.0f} MiB free, got {free / MIB:,.0f} MiB: "
            f"make room or choose another output.folder"
        )
    probe = folder / f".write-test-{os.getpid()}"
    try:
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise RunFolderError(f"{folder} must be writable, got: {error.strerror}. Choose another output.folder") from None


def write_json_atomically(path: Path, value: Any) -> None:
    """Write JSON so that a kill at any moment leaves the old file or the new one; raises ValueError on NaN and infinities."""
    write_text_atomically(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text file so that a kill at any moment leaves the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def describe_environment() -> dict[str, Any]:
    """Return what a reader needs to repeat the run: the commit (None outside a checkout), versions, machine and command line."""
    return {
        "git": _git_state(Path(__file__).resolve().parents[1]),
        "packages": {name: version for name in RECORDED_PACKAGES if (version := _installed_version(name))},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "usable_cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "command_line": sys.argv,
    }


def _make_new_folder(parent: Path, name: str) -> Path:
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        except OSError as error:
            raise RunFolderError(f"a run folder must be made in {parent}, got: {error.strerror}. Choose another output.folder") from None
        else:
            return path


def _age(path: Path) -> float:
    return path.stat().st_mtime


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state(root: Path) -> dict[str, Any] | None:
    """Return the commit of the checkout whose top is `root`, and whether files differ from it; None when `root` is no such top.

    An installed package may lie inside somebody else's checkout; its commit would say nothing.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root:
        return None
    commit, changes = _git(root, "rev-parse", "--verify", "HEAD"), _git(root, "status", "--porcelain")
    return {"commit": commit, "is_dirty": None if changes is None else bool(changes)}


def _git(root: Path, *arguments: str) -> str | None:
    """Return what git says, or None when it cannot (not installed, no checkout, no commit yet)."""
    try:
        result = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
