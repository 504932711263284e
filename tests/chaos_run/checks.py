"""What must be true of a run once it is drained; each finding is a sentence."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from taskrunner import default_registry, keys
from tests.chaos_run import tasks
from tests.chaos_run.run import RECLAIM, Chaos
from tests.support.ledger import Run

_MIB = 1024 * 1024
_GROWTH = 16 * _MIB
_LONGEST_DISPATCH = 16.0
_SLACK = 0.75
"""Seconds: a frozen or starved process writes its line of the ledger late."""


class Report:
    """The findings, and figures worth telling."""

    def __init__(self, chaos: Chaos, left: str) -> None:
        self._chaos = chaos
        self._left = left
        self.figures: dict[str, Any] = {}
        self.findings: list[str] = []
        self._runs = chaos.ledger.runs()
        self._of: dict[str, list[Run]] = defaultdict(list)
        for run in self._runs:
            self._of[run.id[1]].append(run)
        self._tried: dict[str, str] = {}
        self._became: dict[str, str] = {}
        self._slowest = 0.0
        for path in chaos.producer_files:
            for word, id_, *rest in _lines(path):
                if word == "try":
                    self._tried[id_] = rest[0]
                else:
                    self._became[id_] = word
                    self._slowest = max(self._slowest, rest[0])
        self._letters: dict[str, list[Any]] = defaultdict(list)
        for letter in _letters(chaos):
            id_ = letter.payload["id"] if isinstance(letter.payload, dict) else letter.id
            self._letters[id_].append(letter)
        for check in (
            self._nothing_is_left,
            self._none_is_lost,
            self._none_ends_in_the_wrong_place,
            self._none_exceeds_its_attempts,
            self._no_two_unique_ones_at_once,
            self._one_leader,
            self._every_key_is_known,
            self._processes_are_well,
        ):
            check()

    def _nothing_is_left(self) -> None:
        if self._left:
            self.findings.append(f"not drained: {self._left}")

    def _none_is_lost(self) -> None:
        became = Counter(self._became.values())
        self.figures["messages"] = dict(became)
        ended = {run.id[1] for run in self._runs if run.outcome == "returned"}
        ended |= self._letters.keys()
        accepted = {id_ for id_, word in self._became.items() if word == "accepted"}
        for id_ in sorted(accepted - ended):
            self.findings.append(f"lost: {self._tell(id_)}")
        unknown = {id_ for id_, word in self._became.items() if word == "unknown"}
        self.figures["of unknown outcome, there"] = len(unknown & ended)
        for id_ in sorted(ended - self._tried.keys()):
            self.findings.append(f"never sent: {self._tell(id_)}")
        refused = {id_ for id_, word in self._became.items() if word == "duplicate"}
        for id_ in sorted(refused & ended):
            self.findings.append(f"refused as a duplicate, and yet there: {self._tell(id_)}")
        if self._slowest > _LONGEST_DISPATCH:
            self.findings.append(f"a dispatch took {self._slowest:.1f} s")

    def _none_ends_in_the_wrong_place(self) -> None:
        both = 0
        for id_, name in self._tried.items():
            returned = sum(run.outcome == "returned" for run in self._of.get(id_, []))
            letters = self._letters.get(id_, [])
            both += bool(returned and letters)
            if len(letters) > 1:
                self.findings.append(f"{len(letters)} dead letters: {self._tell(id_)}")
            for letter in letters:
                right = name in tasks.ENDS_BADLY or (
                    letter.error_type == "MaxRetryExceededError" and name == "default"
                )
                if not right:
                    self.findings.append(
                        f"dead letter of {letter.error_type}, {letter.error}: {self._tell(id_)}"
                    )
        self.figures["dead letters"] = dict(
            Counter(f"{one.task_name} {one.error_type}" for all_ in self._letters.values() for one in all_)
        )  # fmt: skip
        self.figures["returned and dead letter both"] = both

    def _none_exceeds_its_attempts(self) -> None:
        seen = self._chaos.seen
        again = stopped = 0
        for id_, runs in self._of.items():
            task = default_registry.get(runs[0].id[0])
            assert task is not None
            again += sum(run.outcome == "returned" for run in runs) > 1
            attempts: dict[int, list[Run]] = defaultdict(list)
            for run in runs:
                attempts[run.id[3]].append(run)
            if max(attempts) > task.max_retry + task.max_lost:
                self.findings.append(f"beyond its attempts: {self._tell(id_)}")
            for same in attempts.values():
                # A process that stops hands back, uncounted, what runs longer than its patience.
                unexplained = [run for run in same[:-1] if run.pid not in seen.terminated]
                stopped += len(same) - 1 - len(unexplained)
                if unexplained:
                    self.findings.append(f"one attempt twice: {self._tell(id_)}")
        self.figures["runs"] = len(self._runs)
        self.figures["messages that returned more than once"] = again
        self.figures["attempts run again after an orderly stop"] = stopped

    def _no_two_unique_ones_at_once(self) -> None:
        """Two messages of one key never, two deliveries of one neither: but for a run that was cut
        off until others took its message over. It can't be held back; it can only be outlived."""
        by_key: dict[str, list[Run]] = defaultdict(list)
        for run in self._runs:
            if run.id[4]:
                by_key[run.id[4]].append(run)
        same_message = outlived = 0
        for runs in by_key.values():
            for place, first in enumerate(runs):
                if first.end is None:
                    continue
                for second in runs[place + 1 :]:
                    if second.start >= first.end:
                        break
                    if first.id[2] == second.id[2]:
                        same_message += 1
                        if not self._was_cut_off(first, second):
                            self.findings.append(
                                f"delivered twice at once without a fault: {first} {second}"
                            )
                    elif self._outlived(first, second):
                        outlived += 1
                    else:
                        self.findings.append(f"two of one key at once: {first} {second}")
        self.figures["unique runs"] = sum(len(runs) for runs in by_key.values())
        self.figures["unique message run by two at once (its holder was cut off)"] = same_message
        self.figures["unique key run by two at once (the first was cut off and outlived)"] = (
            outlived
        )

    def _was_cut_off(self, first: Run, second: Run) -> bool:
        """Whether a fault kept the first from renewing before the second was started."""
        seen = self._chaos.seen
        since, until = first.start - RECLAIM - _SLACK, second.start + _SLACK
        spans = [*seen.cut_off, *seen.frozen.get(first.pid, [])]
        return first.pid in seen.terminated or any(a < until and b > since for a, b in spans)

    def _outlived(self, first: Run, second: Run) -> bool:
        """Whether the first one's message was run by another, and ended, before the second began:
        then its lock had been given up in order."""
        return any(
            first.start < other.start
            and other.end is not None
            and other.end <= second.start + _SLACK
            and self._was_cut_off(first, other)
            for other in self._of[first.id[1]]
            if other.id[2] == first.id[2]
        )

    def _one_leader(self) -> None:
        """While one process takes itself for the leader without a break, no other does."""
        samples = sorted(((at, pid) for pid, at in _lines(self._chaos.leaders)))
        terms: list[list[Any]] = []  # pid, from, to
        last: dict[int, list[Any]] = {}
        for at, pid in samples:
            term = last.get(pid)
            if term is None or at - term[2] > 0.1:
                term = last[pid] = [pid, at, at]
                terms.append(term)
            term[2] = at
        changes = 0
        for one, other in pairwise(terms):
            changes += one[0] != other[0]
        terms.sort(key=lambda term: term[1])
        for place, one in enumerate(terms):
            for other in terms[place + 1 :]:
                if other[1] >= one[2]:
                    break
                if other[0] != one[0]:
                    self.findings.append(f"two leaders: {one} {other}")
        self.figures["leaders one after the other"] = changes + 1

    def _every_key_is_known(self) -> None:
        chaos, group = self._chaos, self._chaos.names.group
        known = {
            keys.stream(chaos.names.prefix, "queue"),
            keys.ring(chaos.names.prefix, "queue"),
            keys.delayed(group),
            keys.leader(group),
            keys.capacity(group),
            keys.metrics(group),
            keys.dead_letters(group),
        }
        hosts = [
            f"{chaos.names.host}-{number}{suffix}"
            for number in range(len(chaos.instances))
            for suffix in ("", *(f"-{count}" for count in range(2, 100)))
        ]
        known |= {keys.presence(host) for host in hosts}
        found = {key.decode() for key in chaos.desk.client.scan_iter(count=1000)}
        locks = {key for key in found if key.startswith(keys.unique(""))}
        self.figures["keys at the end"] = len(found)
        if locks:
            told = {key: chaos.desk.client.pttl(key) for key in sorted(locks)}
            self.findings.append(f"unique locks left behind: {told}")
        for key in sorted(found - known - locks):
            self.findings.append(f"a key that nobody knows: {key}")
        for key in sorted(found):
            if chaos.desk.client.type(key) == b"string" and chaos.desk.client.pttl(key) == -1:
                self.findings.append(f"a string without an expiry: {key}")

    def _processes_are_well(self) -> None:
        chaos = self._chaos
        self.findings += chaos.seen.exits
        for instance in chaos.instances:
            gone = instance.threads - chaos.threads_of(instance)
            gone = {name for name in gone if "worker" not in name}
            if gone:
                self.findings.append(f"threads of instance {instance.number} are gone: {gone}")
            for sign in ("could not be handled", "giving up", "Traceback"):
                lines = instance.worker.log_lines(sign)
                if lines and sign != "Traceback":
                    self.findings.append(f"instance {instance.number} says: {lines[0]}")
                elif lines:
                    self.figures[f"tracebacks in the log of {instance.number}"] = len(lines)
        sizes = [size for _, size in chaos.seen.sizes]
        if len(sizes) >= 20:
            early = max(sizes[: len(sizes) // 3])
            late = min(max(sizes[-len(sizes) // 3 :]), chaos.instances[0].worker.rss_bytes())
            self.figures["MiB of instance 0, early and late"] = (
                round(early / _MIB, 1),
                round(late / _MIB, 1),
            )
            if late - early > _GROWTH:
                self.findings.append(f"memory grew from {early} to {late} bytes")

    def _tell(self, id_: str) -> str:
        runs = [
            f"attempt {run.id[3]} in {run.pid} {run.start:.2f}-{run.end or 0:.2f} {run.outcome}"
            for run in self._of.get(id_, [])
        ]
        messages = {run.id[2] for run in self._of.get(id_, [])}
        return f"{self._tried.get(id_)} {id_} ({self._became.get(id_)}) {messages} {runs}"


def _lines(path: Path) -> Iterator[Any]:
    for line in path.read_bytes().splitlines():
        yield json.loads(line)


def _letters(chaos: Chaos) -> Iterator[Any]:
    after = None
    while page := chaos.desk.runner.dead_letters.list(500, after):
        yield from page
        after = page[-1].id
