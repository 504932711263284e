"""`python -m tests.fuzz --seconds 60`: 0 if nothing was found, else libFuzzer's code.

What breaks a promise is written to a file that the last lines name; give it to
`python -m tests.fuzz --file PATH` to see it again.
"""

import argparse
import json
import random
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from taskrunner.errors import InvalidTaskPayloadError
from taskrunner.message import _spans
from tests.fuzz.promises import check

_WIRE = Path(__file__).resolve().parents[1] / "wire"
_NAMES = (
    *("unique", "unique_for", "unique_key", "unique_lock_value", "reservation_timeout"),
    *("task_name", "payload", "id", "attempt", "unknown", "only_group", "enqueued_at", "task"),
    *("time", "Task_Name", "PAYLOAD", "ta\u017fk", "ti\\u006de", "trace"),
)
_VALUES = (
    *("true", "false", "null", "0", "1", "-1", "9223372036854775807", "9223372036854775808"),
    *(
        "1.0",
        "1e999",
        "NaN",
        '""',
        '"S3CR3T"',
        '"\\ud800"',
        '"\\ud83d\\ude00"',
        '"\\u0000"',
        '"\\n"',
    ),
    *("[]", "{}", '{"a":1}', "[" * 2000, "[" * 900 + "]" * 900, "9" * 3000, '"' + "x" * 1500 + '"'),
)


def main() -> int:
    """Fuzz, or repeat one finding."""
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="0: a new one")
    parser.add_argument("--corpus", type=Path, help="kept and gone on with; default: a new one")
    parser.add_argument("--file", type=Path, help="check this input and nothing else")
    options = parser.parse_args()
    if options.file is not None:
        check(options.file.read_bytes())
        print("every promise was kept")
        return 0
    try:
        import atheris
    except ImportError:
        parser.exit(2, "atheris is missing: pip install 'redis-taskrunner[fuzz]', or `make fuzz`\n")
    corpus = options.corpus or Path(tempfile.mkdtemp(prefix="taskrunner-fuzz-"))
    corpus.mkdir(parents=True, exist_ok=True)
    for number, body in enumerate(_seeds()):
        (corpus / f"seed-{number}").write_bytes(body)
    words = corpus.with_name(f"{corpus.name}.dict")
    words.write_text("".join(f'"{word}"\n' for word in _NAMES if re.fullmatch("[A-Za-z_]+", word)))
    import taskrunner.message
    import tests.fuzz.promises

    for part in (json.decoder, json.scanner, taskrunner.message, tests.fuzz.promises):
        for name, value in list(vars(part).items()):
            if hasattr(value, "__code__") and value.__module__ == part.__name__:
                setattr(part, name, atheris.instrument_func(value))
    print(f"corpus in {corpus}", flush=True)
    atheris.Setup(
        [
            "fuzz",
            f"-max_total_time={options.seconds}",
            f"-seed={options.seed}",
            f"-dict={words}",
            f"-artifact_prefix={corpus}/found-",
            *("-max_len=4096", "-timeout=20", "-rss_limit_mb=2048", "-print_final_stats=1"),
            str(corpus),
        ],
        check,
        custom_mutator=lambda body, most, seed: _mutated(body, most, seed, atheris.Mutate),
    )
    atheris.Fuzz()
    return 0


def _mutated(body: bytes, most: int, seed: int, mutate: Callable[[bytes, int], bytes]) -> bytes:
    """Another body. Mostly a member is changed, so that it stays an object: bytes changed at random
    seldom do, and end at the first line of the reader."""
    chance = random.Random(seed)
    try:
        members = [member for _, _, member, _ in _spans(body.decode())]
    except (InvalidTaskPayloadError, UnicodeDecodeError):
        return mutate(body, most)
    kind = chance.randrange(6)
    if kind == 0 or not members:
        return mutate(body, most)
    at = chance.randrange(len(members))
    key, colon, value = members[at].partition(":")
    if kind == 1:
        members[at] = mutate(members[at].encode(), 300).decode(errors="replace")
    elif kind == 2:
        members[at] = key + colon + mutate(value.encode(), 300).decode(errors="replace")
    elif kind == 3:
        members[at] = f"{key}:{chance.choice(_VALUES)}"
    elif kind == 4:
        members.insert(at, f'"{chance.choice(_NAMES)}":{chance.choice([value, *_VALUES])}')
    else:
        del members[at]
    return ("{" + ",".join(members) + "}").encode()[:most]


def _seeds() -> list[bytes]:
    """Recorded traffic: each string of `tests/wire` that looks like an object."""
    found: list[bytes] = []

    def gather(value: object) -> None:
        if isinstance(value, str) and value.lstrip().startswith("{"):
            found.append(value.encode(errors="surrogatepass"))
        elif isinstance(value, dict):
            for inner in value.values():
                gather(inner)
        elif isinstance(value, list):
            for inner in value:
                gather(inner)

    for path in sorted(_WIRE.glob("*.json")):
        gather(json.loads(path.read_text()))
    return [body for body in found if len(body) < 4096]


if __name__ == "__main__":
    sys.exit(main())
