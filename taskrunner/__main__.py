"""Floor 5. `python -m taskrunner` is the `taskrunner` command."""

import sys

from taskrunner.cli import main

if __name__ == "__main__":
    sys.exit(main())
