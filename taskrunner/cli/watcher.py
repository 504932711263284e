"""Floor 5. Child processes that end with us, whatever ends us.

A shell, the *watcher*, holds the read end of a pipe whose write end only this process has. The
kernel closes our end however we die, SIGKILL included; the watcher then reads end-of-file, kills
what it was told of and removes the directory. This was chosen over Linux's PR_SET_PDEATHSIG, which
fires when the *thread* that forked ends rather than the process, must be set between fork and exec
(where Python code may deadlock in a threaded program), does not exist on macOS, and leaves the
directory behind. The price is one sleeping `/bin/sh`. A child that we fork closes its copy of the
write end at once, so one that lives on keeps nothing else alive.

Linux and macOS alike. Where the watcher itself is killed by hand, nobody is left to end the others
after a crash of ours; an orderly `close()` still does.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_POLL: Final = 0.005
_SOCKET_PATH_LIMIT: Final = 100  # sun_path holds 104 bytes on macOS and 108 on Linux
_LONGEST_FILE_NAME: Final = 16

# Reads "+pid" and "-pid", and kills those that are left at end-of-file.
_WATCH: Final = """
trap '' HUP INT TERM
pids=' '
while read -r line; do
    pid=${line#?}
    case $line in
    +*) pids="$pids$pid " ;;
    -*) case $pids in *" $pid "*) pids="${pids%% $pid *} ${pids#* $pid }" ;; esac ;;
    esac
done
for pid in $pids; do kill -KILL "$pid" 2>/dev/null; done
rm -rf -- "$1"
"""
# Says its own pid before it becomes the program: nothing runs that the watcher doesn't know.
_LAUNCH: Final = 'echo "+$$" && exec "$@" >>"$0" 2>&1'


class Watcher:
    """A private directory (mode 0700), and processes, that end with this process or `close()`."""

    def __init__(self) -> None:
        self.directory = _make_directory()
        self._owner_pid = os.getpid()
        self._children: list[subprocess.Popen[bytes]] = []
        read_end, write_end = os.pipe()
        self._pipe: int | None = write_end
        try:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _WATCH, "taskrunner-watcher", str(self.directory)],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in our terminal must not reach it
                cwd="/",
            )
        except BaseException:
            self.drop_pipe()
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        finally:
            os.close(read_end)
        _drop_in_children(self)

    def launch(
        self, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program in a session of its own; what it prints is appended to `log`.

        Reap it with `end()`, not by hand: until the watcher is told, its pid must stay its own.
        """
        child = subprocess.Popen(
            ["/bin/sh", "-c", _LAUNCH, str(log), *command],
            stdin=subprocess.DEVNULL,
            stdout=self._pipe,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=env,
        )
        self._children.append(child)
        return child

    def end(
        self, child: subprocess.Popen[bytes], signum: int = signal.SIGKILL, timeout: float = 10.0
    ) -> int:
        """Send a signal, wait for the end (SIGKILL after `timeout` seconds), return the exit
        code."""
        if child not in self._children:
            return child.wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signum)
            if signum != signal.SIGKILL:
                os.kill(child.pid, signal.SIGCONT)  # a stopped process takes no other signal
        deadline = time.monotonic() + timeout
        while not has_ended(child):
            if time.monotonic() > deadline:
                os.kill(child.pid, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(_POLL)
        if self._pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipe, b"-%d\n" % child.pid)
        self._children.remove(child)
        return child.wait()

    def close(self) -> None:
        """Kill what still runs and remove the directory; safe to call twice."""
        if os.getpid() != self._owner_pid:
            return  # inherited by a forked child: all of it belongs to the parent
        for child in list(self._children):
            self.end(child)
        self.drop_pipe()
        self._shell.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def drop_pipe(self) -> None:
        """Close this process's copy of the pipe (a forked child does so at once)."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


def has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Whether a child has ended; on Linux without reaping it, so that its pid stays taken."""
    if child.returncode is not None:
        return True
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return child.poll() is not None
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _make_directory() -> Path:
    """Make a directory of mode 0700 with a path short enough for a socket inside it."""
    directory = Path(tempfile.mkdtemp(prefix="taskrunner-"))
    if len(os.fsencode(directory)) + 1 + _LONGEST_FILE_NAME > _SOCKET_PATH_LIMIT:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="taskrunner-", dir="/tmp"))
    return directory


def _drop_in_children(watcher: Watcher) -> None:
    reference = weakref.ref(watcher)

    def drop() -> None:
        inherited = reference()
        if inherited is not None:
            inherited.drop_pipe()

    os.register_at_fork(after_in_child=drop)
