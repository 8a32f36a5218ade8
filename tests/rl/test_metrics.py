import json
import math
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl.metrics import METRICS, MetricsWriter, check_metrics, read_metrics

SUCCESS = "rollout/success/mean"


def write_steps(folder: Path, *steps: int) -> MetricsWriter:
    writer = MetricsWriter(folder, clock=lambda: 1760000000.0)
    for step in steps:
        writer.write(step, {SUCCESS: step / 10})
    return writer


def test_every_name_has_a_stage_a_quantity_and_a_reduction():
    for name, description in METRICS.items():
        assert re.fullmatch(r"(rollout|loss|correction|advantage|learner|time|eval)/[a-z0-9_]+/(mean|max|count|sum|last|p99)", name)
        assert description


def test_an_unknown_name_is_refused_with_the_nearest_one(tmp_path):
    with pytest.raises(KeyError, match="got rollout/succes/mean: did you mean rollout/success/mean"):
        check_metrics({"rollout/succes/mean": 1.0})
    with pytest.raises(KeyError, match="got zzz: add it to the table"):
        write_steps(tmp_path).write(1, {"zzz": 1.0})


def test_a_record_is_on_disk_when_write_returns(tmp_path):
    write_steps(tmp_path, 1)

    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "time": 1760000000.0, "rollout/success/mean": 0.1}\n'


def test_numbers_that_are_not_finite_become_null(tmp_path):
    writer = write_steps(tmp_path)
    writer.write(1, {SUCCESS: math.nan, "loss/ratio/mean": math.inf, "loss/policy/mean": -0.5})
    writer.close()

    (record,) = read_metrics(tmp_path / "metrics.jsonl")

    assert record == {"step": 1, "time": 1760000000.0, SUCCESS: None, "loss/ratio/mean": None, "loss/policy/mean": -0.5}


def test_no_file_is_no_records(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_run_that_goes_on_shows_no_step_twice(tmp_path):
    write_steps(tmp_path, 1, 2, 3, 4)

    writer = write_steps(tmp_path)
    writer.truncate_after(2)
    writer.write(3, {SUCCESS: 0.9})
    writer.close()

    assert [(record["step"], record[SUCCESS]) for record in read_metrics(tmp_path / "metrics.jsonl")] == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert not (tmp_path / "metrics.partial").exists()


@pytest.mark.parametrize("num_resumes", [0, 12])
def test_tensorboard_shows_the_run_that_went_on(tmp_path, num_resumes):
    write_steps(tmp_path, 1, 2, 3, 4).close()
    for _ in range(num_resumes):
        writer = write_steps(tmp_path)
        writer.truncate_after(4)
        writer.close()

    writer = write_steps(tmp_path)
    writer.truncate_after(2)
    writer.write(3, {SUCCESS: 0.9})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()

    assert [(event.step, event.value) for event in events.Scalars(SUCCESS)] == [
        (1, pytest.approx(0.1)),
        (2, pytest.approx(0.2)),
        (3, pytest.approx(0.9)),
    ]


def test_the_half_line_of_a_killed_run_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 0}\n{"step": 2, "ti')

    assert [record["step"] for record in read_metrics(path)] == [1]

    write_steps(tmp_path, 2)

    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_line_that_is_no_record_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n[]\n')

    with pytest.raises(ValueError, match=r"metrics.jsonl must be a JSON object with a step, line 2 is not"):
        read_metrics(path)
