"""Floor 5: the parts of a running instance: which there are, who knows whom, in which order they
start and stop.

Stopping has three stages: *quiet*, no new work enters; *drain*, running tasks end while heartbeats
go on and the unstarted goes back; *leave*, what is settled is sent, lease and presence are given
up.
"""

import copy
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from taskrunner import keys
from taskrunner.clock import ServerClock, monotonic
from taskrunner.config import TaskRunnerConfig
from taskrunner.delivery import Delivery
from taskrunner.executor import Executor
from taskrunner.in_flight import ByteBudget, InFlight
from taskrunner.observer import Observers
from taskrunner.reports import Health, Reports
from taskrunner.service import Service
from taskrunner.services.delayed_poller import DelayedPoller
from taskrunner.services.delivery_heartbeat import DeliveryHeartbeat
from taskrunner.services.elector import Elector
from taskrunner.services.fetcher import Fetcher
from taskrunner.services.instance_heartbeat import InstanceHeartbeat
from taskrunner.services.janitor import Janitor
from taskrunner.services.listener import Listener
from taskrunner.services.metrics_writer import MetricsWriter
from taskrunner.services.once import Once
from taskrunner.services.reclaimer import Reclaimer
from taskrunner.services.reporter import Reporter
from taskrunner.services.time_limits import TimeLimits
from taskrunner.services.tuner import Tuner
from taskrunner.services.watchdog import Watchdog
from taskrunner.settler import Park, Settler, hand_back
from taskrunner.stats import Load, Stats
from taskrunner.store import connection
from taskrunner.store.delayed_set import DelayedSet
from taskrunner.store.instances import Instances, OwnedKey
from taskrunner.store.metrics import Metrics
from taskrunner.store.stream import RedisStreamQueue
from taskrunner.task import Registry
from taskrunner.timings import ClaimDelays, Timings
from taskrunner.worker_pool import WorkerPool

_LEAVE: Final = 1.0
"""Seconds beyond the timeout for the last words to Redis; it may be away."""

_CUT_OFF: Final = 3.0
"""Seconds until a task cut off at the end of shutdown_timeout is due elsewhere."""

log = logging.getLogger("taskrunner.runner")


