"""The live screen of a training run; where nobody watches (a pipe, a log file), one plain line a step.

The driver calls it; a refresh thread of rich only reads. It computes nothing but the time left.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from configs.schema import RunConfig

REFRESHES_PER_S = 4
PANEL_WIDTH = 92
TREND_WIDTH = 24
STEP_SECONDS = "time/step_s/sum"
TIMED_STEPS = 10
"""The time left is that of the last ten steps, times those to come."""
SHOWN_NOTES = 3
SHOWN_EVALUATIONS = 3
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#@"
NOTHING = "-"

Formatter = Callable[[float], str]


def percent(value: float) -> str:
    """`percent(0.571)` is `57.1%`."""
    return f"{value:.1%}"


QUANTITIES: tuple[tuple[str, str, Formatter], ...] = (
    ("success", "rollout/success/mean", percent),
    ("compliance", "rollout/compliance/mean", percent),
    ("reward", "rollout/reward/mean", "{:.3f}".format),
    ("response tokens", "rollout/response_tokens/mean", "{:.0f}".format),
    ("tokens/s", "rollout/tokens_per_s/mean", "{:,.0f}".format),
    ("staleness", "rollout/staleness_versions/mean", "{:.2f}".format),
)
"""What is shown of a step: label, metric, and how its value is written."""
TRENDS = ("success", "compliance", "reward")
LOSSES = (("failed", "rollout/failed/count"), ("too old", "rollout/dropped_stale/count"))
"""Counts that add up over the run; shown once they are not zero."""


def trend(values: list[float], blocks: str = BLOCKS) -> str:
    """Return a line of blocks, one per value, from the lowest value to the highest; a flat line where all are equal.

    `trend([0.0, 0.5, 1.0])` is `▁▅█`.
    """
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] for value in values)


def duration(seconds: float) -> str:
    """`duration(125)` is `2:05`, `duration(3725)` is `1:02:05`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Screen:
    """Shows a run while it goes on; a context manager, and safe to call from any thread."""

    def __init__(
        self, config: RunConfig, run_path: Path, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """console: where to show; a live panel on a terminal, plain lines otherwise. clock: seconds, never going back."""
        self._config, self._run_path, self._clock = config, run_path, clock
        self._console = console or Console()
        self._lock = threading.RLock()
        self._started = clock()
        self._stage, self._step, self._progress = "start", 0, ""
        self._values: dict[str, float] = {}
        self._history: dict[str, deque[float]] = {label: deque(maxlen=TREND_WIDTH) for label in TRENDS}
        self._lost = dict.fromkeys((label for label, _ in LOSSES), 0)
        self._step_seconds: deque[float] = deque(maxlen=TIMED_STEPS)
        self._evaluations: deque[str] = deque(maxlen=SHOWN_EVALUATIONS)
        self._notes: deque[str] = deque(maxlen=SHOWN_NOTES)
        self._spinner = Spinner("dots" if self._has_unicode else "line", style="cyan")
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, get_renderable=self.render, refresh_per_second=REFRESHES_PER_S)
            self._live.start()
        else:
            self._print(
                f"{self._config.name}: {self._config.learner.num_steps} steps, mode {self._config.mode}, run folder {self._run_path}"
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._live is not None:
            with self._lock:
                self._stage = "done" if kind is None else "stopped"
            self._live.stop()
            self._live = None

    def stage(self, text: str) -> None:
        """Say what the driver does now: `generate`, `learn`, `evaluate`."""
        with self._lock:
            self._stage, self._progress = text, ""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a finished step; what is missing or not a number shows as a dash."""
        with self._lock:
            self._step = step
            if STEP_SECONDS in metrics:
                self._step_seconds.append(metrics[STEP_SECONDS])
            shown = ((label, metrics.get(name)) for label, name, _ in QUANTITIES)
            self._values = {label: value for label, value in shown if value is not None and math.isfinite(value)}
            for label, history in self._history.items():
                if label in self._values:
                    history.append(self._values[label])
            for label, name in LOSSES:
                self._lost[label] += round(metrics.get(name, 0))
            if self._live is None:
                self._print(self._plain_line())

    def evaluation(self, step: int, done: int, total: int) -> None:
        """Show how far the held-out evaluation of `step` is."""
        with self._lock:
            self._progress = f"{done}/{total} held-out episodes"
            if self._live is None and done == total:
                self._print(f"evaluation of step {step}: {total} episodes done")

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the result of a held-out evaluation, from its `eval/` metrics."""
        shares = {name: metrics.get(f"eval/{name}/mean", math.nan) for name in ("success", "compliance")}
        text = ", ".join(f"{name} {percent(share) if math.isfinite(share) else NOTHING}" for name, share in shares.items())
        with self._lock:
            self._evaluations.append(f"step {step}: {text}")
            if self._live is None:
                self._print(f"held-out, step {step}: {text}")

    def note(self, text: str) -> None:
        """Show a sentence, such as a warning; the last three stay."""
        with self._lock:
            self._notes.append(text)
            if self._live is None:
                self._print(f"note: {text}")

    def render(self) -> RenderableType:
        """Return the panel as it stands now."""
        with self._lock:
            rows: list[RenderableType] = [self._stage_row(), self._bar_row(), Text(), self._quantity_rows()]
            if any(self._lost.values()):
                rows.append(Text("  ".join(f"{label} {count:,}" for label, count in self._lost.items() if count), style="yellow"))
            if self._evaluations:
                rows.append(Text())
                rows += [Text.assemble(("held-out ", "bold"), line) for line in self._evaluations]
            rows += [Text(f"! {note}", style="yellow") for note in self._notes]
            return Panel(
                Group(*rows),
                title=Text.assemble(("cairn ", "bold cyan"), (self._config.name, "bold"), f", {self._config.mode}"),
                subtitle=Text(str(self._run_path), style="dim"),
                title_align="left",
                subtitle_align="left",
                border_style="cyan",
                padding=(1, 2),
                width=min(PANEL_WIDTH, self._console.width),
            )

    @property
    def _has_unicode(self) -> bool:
        return self._console.encoding.lower().startswith("utf")

    def _seconds_left(self) -> float | None:
        """Return the estimate, or None before the first step."""
        if not self._step_seconds:
            return None
        return sum(self._step_seconds) / len(self._step_seconds) * (self._config.learner.num_steps - self._step)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _plain_line(self) -> str:
        left = self._seconds_left()
        parts = [f"step {self._step}/{self._config.learner.num_steps}"]
        parts += [f"{label} {self._shown(label, form)}" for label, _, form in QUANTITIES]
        parts += [f"{label} {count}" for label, count in self._lost.items() if count]
        return "  ".join([*parts, f"left {duration(left) if left is not None else NOTHING}"])

    def _shown(self, label: str, form: Formatter) -> str:
        return form(self._values[label]) if label in self._values else NOTHING

    def _stage_row(self) -> RenderableType:
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        is_over = self._stage in ("done", "stopped")
        mark = Text("*", style="green" if self._stage == "done" else "red") if is_over else self._spinner
        stage = Text.assemble((self._stage, "bold"), f"  {self._progress}" if self._progress else "")
        grid.add_row(mark, stage, Text(f"{duration(self._clock() - self._started)} elapsed", style="dim"))
        return grid

    def _bar_row(self) -> RenderableType:
        total, left = self._config.learner.num_steps, self._seconds_left()
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=total, completed=self._step, complete_style="cyan", finished_style="green")
        grid.add_row(f"step {self._step}/{total}", bar, f"{duration(left)} left" if left is not None else "time left unknown")
        return grid

    def _quantity_rows(self) -> RenderableType:
        """Return two columns of quantities; those on the left with their trend."""
        grid = Table.grid(padding=(0, 2))
        for justify in ("left", "right", "left", "left", "right"):
            grid.add_column(justify=justify, no_wrap=True)
        blocks = BLOCKS if self._has_unicode else ASCII_BLOCKS
        with_trend = [quantity for quantity in QUANTITIES if quantity[0] in TRENDS]
        without = [quantity for quantity in QUANTITIES if quantity[0] not in TRENDS]
        for (label, _, form), (other, _, other_form) in zip(with_trend, without, strict=True):
            line = Text(trend(list(self._history[label]), blocks).ljust(TREND_WIDTH), style="cyan")
            grid.add_row(
                Text(label, style="dim"),
                Text(self._shown(label, form), style="bold"),
                line,
                Text(other, style="dim"),
                Text(self._shown(other, other_form), style="bold"),
            )
        return grid
