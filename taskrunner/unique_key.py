"""Floor 3: what makes two messages of a unique task the same: the name of their lock."""

from hashlib import sha256
from typing import Any

from taskrunner.message import MAX_KEY, MAX_NAME, canonical
from taskrunner.task import Task

_LONGEST = MAX_KEY - MAX_NAME


def lock_name(task: Task[Any], payload: Any, payload_text: str) -> str:
    """The lock's name for a payload: the task's name, with the key where the task has one.

    Raises what the task's key function raises, TypeError where that returns no str and ValueError
    where it can't be encoded.
    """
    if task.unique_key is None:
        return task.name
    if task.unique_key == "payload":
        return f"{task.name}:{sha256(canonical(payload_text)).hexdigest()}"
    key = task.unique_key(payload)
    if not isinstance(key, str):
        raise TypeError(
            f"unique_key of task {task.name!r} returned {type(key).__name__}, a str is needed"
        )
    if len(key) > _LONGEST:
        raise ValueError(
            f"unique_key of task {task.name!r} returned {len(key)} characters, at most {_LONGEST} are possible: "
            "hash it, or use unique_key='payload'"
        )
    try:
        key.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"unique_key of task {task.name!r} returned {key!r}, no Unicode text"
        ) from None
    return f"{task.name}:{key or task.name}"  # Go takes the task's name where the key is empty
