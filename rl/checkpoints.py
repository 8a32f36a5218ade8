"""Checkpoints of a run: written aside and renamed, so that a kill at any moment leaves the last good one."""

import json
import os
import shutil
from pathlib import Path

from rl.learner_worker import PolicyLearner
from rollout.tasks import TaskQueue, TaskQueueState

PROGRESS = "progress.json"
_PARTIAL = ".partial"


async def save_checkpoint(folder: Path, learner: PolicyLearner, tasks: TaskQueue, step: int, *, keep: int) -> Path:
    """Write `step-<step>` into `folder` (Hugging Face format, `trainer_state.pt`, `progress.json`), remove all but the last `keep`."""
    progress = {"step": step, "tasks": tasks.state_dict()}  # before any await: generation goes on meanwhile
    final = folder / f"step-{step:06d}"
    partial = folder / f"{final.name}{_PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    await learner.save(str(partial))
    (partial / PROGRESS).write_text(json.dumps(progress))
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.startswith("step-") and not path.name.endswith(_PARTIAL))


def read_progress(checkpoint: Path) -> tuple[int, TaskQueueState]:
    """Return the step and the state of the task queue."""
    progress = json.loads((checkpoint / PROGRESS).read_text())
    return progress["step"], progress["tasks"]
