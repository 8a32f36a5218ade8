import pytest

from rollout.slots import SlotTable


def test_a_session_keeps_its_slot_and_is_new_once():
    table = SlotTable(2)
    slot = table.take("a")
    assert slot is not None
    assert (slot.index, slot.is_new, slot.is_busy) == (0, True, True)
    table.put_back(slot)
    assert table.take("a") is slot
    assert (slot.is_new, slot.is_busy) == (False, True)


def test_a_busy_session_or_a_full_table_gives_nothing():
    table = SlotTable(1)
    table.take("a")
    assert table.take("a") is None
    assert table.take("b") is None


def test_the_session_idle_for_longest_is_evicted():
    table = SlotTable(2)
    for session in ("a", "b", "a"):
        table.put_back(table.take(session))
    assert table.take("c").index == 1
    assert table.take("a").is_new is False


def test_an_ended_session_frees_its_slot_at_once_when_idle():
    table = SlotTable(1)
    table.put_back(table.take("a"))
    table.end("a")
    assert table.take("b").index == 0


def test_a_session_ended_while_busy_frees_its_slot_when_put_back():
    table = SlotTable(2)
    slot = table.take("a")
    table.end("a")
    assert table.take("b").index == 1
    assert table.take("c") is None
    table.put_back(slot)
    again = table.take("a")
    assert (again.index, again.is_new) == (0, True)


def test_unknown_sessions_end_without_a_word():
    SlotTable(1).end("nobody")


def test_outdating_marks_every_slot():
    table = SlotTable(2)
    for slot in table:
        slot.is_current = True
    table.outdate()
    assert [slot.is_current for slot in table] == [False, False]


def test_a_table_without_slots_is_refused():
    with pytest.raises(ValueError, match="must have at least one slot, got 0"):
        SlotTable(0)
