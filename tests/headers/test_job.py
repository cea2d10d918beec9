"""A compiler's process: what it says comes back, and nothing of it is left behind, however it ends."""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tsfuser.target import job

SLEEPER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it does not go by itself
child = os.fork()
with open(sys.argv[1], "a") as pids:
    print(os.getpid(), file=pids, flush=True)
time.sleep(600)
"""


def sleeper(folder):
    """A command that never ends, nor its child, and where it writes their process ids."""
    return [sys.executable, "-c", SLEEPER, str(folder / "pids")], folder / "pids"


def started(pids):
    """The ids of the two processes, once they run."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        if pids.exists() and len(pids.read_text().split()) == 2:
            return [int(pid) for pid in pids.read_text().split()]
        time.sleep(0.01)
    raise TimeoutError


def runs(pid):
    """Whether the process is there and is not a dead one whose parent has not looked."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(pids):
    limit = time.monotonic() + 10
    while any(map(runs, pids)) and time.monotonic() < limit:
        time.sleep(0.01)
    return not any(map(runs, pids))


@pytest.fixture(params=["pidfd", "poll"], autouse=True)
def wait(request, monkeypatch):
    """With and without the system call that waits for a process."""
    if request.param == "poll":
        monkeypatch.delattr(os, "pidfd_open", raising=False)


def test_status_and_output_come_back(tmp_path):
    assert job.run(["sh", "-c", "echo out; echo err >&2; exit 3"], tmp_path, 60) == (3, "out\nerr\n")


def test_output_may_have_any_encoding(tmp_path):
    assert job.run(["printf", "\\377 caf\\303\\251"], tmp_path, 60) == (0, "\\xff café")


def test_temporary_files_go_to_the_folder(tmp_path):
    assert job.run(["sh", "-c", "echo $TMPDIR"], tmp_path, 60) == (0, f"{tmp_path}\n")


def test_what_takes_too_long_is_ended_with_its_children(tmp_path):
    command, pids = sleeper(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(job.run, command, tmp_path, 3)
        both = started(pids)
        with pytest.raises(job.TimedOut):
            future.result()
    assert gone(both)


def test_another_thread_can_stop_it_and_what_comes_after(tmp_path):
    command, pids = sleeper(tmp_path)
    stop = job.Stop()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(job.run, command, tmp_path, 600, stop)
        both = started(pids)
        stop.now()
        with pytest.raises(job.Stopped):
            future.result()
    assert gone(both)
    with pytest.raises(job.Stopped):
        job.run(["touch", str(tmp_path / "made")], tmp_path, 60, stop)
    assert not (tmp_path / "made").exists()


def test_an_exception_in_the_waiting_thread_ends_it(tmp_path):
    """Ctrl-C, where a compiler is run from the main thread."""
    command, pids = sleeper(tmp_path)
    presser = threading.Thread(target=lambda: started(pids) and os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            presser.start()
            job.run(command, tmp_path, 100)
    finally:
        presser.join()
        signal.signal(signal.SIGINT, before)
    assert gone(started(pids))
