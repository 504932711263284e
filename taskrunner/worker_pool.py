"""Floor 3: resizable threads behind a hand-off; the pool knows its free slots and its pace.

Owns the worker threads. What a worker does with a delivery is the executor's business; how many
deliveries may wait here is decided by `room`, which fetchers and the reclaimer ask before they take
anything from Redis.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Final

from taskrunner.clock import monotonic
from taskrunner.delivery import Delivery

_WINDOW: Final = 0.1
"""Seconds: what the pool gets through in this time may wait in the buffer (semantics §3,
Fetching)."""


class _Slot:
    """One worker thread's place; only that thread writes here, so counting needs no lock."""

    __slots__ = ("delivery", "ended", "number", "thread")

    def __init__(self, number: int) -> None:
        self.number = number
        self.delivery: Delivery | None = None
        self.ended = 0
        self.thread: threading.Thread | None = None


class _Queue:
    """A SimpleQueue that counts each entry until a thread has it in hand.

    From Python 3.13 on, SimpleQueue gives an entry to a waiting thread within `put`, and counts it
    no more though that thread may not run for a while: its worker would look free, and a fetcher
    would take one more.
    """

    __slots__ = ("_bell", "_entries")

    def __init__(self) -> None:
        self._entries: deque[Delivery | None] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()  # rings for each entry, at least once

    def qsize(self) -> int:
        return len(self._entries)

    def put(self, entry: Delivery | None) -> None:
        self._entries.append(entry)
        self._bell.put(None)

    def get(self) -> Delivery | None:
        while True:
            self._bell.get()
            try:
                return self._entries.popleft()
            except IndexError:  # it had rung once too often
                continue

    def get_nowait(self) -> Delivery | None:
        """Raises Empty where every entry has a thread that comes for it."""
        while True:
            self._bell.get_nowait()
            try:
                return self._entries.popleft()
            except IndexError:
                continue

    def ring_again(self) -> None:
        """A thread ended, perhaps between the bell and the entry that it rang for."""
        for _ in range(len(self._entries)):
            self._bell.put(None)


