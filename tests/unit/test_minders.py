"""What watches over a supervisor's child. No Redis."""

from typing import Any

import pytest

from taskrunner.cli.minders import counted


@pytest.mark.parametrize("fails", [False, True])
def test_counting_tasks_leaves_the_applications_hook_in_place(fails: bool) -> None:
    """`--max-tasks` counts beside `after_task`, also where that raises."""
    told: list[Any] = []
    reached: list[str] = []

    def hook(context: Any, error: BaseException | None) -> None:
        told.append((context, error))
        if fails:
            raise ValueError("the application's own")

    after = counted(2, reached.append, hook)
    error = KeyError("task")
    for context in ("first", "second"):
        assert reached == []
        if fails:
            with pytest.raises(ValueError, match="own"):
                after(context, error)  # type: ignore[arg-type]
        else:
            after(context, error)  # type: ignore[arg-type]

    assert told == [("first", error), ("second", error)]
    assert reached == ["2 tasks have run"]
