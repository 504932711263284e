"""The examples of `docs/testing.md`, run as a user's test suite: by pytest, with our plugin."""

import re
from pathlib import Path

from tests.support.plugin import run_pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "testing.md"


def test_the_examples_are_a_test_suite_that_passes(tmp_path: Path) -> None:
    """The first block is the application, one is the conftest.py, all others are tests."""
    application, *blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE.read_text())
    (tmp_path / "shop.py").write_text(application)
    for number, code in enumerate(blocks):
        name = f"test_{number}.py" if "def test_" in code else "conftest.py"
        (tmp_path / name).write_text(code)

    outcome = run_pytest(tmp_path)

    assert "6 passed" in outcome, outcome
