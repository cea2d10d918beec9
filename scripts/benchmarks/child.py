"""Processes that measure on their own: they are sent orders and tell findings, a line of JSON each.

In: a script, what its environment has besides. Out: findings as they come; the last one is an error where the
time was up or the process failed. Example:

    child = Child("compiled_child.py")
    child.send({"model": "mlp"})
    for found in child.told(seconds=75):
        print(found)
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time

SLACK = 5  # seconds in which a process that knows its time ends by itself


class Child:
    """A process that runs `script`."""

    def __init__(self, script, environment=None):
        self.waiting = b""  # the begin of a line
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # compilers that it starts end with it
        )

    def send(self, order, last=True):
        """Writes a line. `last`: none follows."""
        with contextlib.suppress(BrokenPipeError):  # `told` says how it ended
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()
            if last:
                self.process.stdin.close()

    def told(self, seconds, until=None):
        """What it tells until it is done or `seconds` are over; with `until`, up to a finding that has this
        key. The process has ended then, except behind `until`."""
        end = time.monotonic() + seconds + SLACK
        output = self.process.stdout.fileno()
        while True:
            *lines, self.waiting = self.waiting.split(b"\n")
            for k, line in enumerate(lines):
                found = _finding(line)
                if found is not None:
                    yield found
                    if until in found:
                        self.waiting = b"\n".join([*lines[k + 1 :], self.waiting])
                        return
            ready, _, _ = select.select([output], [], [], max(0.0, end - time.monotonic()))
            read = os.read(output, 1 << 16) if ready else None
            if not read:
                break
            self.waiting += read
        if read is None:
            yield {"error": f"not all was measured: {seconds:.0f} s were over"}
        elif self.process.wait():
            yield {"error": f"the process ended with status {self.process.returncode}"}
        self.end()

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


def tell(found):
    """Tells a finding; for the script."""
    print(json.dumps(found), flush=True)


@contextlib.contextmanager
def telling_errors(**facts):
    """An error inside becomes a finding with its first line, and these facts; for the script."""
    try:
        yield
    except Exception as error:  # what is measured may fail in any way
        tell({**facts, "error": f"{type(error).__name__}: {error}".strip().split("\n")[0]})


def _finding(line):
    """The dict that a line holds; None where a library printed it."""
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict):
            return found
    return None