class Parts:
    """Everything one start makes; thrown away by the stop."""

    def __init__(
        self,
        *,
        config: TaskRunnerConfig,
        queue: RedisStreamQueue,
        registry: Registry,
        delayed: DelayedSet,
        reports: Reports,
        observers: Observers,
        instance_id: str,
        metrics: Metrics,
        stats: Callable[[], Stats],
        give_up: Callable[[Exception], None],
        left: Callable[["Parts"], None],
    ) -> None:
        group = config.consumer_group
        timings = config.timings
        self._left = left
        self._wanted_host = config.host
        self._connections = connections = queue.connections
        self.health = health = Health(reports, connection.lost, connection.outage)
        self.deliveries = deliveries = queue.for_group(group)
        self.stop_asked = threading.Event()
        self.in_flight = in_flight = InFlight()
        self.timings = Timings()
        self.clock = ServerClock()
        self.claim_delays = ClaimDelays(self.clock)
        instances = Instances(connections, deliveries)
        self.instance = InstanceHeartbeat(
            health,
            instances=instances,
            deliveries=deliveries,
            clock=self.clock,
            wanted_host=config.host,
            instance_id=instance_id,
            readers=config.num_fetchers + 1,
            ttl=timings.presence,
            give_up=give_up,
        )
        self.settler = settler = Settler(
            health,
            in_flight=in_flight,
            deliveries=deliveries,
            reports=reports,
            busy=lambda: not self.pool.idle,
            host=lambda: self.host,
            parked=lambda entry_id, due: self.reclaimer.schedule(entry_id, due),
            settled_alone=lambda: self.reclaimer.settled_alone(),
            most_waiting=2 * config.batch_size,
            dead_letter_limit=config.dead_letter_limit,
        )
        self.limits = TimeLimits(health)
        executor = Executor(
            registry=registry,
            config=config,
            group=group,
            reclaim_delay=queue.reclaim_delay,
            in_flight=in_flight,
            settler=settler,
            deliveries=deliveries,
            limits=self.limits,
            timings=self.timings,
            reports=reports,
            health=health,
            confirm=lambda: self.heartbeat.wake(),
            renew_early=lambda: self.heartbeat.wake(),
            stopping=self.stop_asked.is_set,
            observers=observers,
        )
        size = config.min_workers if config.tuning else config.num_workers
        assert size is not None
        self.pool = WorkerPool(executor, size=size, batch_size=config.batch_size)
        self.heartbeat = DeliveryHeartbeat(
            health,
            deliveries=deliveries,
            instance=self.instance,
            in_flight=in_flight,
            pool=self.pool,
            settler=settler,
            reports=reports,
            reclaim_delay=queue.reclaim_delay,
            hand_back_after=timings.hand_back_after,
        )
        budget = ByteBudget(in_flight, config.max_payload_bytes)
        self.fetchers = [
            Fetcher(
                health,
                number=number,
                deliveries=deliveries,
                instance=self.instance,
                in_flight=in_flight,
                pool=self.pool,
                settler=settler,
                budget=budget,
                claim_delays=self.claim_delays,
                batch_size=config.batch_size,
                block=config.block_duration,
            )
            for number in range(1, config.num_fetchers + 1)
        ]
        self.reclaimer = Reclaimer(
            health,
            number=config.num_fetchers + 1,
            deliveries=deliveries,
            instance=self.instance,
            instances=instances,
            in_flight=in_flight,
            pool=self.pool,
            settler=settler,
            heartbeat=self.heartbeat,
            fetchers=self.fetchers,
            budget=budget,
            reclaim_delay=queue.reclaim_delay,
            observers=observers,
        )
        self.elector = Elector(
            health,
            lease=OwnedKey(connections, keys.leader(group), instance_id),
            ttl=timings.lease,
            poll=timings.poll,
            channel=keys.channel(group),
            won=lambda: self.poller.wake(),
        )
        self.poller = DelayedPoller(
            health,
            delayed=delayed,
            elector=self.elector,
            registry=registry,
            reports=reports,
            timings=self.timings,
            reclaim_delay=queue.reclaim_delay,
            poll=timings.poll,
            dead_letter_limit=config.dead_letter_limit,
            observers=observers,
        )
        self.listener = Listener(
            health,
            connections=connections,
            channel=keys.channel(group),
            due=self.poller.wake,
            released=self.elector.wake,
        )
        self.janitor = Janitor(
            health,
            deliveries=deliveries,
            elector=self.elector,
            interval=timings.janitor,
            consumer_idle=timings.consumer_idle,
            trims=queue.delete_on_ack,
        )
        self.writer = MetricsWriter(
            health, metrics=metrics, timings=self.timings, claim_delays=self.claim_delays
        )
        self.tuner = Tuner(
            health,
            config=config,
            stats=stats,
            metrics=metrics,
            pool=self.pool,
            elector=self.elector,
            reports=reports,
        )
        self.reporter = (
            Reporter(health, reports, config.on_error) if config.on_error is not None else None
        )
        self.watchdog = Watchdog(
            health,
            services=lambda: self.services,
            pool=self.pool,
            reports=reports,
            give_up=give_up,
            ownerless=self._ownerless,
            abandoned=self._abandoned,
            after=self._finish_late,
        )
        self.services: list[Service] = [
            *([self.reporter] if self.reporter else []),
            self.instance,
            self.elector,
            self.heartbeat,
            self.settler,
            self.limits,
            *self.fetchers,
            self.reclaimer,
            self.poller,
            self.listener,
            self.tuner,
            self.writer,
            self.janitor,
        ]
        self._late = False
        self._quieting = threading.Lock()
        self._quieted = False
        self._leaving = threading.Lock()
        self._gone = False

    @property
    def host(self) -> str:
        """The name this instance lives under; the wanted one until Redis gave it."""
        return self.instance.host or self._wanted_host

    def load(self) -> Load:
        """What is held and done now."""
        now = monotonic()
        running = [
            (message.task_name, now - delivery.started)
            for delivery in self.pool.running()
            if (message := delivery.message) is not None and delivery.started
        ]
        return Load(
            held=len(self.in_flight),
            running=tuple(running),
            workers=self.pool.size,
            unsettled=self.settler.unsettled,
            leads=self.elector.is_leader(),
        )

    def start(self) -> None:
        """Start all threads."""
        self.pool.start()
        for service in self.services:
            service.start()
        self.watchdog.start()

    def _ownerless(self) -> list[Delivery]:
        """What is held though no queue has it and no worker runs it: a thread ended with it.

        Looked at in the order in which a delivery moves, so that none slips through behind us.
        """
        held = self.in_flight.snapshot()
        owned = {id(delivery) for delivery in self.pool.queued()}
        owned.update(id(delivery) for delivery in self.pool.running())
        owned.update(id(delivery) for delivery in self.settler.queued())
        return [
            delivery
            for delivery in held
            if id(delivery) not in owned and not delivery.waiting and self.in_flight.holds(delivery)
        ]

    def _abandoned(self, delivery: Delivery) -> None:
        """As if its process had ended: it comes back, counted, unless it was to be settled
        otherwise."""
        if delivery.settlement is None:
            delivery.settlement = Park(due=monotonic())
        self.settler.put(delivery)

    def abandon(self) -> None:
        """A start that failed half way: nothing is left running."""
        for service in (self.watchdog, *self.services):
            service.stop()
        self.pool.stop()
        self.listener.interrupt()
        for fetcher in self.fetchers:
            fetcher.unblock()

    def stop(self, deadline: float, *, exiting: bool) -> bool:
        """Quiet, drain, leave; whether every running task ended by the deadline."""
        self.stop_asked.set()
        with self._quieting:  # who stops a second time waits here for the first
            if not self._quieted:
                self._quieted = True
                self._quiet(deadline)
        drained = self.pool.join(max(0.0, deadline - monotonic()))
        if not drained and not exiting:
            self._late = True  # the watchdog sees the last task end
            return False
        if not drained:
            self._cut_off()
        leave = Once("leave", lambda: self._leave(max(deadline, monotonic()) + _LEAVE))
        leave.start()
        leave.join(max(0.0, deadline - monotonic()) + _LEAVE)
        return drained

    def _quiet(self, deadline: float) -> None:
        """Nothing new comes in, the unstarted goes back, and another instance may lead."""
        self.heartbeat.draining = True
        for service in (*self.fetchers, self.reclaimer, self.poller, self.tuner, self.janitor):
            service.stop()
        self.listener.stop()
        self.listener.interrupt()
        self.elector.stop()
        hurry = min(deadline, monotonic() + 1.0)
        while not all(fetcher.join(0.02) for fetcher in self.fetchers):
            for fetcher in self.fetchers:
                if fetcher.alive:
                    fetcher.unblock() if monotonic() < hurry else fetcher.interrupt()
            if monotonic() > max(hurry, deadline):
                break
        self.reclaimer.join(max(0.1, min(deadline, monotonic() + 1.0) - monotonic()))
        self._hand_back()
        self.unseen = Once("unseen", self._park_unseen)
        self.unseen.start()
        self.pool.stop()

    def _park_unseen(self) -> None:
        for fetcher in self.fetchers:
            if not fetcher.alive:
                fetcher.park_unseen()
        if not self.reclaimer.alive:
            self.reclaimer.park_unseen()

    def _hand_back(self) -> None:
        for delivery in self.pool.take_back(self.pool.buffered):
            delivery.settlement = hand_back(delivery)
            self.settler.put(delivery)

    def _cut_off(self) -> None:
        """The process ends before these do: due elsewhere in 3 s, and it cost them no attempt."""
        self.heartbeat.stop()  # it would find them taken over
        self.heartbeat.join(0.1)
        running = self.pool.running()
        if not running:
            return
        log.warning(
            "%d tasks still run at the end of shutdown_timeout; they will run again elsewhere",
            len(running),
            extra={"action": "runner_cut_off"},
        )
        for delivery in running:
            again = copy.copy(delivery)  # should it end in the meantime, that is settled too
            spent = delivery.count if delivery.failed else max(0, delivery.count - 1)
            again.settlement = Park(due=monotonic() + _CUT_OFF, count=spent)
            self.settler.put(again)

    def _leave(self, deadline: float) -> None:
        with self._leaving:  # who stops a second time waits here for the first one's last words
            if not self._gone:
                self._gone = True
                self._say_last_words(deadline)

    def _say_last_words(self, deadline: float) -> None:
        """To Redis; each may fail, none may keep us."""
        self.watchdog.stop()
        self.watchdog.join(0.1)  # it may have the settler's queue in hand
        self.reclaimer.join(max(0.0, deadline - monotonic()) / 2)
        self.unseen.join(max(0.0, deadline - monotonic()) / 2)
        self._hand_back()  # what a slow answer still brought
        self.settler.finish(deadline)
        self.heartbeat.stop()
        self.limits.stop()
        self.writer.stop()
        self.instance.stop()
        self.writer.join(max(0.0, deadline - monotonic()))
        self.elector.join(max(0.0, deadline - monotonic()))
        self.instance.join(max(0.0, deadline - monotonic()))
        with suppress(Exception):  # Redis is away: the presence key runs out by itself
            self.instance.leave()
        if self.reporter is not None:
            self.reporter.stop()
            self.reporter.join(0.5)
        self._connections.close()

    def _finish_late(self) -> None:
        """After a stop that returned False: leave when the last task has ended."""
        if self._late and self.pool.threads_alive == 0:
            self._late = False

            def leave() -> None:
                self._leave(monotonic() + _LEAVE)
                self._left(self)

            Once("leave", leave).start()
