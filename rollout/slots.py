"""Which conversation has which slot of the engine's cache."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(eq=False)
class Slot:
    """One place in the cache.

    is_busy: a request is being computed in it. is_new: its session has it for the first time.
    is_current: all that it holds was computed with the weights in use.
    Example: `Slot(3, "task-17/member-2", is_busy=True, is_new=True, is_current=True)`.
    """

    index: int
    session: str | None = None
    is_busy: bool = False
    is_new: bool = False
    is_current: bool = False


class SlotTable:
    """Slots of sessions; a session keeps its slot until it ends or another session takes it while it is idle."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"an engine must have at least one slot, got {num_slots}")
        self._slots = [Slot(index) for index in range(num_slots)]
        self._by_session: dict[str, Slot] = {}
        """In the order of last use."""

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def take(self, session: str) -> Slot | None:
        """Return a slot for the session, busy from now on: its own, the lowest free one, or that of the session idle for longest.

        None when the session's own slot, or every slot, is busy.
        """
        slot = self._by_session.get(session)
        if slot is None:
            slot = self._free() or self._evict()
            if slot is None:
                return None
            slot.session, slot.is_new = session, True
        elif slot.is_busy:
            return None
        else:
            slot.is_new = False
        slot.is_busy = True
        self._touch(slot)
        return slot

    def put_back(self, slot: Slot) -> None:
        """Mark a slot as idle; its session keeps it unless it ended meanwhile."""
        slot.is_busy = False
        self._touch(slot)

    def end(self, session: str) -> None:
        """Free the session's slot, at once or when it is put back; unknown sessions are ignored."""
        slot = self._by_session.pop(session, None)
        if slot is not None:
            slot.session = None

    def outdate(self) -> None:
        """Mark what all slots hold as computed with weights that are no longer in use."""
        for slot in self._slots:
            slot.is_current = False

    def _touch(self, slot: Slot) -> None:
        if slot.session is not None:
            self._by_session.pop(slot.session, None)
            self._by_session[slot.session] = slot

    def _free(self) -> Slot | None:
        """Return the lowest free slot: busy slots that lie together are read without a copy."""
        return next((slot for slot in self._slots if slot.session is None and not slot.is_busy), None)

    def _evict(self) -> Slot | None:
        slot = next((slot for slot in self._by_session.values() if not slot.is_busy), None)
        if slot is not None and slot.session is not None:
            self.end(slot.session)
        return slot
