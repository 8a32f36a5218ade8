import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from configs.load import load_config
from rl.evaluate import Evaluation
from rl.summary import RunSummary, VerdictKind, build_summary, judge, summary_json, summary_markdown, summary_table

RISING = [step / 30 for step in range(1, 31)]


def evaluation(step: int, num_successes: int, num_compliant: int | None = None, n: int = 100, num_failed: int = 0) -> Evaluation:
    def outcomes(count: int) -> tuple[bool | None, ...]:
        return (True,) * count + (False,) * (n - count) + (None,) * num_failed

    return Evaluation(step, outcomes(num_successes), outcomes(n if num_compliant is None else num_compliant), 50.0, 5.0, 4.0)


def summary_of(before: Evaluation, after: Evaluation) -> RunSummary:
    records = [
        {
            "step": step,
            "time": 0.0,
            "rollout/success/mean": 0.5,
            "rollout/trajectories/count": 16.0,
            "rollout/failed/count": 1.0,
            "rollout/dropped_stale/count": None,
            "rollout/tokens/sum": 1000.0,
            "time/step_s/sum": 60.0,
        }
        for step in (1, 2)
    ]
    return build_summary(load_config("smoke"), Path("runs/my run"), [before, after], [*records, {"step": 2, "time": 0.0}])


@pytest.mark.parametrize(
    ("before", "after", "curve", "kind", "words"),
    [
        (50, 80, [0.5, 0.6, 0.7], VerdictKind.IMPROVEMENT, "held-out success rose by +30.0 ["),
        (50, 80, RISING, VerdictKind.IMPROVEMENT, "training success was still rising"),
        (50, 50, [0.5] * 30, VerdictKind.PLATEAU, "changed by +0.0 ["),
        (50, 52, [0.5] * 30, VerdictKind.PLATEAU, "which may be chance"),
        (98, 99, [0.98] * 30, VerdictKind.PLATEAU, "near the top from the start"),
        (80, 50, [0.8] * 30, VerdictKind.COLLAPSE, "held-out success fell (-30.0 ["),
        (10, 40, [0.1] * 5 + [0.9] * 15 + [0.3] * 10, VerdictKind.COLLAPSE, "peaked at 90% and ended at 30%"),
        (10, 40, [0.9, 0.0, 0.9, 0.0], VerdictKind.IMPROVEMENT, "rose"),
        (0, 0, [0.05] * 15 + [0.0] * 15, VerdictKind.PLATEAU, "may be chance"),
        (50, 80, [], VerdictKind.IMPROVEMENT, "rose"),
    ],
)
def test_the_verdict_follows_its_rule(before, after, curve, kind, words):
    verdict = judge(evaluation(0, before), evaluation(30, after), curve)

    assert verdict.kind is kind
    assert words in verdict.text


def test_without_a_graded_task_there_is_no_verdict():
    nothing = Evaluation(0, (None, None), (None, None), 0.0, 0.0, 1.0)

    assert judge(nothing, nothing, RISING).kind is VerdictKind.UNKNOWN


def test_compliance_that_fell_is_said_whatever_the_verdict():
    verdict = judge(evaluation(0, 50, 90), evaluation(30, 80, 40), [])

    assert verdict.kind is VerdictKind.IMPROVEMENT
    assert "Compliance fell (-50.0 [" in verdict.text


def test_the_counts_of_a_run_are_added_up():
    summary = summary_of(evaluation(0, 50), evaluation(2, 80))

    assert (summary.num_steps, summary.wall_s, summary.num_sampled_tokens) == (2, 128.0, 2000)
    assert (summary.num_trained, summary.num_failed, summary.num_stale) == (32, 2, 0)


def test_a_summary_needs_an_evaluation():
    with pytest.raises(ValueError, match="got none in runs/x"):
        build_summary(load_config("smoke"), Path("runs/x"), [], [])


def test_the_next_command_can_be_pasted():
    assert summary_of(evaluation(0, 5), evaluation(2, 8)).next_command == "cairn eval 'runs/my run' --env cairn/Ledger-v0 --episodes 500"


def test_the_table_shows_before_after_and_difference_with_intervals():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(summary_table(summary_of(evaluation(0, 50), evaluation(2, 80))))
    text = console.export_text()

    for words in ("before (step 0)", "after (step 2)", "50.0% [40.4, 59.6]", "80.0% [71.1, 86.7]", "+30.0 [+20", "improvement: held-out"):
        assert words in text
    assert "failed episodes" not in text


def test_the_markdown_holds_table_picture_cost_and_next_command():
    text = summary_markdown(summary_of(evaluation(0, 50, num_failed=1), evaluation(2, 80, num_failed=1)))

    for words in (
        "# smoke\n\n**Improvement**: held-out success rose",
        "| success | 50.0% [40.4, 59.6] | 80.0% [71.1, 86.7] | +30.0 [",
        "| failed episodes | 1 | 1 |  |",
        "![Learning curve](learning_curve.png)",
        "| wall clock | 2 min 08 s |",
        "| trajectories learned from | 32 |",
        "--episodes 500",
    ):
        assert words in text


def test_a_run_without_any_graded_episode_still_has_a_summary():
    nothing = Evaluation(0, (None,), (None,), 0.0, 0.0, 1.0)
    summary = summary_of(nothing, nothing)

    assert "| success | nothing graded | nothing graded | unknown |" in summary_markdown(summary)
    assert json.loads(json.dumps(summary_json(summary), allow_nan=False))["before"]["success"] == {"count": 0, "interval_95": None}


def test_the_json_carries_counts_and_intervals():
    numbers = summary_json(summary_of(evaluation(0, 50), evaluation(2, 80)))

    assert numbers["verdict"]["kind"] == "improvement"
    assert numbers["after"]["success"] == {"count": 80, "interval_95": pytest.approx((0.7112, 0.8666), abs=1e-4)}
