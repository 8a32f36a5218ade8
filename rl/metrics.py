"""All metrics of a run: their names, and the writer that puts them into JSON lines and TensorBoard events.

A name is `<stage>/<quantity>[_unit]/<reduction>`: which stage computed it, of what, and how many values became one.
"""

import difflib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

METRICS: dict[str, str] = {
    "rollout/reward/mean": "weighted reward of the step's graded trajectories",
    "rollout/success/mean": "share of graded trajectories that solved their task",
    "rollout/compliance/mean": "share of graded trajectories that broke no process rule",
    "rollout/response_tokens/mean": "tokens that the policy sampled in an episode",
    "rollout/turns/mean": "turns of the agent in an episode",
    "rollout/staleness_versions/mean": "updates between a trajectory's oldest token and the weights that learned from it",
    "rollout/staleness_versions/max": "largest staleness of the step; bounded by asynchrony.max_staleness",
    "rollout/tokens_per_s/mean": "tokens sampled per second of the step's wall clock",
    "rollout/tokens/sum": "tokens sampled since the last step, also those that nothing was learned from",
    "rollout/trajectories/count": "trajectories that the step learned from, failed members included",
    "rollout/failed/count": "attempts that failed for reasons outside the policy",
    "rollout/dropped_failed/count": "trajectories of groups that were given up because too few members were graded",
    "rollout/dropped_stale/count": "trajectories that were older than the bound and not learned from",
    "rollout/parse_errors/count": "episodes that ended because too many turns in a row held no valid call",
    "rollout/truncated/count": "episodes that a limit of turns or tokens cut",
    "rollout/workers_replaced/count": "rollout workers replaced since the start of this process",
    "loss/policy/mean": "clipped policy loss over the step's sampled tokens",
    "loss/clipped_fraction/mean": "share of sampled tokens whose ratio was clipped",
    "loss/ratio/mean": "probability of a sampled token now, divided by that when it was sampled",
    "loss/grad_norm/max": "largest norm of the gradient before clipping",
    "correction/logprob_gap/mean": "mean |log-prob of the learner - log-prob of the sampler|, nats per token",
    "correction/logprob_gap/p99": "99th percentile of the same gap",
    "correction/missing_logprobs/count": "sampled tokens whose log-prob the sampler lost; they get no correction",
    "advantage/constant_groups/count": "groups whose members all had the same reward: nothing to learn from",
    "advantage/ungraded/count": "members of groups without a usable reward; masked",
    "learner/learning_rate/last": "learning rate of the step's last update",
    "learner/tokens/sum": "sampled tokens that the step learned from",
    "learner/skipped_updates/count": "updates left out because their gradient was not finite",
    "time/generate_s/sum": "seconds that the loop spent generating (sync mode)",
    "time/wait_s/sum": "seconds that the learner waited for trajectories (async mode)",
    "time/learn_s/sum": "seconds of the update",
    "time/sync_s/sum": "seconds of sending weights to the workers",
    "time/step_s/sum": "seconds of the whole step, evaluation and checkpoints left out",
    "eval/success/mean": "share of graded held-out episodes that solved their task",
    "eval/compliance/mean": "share of graded held-out episodes that broke no process rule",
    "eval/response_tokens/mean": "tokens that the policy sampled in a held-out episode",
    "eval/episodes/count": "held-out episodes",
    "eval/failed/count": "held-out episodes that failed for reasons outside the policy; in no share",
}
"""Every metric there is, with what it says."""

Record = dict[str, float | None]


def check_metrics(metrics: Mapping[str, float]) -> None:
    """Raise KeyError naming the first name that is not in `METRICS`, and the nearest one that is."""
    for name in metrics:
        if name not in METRICS:
            near = difflib.get_close_matches(name, METRICS, n=1)
            advice = f"did you mean {near[0]}?" if near else "add it to the table in rl/metrics.py"
            raise KeyError(f"a metric must stand in the table of metrics, got {name}: {advice}")


def read_metrics(path: Path) -> list[Record]:
    """Return the records of a `metrics.jsonl`, in order; none when the file does not exist.

    A last line without its line break is what a killed run leaves behind, and is left out.
    Raises ValueError naming the file and the line that is no record.
    """
    if not path.exists():
        return []
    records: list[Record] = []
    *lines, _unfinished = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "step" not in record:
                raise ValueError("it has no step")
        except ValueError as error:
            raise ValueError(f"every line of {path} must be a JSON object with a step, line {number} is not: {error}") from error
        records.append(record)
    return records


class MetricsWriter:
    """Appends records to `metrics.jsonl` and TensorBoard events of one run folder; each record is on disk when `write` returns."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        """folder: the run folder; an earlier record in it stays. clock: seconds since 1970."""
        self._path, self._clock = folder / METRICS_FILE, clock
        self._tensorboard = folder / TENSORBOARD_FOLDER
        self._events = SummaryWriter(str(self._tensorboard))
        self._keep(read_metrics(self._path))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one record, `{"step": 3, "time": 1760000000.0, "rollout/success/mean": 0.5}`; a number that is not finite becomes null.

        Raises KeyError on a name that is not in `METRICS`.
        """
        check_metrics(metrics)
        now = self._clock()
        values = {name: float(value) for name, value in metrics.items()}
        record = {"step": step, "time": now} | {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
        self._show(step, now, values)

    def truncate_after(self, step: int) -> None:
        """Drop every record of a later step, so that a run that goes on from a checkpoint shows no step twice."""
        records = [record for record in read_metrics(self._path) if (record["step"] or 0) <= step]
        self._keep(records)
        self._events.close()
        # Written anew: a purge hides steps of earlier files only, and TensorBoard takes files of one second in the order of their names.
        for path in self._tensorboard.iterdir():
            path.unlink()
        self._events = SummaryWriter(str(self._tensorboard))
        for record in records:
            values = {name: value for name, value in record.items() if name in METRICS and value is not None}
            self._show(int(record["step"] or 0), record["time"] or 0.0, values)

    def close(self) -> None:
        """Flush and close the event file; closing twice does nothing."""
        self._events.close()

    def _show(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Write TensorBoard events."""
        for name, value in values.items():
            self._events.add_scalar(name, value, step, walltime=time_s)
        self._events.flush()

    def _keep(self, records: list[Record]) -> None:
        """Replace the file by these records, in one move."""
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        os.replace(partial, self._path)