class WorkerPool:
    """Threads that run deliveries."""

    def __init__(self, execute: Callable[[Delivery], None], *, size: int, batch_size: int) -> None:
        self._execute = execute
        self.deaths = 0  # threads that ended though nobody let them
        self._target = size
        self._batch_size = batch_size
        self._queue = _Queue()
        self._first: deque[Delivery] = deque()  # what overtakes the queue
        self._marks = 0  # Nones in the queue: each has one thread look around, perhaps end
        self._slots: list[_Slot] = []
        self._ended_before = 0  # by threads that are gone
        self._samples: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()  # size and samples
        self._low_water = -1  # workers signal room when no more than this many wait; -1: unasked
        self._roomy = threading.Event()
        self._reading = 0  # asked for by fetchers, not here yet
        self._overdue = False
        self._served_old = True  # the side that got the last place
        self._served_at = 0.0
        self._room_lock = threading.Lock()
        self._running = False

    # --- life ---

    def start(self) -> None:
        """Start the threads."""
        self._running = True
        self.ensure()

    def ensure(self) -> None:
        """Have as many living threads as the size says: the watchdog's call as well as
        `resize`'s."""
        with self._lock:
            if not self._running:
                return
            for slot in [
                slot for slot in self._slots if slot.thread and not slot.thread.is_alive()
            ]:
                self._retire(slot)
            while len(self._slots) < self._target:
                taken = {slot.number for slot in self._slots}
                slot = _Slot(next(n for n in range(1, self._target + 1) if n not in taken))
                slot.thread = threading.Thread(
                    target=self._work,
                    args=(slot,),
                    name=f"taskrunner-worker-{slot.number}",
                    daemon=True,
                )
                self._slots.append(slot)
                slot.thread.start()

    def resize(self, size: int) -> None:
        """Grow by starting threads, shrink by letting idle ones end; a running task is never
        interrupted."""
        self._target = size
        self.ensure()
        with self._lock:
            self._let_end(len(self._slots) - size)

    def stop(self) -> None:
        """Let every thread end as soon as it has nothing to run."""
        with self._lock:
            self._running = False
            self._let_end(len(self._slots))

    def join(self, timeout: float) -> bool:
        """Wait until nothing runs and every thread is gone; whether that happened."""
        deadline = monotonic() + timeout
        for slot in list(self._slots):
            if slot.thread is not None and slot.thread is not threading.current_thread():
                slot.thread.join(max(0.0, deadline - monotonic()))
        return not self._slots

    # --- the hand-off ---

    def submit(self, deliveries: Iterable[Delivery]) -> None:
        """Hand deliveries to the workers."""
        put = self._queue.put
        for delivery in deliveries:
            put(delivery)

    def submit_first(self, delivery: Delivery) -> None:
        """Hand over a delivery that overtakes all that wait: an orphan on trial holds up those
        behind it."""
        self._first.append(delivery)
        with self._lock:
            self._marks += 1
        self._queue.put(None)  # for the case that nobody is busy

    def take_back(self, most: int) -> list[Delivery]:
        """Take up to `most` unstarted deliveries out again, the longest waiting first."""
        taken: list[Delivery] = []
        ends = 0
        while len(taken) < most:
            try:
                delivery = _pop(self._first) or self._queue.get_nowait()
            except Empty:
                break
            if delivery is not None:
                taken.append(delivery)
                continue
            with self._lock:  # a mark: behind the deliveries it does as well
                self._marks -= 1
                ends += 1
        with self._lock:
            self._let_end(ends)
        return taken

    def queued(self) -> list[Delivery]:
        """Everything that waits: taken out and put back in order, for a queue can't be looked
        into."""
        waiting = self.take_back(self._queue.qsize() + len(self._first))
        self.submit(waiting)
        return waiting

    # --- what it knows ---

    @property
    def size(self) -> int:
        """Present capacity."""
        return self._target

    @property
    def threads_alive(self) -> int:
        """How many worker threads live."""
        return sum(1 for slot in list(self._slots) if slot.thread and slot.thread.is_alive())

    @property
    def buffered(self) -> int:
        """How many wait for a worker."""
        return max(0, self._queue.qsize() - self._marks) + len(self._first)

    def running(self) -> list[Delivery]:
        """What is being executed."""
        return [delivery for slot in list(self._slots) if (delivery := slot.delivery) is not None]

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return self.buffered == 0 and all(slot.delivery is None for slot in list(self._slots))

    @property
    def free(self) -> int:
        """How many workers have nothing to do and nothing waiting for them."""
        return max(0, self._target - len(self.running()) - self.buffered)

    def room(self) -> int:
        """How many more deliveries may be taken from Redis now; 0 where it pays to wait for more
        room.

        At most two batches wait, and no more than the pool gets through in 100 ms at its pace, plus
        its free workers.
        """
        buffered = self.buffered
        free = self._without_task()
        limit = self._limit(free)
        room = limit - buffered
        if room >= self._batch_size / 2 or free > buffered:
            self._low_water = -1
            return max(0, room)
        self._ask_for_room(limit - self._batch_size // 2)
        return 0

    def _limit(self, free: int) -> int:
        """How many may wait, with so many workers free."""
        return min(2 * self._batch_size, self._pace() + free)

    def _without_task(self) -> int:
        return max(0, self._target - len(self.running()))

    def _ask_for_room(self, low_water: int) -> None:
        """Have workers say when no more than so many wait."""
        self._roomy.clear()
        self._low_water = max(0, low_water)

    def wait_for_room(self, timeout: float) -> None:
        """Wait until a worker says that there may be room."""
        self._roomy.wait(timeout)

    def wake(self) -> None:
        """End the wait for room."""
        self._roomy.set()

    def reading(self, change: int) -> None:
        """A fetcher has handed over what it reserved room for (negative)."""
        with self._room_lock:
            self._reading += change

    def reserve(self, most: int) -> int:
        """A fetcher's share of the room, at most so many, kept for it until it calls `reading`."""
        with self._room_lock:
            room = min(most, self.room_for_new())
            self._reading += room
        return room

    def room_for_new(self) -> int:
        """The fetchers' share: half of the room while overdue entries wait for the other half."""
        if self._overdue:
            limit = self._limit(self._without_task())
            share = self._share(max(0, limit - self.buffered - self._reading), old=False)
            if share == 0:
                self._ask_for_room(limit - 1)
            return share
        room = self.room()
        if room and room <= self._reading:  # the other fetchers' answers will fill it
            self._roomy.clear()
            return 0
        return room - self._reading if room else 0

    def room_for_old(self) -> int:
        """The reclaimer's share. Unlike a fetcher it asks for as little as one."""
        room = max(0, self._limit(self._without_task()) - self.buffered)
        return self._share(room, old=True) if self._overdue else room

    def _share(self, room: int, *, old: bool) -> int:
        """Half of the room; a room of one is for the side that was not served last, for 0.1 s."""
        if room == 0:
            return 0
        now = monotonic()
        if room == 1 and self._served_old == old and now - self._served_at < _WINDOW:
            return 0
        self._served_old, self._served_at = old, now
        return (room + old) // 2 or 1

    def overdue(self, waiting: bool) -> None:
        """Whether entries that could be claimed now wait for room."""
        self._overdue = waiting

    def _pace(self) -> int:
        """How many tasks ended in the last 100 ms."""
        now = monotonic()
        with self._lock:
            ended = self._ended_before + sum(slot.ended for slot in self._slots)
            samples = self._samples
            if not samples or now - samples[-1][0] >= _WINDOW / 10:
                samples.append((now, ended))
            while len(samples) > 1 and now - samples[1][0] >= _WINDOW:
                samples.popleft()
            then, before = samples[0]
        elapsed = now - then
        return int((ended - before) * _WINDOW / elapsed) if elapsed > _WINDOW else ended - before

    # --- the threads ---

    def _work(self, slot: _Slot) -> None:
        get, execute, first = self._queue.get, self._execute, self._first
        died = True
        try:
            while True:
                delivery = _pop(first) if first else get()
                if delivery is None:
                    if self._takes_mark(slot):
                        died = False
                        return
                    continue
                slot.delivery = delivery
                execute(delivery)
                slot.delivery = delivery = None
                slot.ended += 1
                if self._low_water >= self._queue.qsize():
                    self._low_water = -1
                    self._roomy.set()
        finally:
            slot.delivery = None
            self.deaths += died
            if died:
                self._queue.ring_again()
            with self._lock:
                self._retire(slot)

    def _let_end(self, threads: int) -> None:
        """Put marks in the queue: an idle thread that takes one ends, if it is one too many
        then."""
        for _ in range(threads):
            self._marks += 1
            self._queue.put(None)

    def _takes_mark(self, slot: _Slot) -> bool:
        """Whether this thread ends; retired at once, so that the count is right for the next."""
        with self._lock:
            self._marks = max(0, self._marks - 1)
            if self._running and len(self._slots) <= self._target:
                return False
            if self._first:  # first that one; the mark is for later
                self._let_end(1)
                return False
            self._retire(slot)
            return True

    def _retire(self, slot: _Slot) -> None:
        if slot in self._slots:
            self._slots.remove(slot)
            self._ended_before += slot.ended


def _pop(first: deque[Delivery]) -> Delivery | None:
    try:
        return first.popleft()
    except IndexError:  # another was quicker
        return None
