"""Distributed background jobs on Redis Streams: synchronous, threaded, and no accepted task is
lost.

This module gives the public names and nothing else.
"""

from taskrunner.config import TaskRunnerConfig, Timings
from taskrunner.context import TaskContext, TaskMessage, current_task
from taskrunner.errors import (
    AlreadyStartedError,
    ConfigurationError,
    DeliveryLostError,
    DuplicateTaskNameError,
    InvalidTaskPayloadError,
    MaxRetryExceededError,
    PayloadTooLargeError,
    Reject,
    Retry,
    TaskAlreadyDispatchedError,
    TaskExecutionError,
    TaskNotFoundError,
    TaskRunnerError,
    TaskTimeoutError,
    UnboundTaskError,
    UniqueForRequiredError,
)
from taskrunner.reports import ErrorReport
from taskrunner.runner import TaskRunner
from taskrunner.stats import Stats
from taskrunner.store.dead_letters import DeadLetter
from taskrunner.store.delayed_set import DelayedTask
from taskrunner.store.stream import ConsumerMetrics, GroupMetrics, QueueMetrics, RedisStreamQueue
from taskrunner.task import Dispatched, Registry, Task, default_registry, task

__all__ = [
    "AlreadyStartedError",
    "ConfigurationError",
    "ConsumerMetrics",
    "DeadLetter",
    "DelayedTask",
    "DeliveryLostError",
    "Dispatched",
    "DuplicateTaskNameError",
    "ErrorReport",
    "GroupMetrics",
    "InvalidTaskPayloadError",
    "MaxRetryExceededError",
    "PayloadTooLargeError",
    "QueueMetrics",
    "RedisStreamQueue",
    "Registry",
    "Reject",
    "Retry",
    "Stats",
    "Task",
    "TaskAlreadyDispatchedError",
    "TaskContext",
    "TaskExecutionError",
    "TaskMessage",
    "TaskNotFoundError",
    "TaskRunner",
    "TaskRunnerConfig",
    "TaskRunnerError",
    "TaskTimeoutError",
    "Timings",
    "UnboundTaskError",
    "UniqueForRequiredError",
    "current_task",
    "default_registry",
    "task",
]
