import pytest

from rollout.tasks import TaskQueue
from rollout.trajectory import Task


def queue(num_tasks: int = 8) -> TaskQueue:
    return TaskQueue("cairn/Ledger-v0", range(100, 100 + num_tasks), run_seed=3)


def test_each_seed_comes_once_an_epoch():
    tasks = queue()
    first, second = [tasks.take().seed for _ in range(8)], [tasks.take().seed for _ in range(8)]
    assert sorted(first) == sorted(second) == list(range(100, 108))
    assert first != second


def test_the_order_depends_on_the_run_seed_only():
    first, second = queue(), queue()
    other = TaskQueue("cairn/Ledger-v0", range(100, 108), run_seed=4)
    order = [first.take().seed for _ in range(8)]
    assert order == [second.take().seed for _ in range(8)]
    assert order != [other.take().seed for _ in range(8)]


def test_a_task_put_back_comes_next_and_keeps_its_index():
    tasks = queue()
    first, _ = tasks.take(), tasks.take()
    tasks.put_back(first)
    assert tasks.take() == first


def test_a_restart_neither_loses_nor_repeats_a_task():
    # Tasks 0..7, two learned from a step, four in flight at once, checkpoint after step 1, killed, restarted.
    tasks = queue()
    in_flight = [tasks.take() for _ in range(4)]
    trained = in_flight[:2]
    for task in trained:
        tasks.finish(task)
    state = tasks.state_dict()
    in_flight += [tasks.take(), tasks.take()]  # the killed process went on after the checkpoint

    restored = queue()
    restored.load_state_dict(state)
    while len(trained) < 8:
        task = restored.take()
        restored.finish(task)
        trained.append(task)
    assert sorted(task.seed for task in trained) == list(range(100, 108))


def test_an_epoch_that_ends_at_the_checkpoint_does_not_start_again():
    tasks = queue()
    for _ in range(8):
        tasks.finish(tasks.take())
    restored = queue()
    restored.load_state_dict(tasks.state_dict())
    assert restored.take() == tasks.take()
    assert restored.take().index == 9


def test_restoring_twice_gives_the_same_order():
    tasks = queue()
    taken = [tasks.take() for _ in range(5)]
    tasks.put_back(taken[3])
    once, twice = queue(), queue()
    once.load_state_dict(tasks.state_dict())
    twice.load_state_dict(once.state_dict())
    assert [once.take() for _ in range(9)] == [twice.take() for _ in range(9)]


@pytest.mark.parametrize("method", ["finish", "put_back"])
def test_only_a_task_that_was_taken_can_be_finished_or_put_back(method):
    with pytest.raises(ValueError, match="only a task that was taken"):
        getattr(queue(), method)(Task("cairn/Ledger-v0", 100, 0))
    tasks = queue()
    task = tasks.take()
    tasks.put_back(task)
    with pytest.raises(ValueError, match="only a task that was taken"):
        getattr(tasks, method)(task)


def test_an_empty_range_of_seeds_is_refused():
    with pytest.raises(ValueError, match="at least one seed"):
        queue(0)
