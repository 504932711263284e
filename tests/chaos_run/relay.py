"""The proxy as a process: `python -m tests.chaos_run.relay URL`; told what to do line by line."""

import sys

from tests.support.proxy import Proxy


def main() -> None:
    """Print the relay's URL, then obey standard input until it ends."""
    with Proxy(sys.argv[1]) as proxy:
        print(proxy.url, flush=True)
        for line in sys.stdin:
            word, *rest = line.split()
            if word == "on":
                proxy.on(rest[0], rest[1])  # type: ignore[arg-type]
            elif word == "delay":
                proxy.delay(float(rest[1]), rest[0])  # type: ignore[arg-type]
            elif word == "swallow":
                proxy.swallow(rest[0])  # type: ignore[arg-type]
            elif word == "cut":
                proxy.cut()
            elif word == "refuse":
                proxy.refuse()
            elif word == "heal":  # what was swallowed is missing: those connections are of no use
                proxy.cut()
                proxy.pass_through()
            elif word == "clear":
                proxy.clear()
            print("done", flush=True)


if __name__ == "__main__":
    main()
