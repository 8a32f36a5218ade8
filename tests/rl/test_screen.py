import io
import math
import threading
from pathlib import Path

from rich.console import Console

from configs.load import load_config
from rl.metrics import check_metrics
from rl.screen import LOSSES, QUANTITIES, STEP_SECONDS, Screen, duration, trend

RUN_PATH = Path("runs/quickstart-20260102-030405")
METRICS = {
    "rollout/success/mean": 0.571,
    "rollout/compliance/mean": 0.9,
    "rollout/reward/mean": 1.021,
    "rollout/response_tokens/mean": 143.2,
    "rollout/tokens_per_s/mean": 1834.0,
    "rollout/staleness_versions/mean": 0.6,
    "time/step_s/sum": 8.0,
}


def make_screen(*, is_terminal: bool, encoding: str = "utf-8") -> tuple[Screen, Console]:
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(record=True, force_terminal=is_terminal, width=100, file=output, _environ={"TERM": "xterm"})
    return Screen(load_config("quickstart", ["learner.num_steps=30"]), RUN_PATH, console, clock=lambda: 0.0), console


def last_panel(console: Console) -> str:
    return "╭─" + console.export_text().split("╭─")[-1]


def test_all_metrics_that_are_shown_exist():
    check_metrics(dict.fromkeys([*(name for _, name, _ in QUANTITIES), *(name for _, name in LOSSES), STEP_SECONDS], 0.0))


def test_a_terminal_sees_stage_step_quantities_and_the_last_evaluation():
    screen, console = make_screen(is_terminal=True)
    with screen:
        screen.evaluated(0, {"eval/success/mean": 0.525, "eval/compliance/mean": 0.61})
        screen.step(11, METRICS | {"rollout/success/mean": 0.4})
        screen.step(12, METRICS | {"rollout/dropped_stale/count": 8})
        screen.note("worker 1 was lost and replaced")
    panel = last_panel(console)

    for text in (
        "cairn quickstart, async",
        str(RUN_PATH),
        "done",
        "step 12/30",
        "2:24 left",
        "57.1%  ▁█",
        "90.0%",
        "1.021",
        "143",
        "1,834",
        "0.60",
        "too old 8",
        "held-out step 0: success 52.5%, compliance 61.0%",
        "! worker 1 was lost and replaced",
    ):
        assert text in panel


def test_a_run_that_ends_with_an_error_says_stopped():
    screen, console = make_screen(is_terminal=True)
    try:
        with screen:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass

    assert "stopped" in last_panel(console)


def test_before_the_first_step_nothing_is_made_up():
    screen, console = make_screen(is_terminal=True)
    with screen:
        screen.stage("evaluate")
        screen.evaluation(0, 17, 200)
        console.print(screen.render())
    text = console.export_text()

    assert "evaluate  17/200 held-out episodes" in text
    assert "step 0/30" in text
    assert "time left unknown" in text


def test_a_pipe_sees_one_plain_line_a_step():
    screen, console = make_screen(is_terminal=False)
    with screen:
        screen.stage("generate")
        screen.evaluation(0, 1, 2)
        screen.evaluation(0, 2, 2)
        screen.evaluated(0, {"eval/success/mean": 0.5, "eval/compliance/mean": math.nan})
        screen.step(1, METRICS | {"rollout/failed/count": 2})
        screen.step(2, {"rollout/success/mean": math.nan})
        screen.note("[red] is no markup")

    assert console.export_text().splitlines() == [
        f"quickstart: 30 steps, mode async, run folder {RUN_PATH}",
        "evaluation of step 0: 2 episodes done",
        "held-out, step 0: success 50.0%, compliance -",
        "step 1/30  success 57.1%  compliance 90.0%  reward 1.021  response tokens 143  tokens/s 1,834  staleness 0.60"
        "  failed 2  left 3:52",
        "step 2/30  success -  compliance -  reward -  response tokens -  tokens/s -  staleness -  failed 2  left 3:44",
        "note: [red] is no markup",
    ]


def test_a_terminal_without_unicode_gets_plain_blocks():
    screen, console = make_screen(is_terminal=True, encoding="ascii")
    with screen:
        screen.step(1, METRICS)
        screen.step(2, METRICS | {"rollout/success/mean": 0.9})
    text = console.export_text()

    assert "90.0%  _@" in text
    assert text.isascii()


def test_threads_may_call_at_once():
    screen, console = make_screen(is_terminal=False)
    with screen:
        threads = [threading.Thread(target=screen.step, args=(step, METRICS | {"rollout/failed/count": 1})) for step in range(1, 17)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    lines = console.export_text().splitlines()[1:]
    assert [line.split("failed ")[1].split()[0] for line in lines] == [str(count) for count in range(1, 17)]


def test_a_trend_spans_its_values():
    assert trend([0.0, 0.5, 1.0]) == "▁▅█"
    assert trend([0.3, 0.3]) == "▁▁"
    assert trend([]) == ""


def test_durations_read_as_clocks():
    assert [duration(seconds) for seconds in (0, 125, 3725, -3)] == ["0:00", "2:05", "1:02:05", "0:00"]
