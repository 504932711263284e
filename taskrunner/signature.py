"""Floor 0: whether a worker can call a function, and how; asked once, when a task is made."""

import inspect
from collections.abc import Callable


def origin(function: Callable[..., object]) -> str:
    """Return where the function comes from, as "module.qualname"."""
    qualname = getattr(function, "__qualname__", None) or repr(function)
    return f"{getattr(function, '__module__', None)}.{qualname}"


def shape(function: Callable[..., object]) -> tuple[bool, bool]:
    """Return whether the function takes a payload, and whether it can do without.

    Raises TypeError for what a worker can't call with one payload, or would call to no effect.
    """
    if not callable(function):
        raise TypeError(f"{function!r} can't be called: @task takes a function")
    for body in (function, type(function).__call__):
        if inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body):
            raise TypeError(
                f"{origin(function)} is async, and a worker is a thread: "
                "make the task a plain function that calls asyncio.run"
            )
        if inspect.isgeneratorfunction(body):
            raise TypeError(
                f"{origin(function)} is a generator function, which runs nothing when called: "
                "make the task a plain function that does the loop"
            )
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return True, False  # some builtins don't tell what they take
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(required) > 1 or any(each.kind is each.KEYWORD_ONLY for each in required):
        raise TypeError(
            f"{origin(function)} needs {', '.join(each.name for each in required)}: a task takes "
            "one payload, by position, or nothing; several values travel as one dict"
        )
    takes_payload = any(
        each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD) for each in parameters
    )
    return takes_payload, takes_payload and not required
