"""The line that tells of a wait for compilers: when it comes, what it says, and that it goes."""

import io
import sys

import pytest

from tsfuser import options
from tsfuser.planning import progress
from tsfuser.planning.progress import Progress


class Stream(io.StringIO):
    terminal = False

    def isatty(self):
        return self.terminal


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def stream(monkeypatch):
    stream = Stream()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with options.override(progress=True):
        yield stream


@pytest.fixture
def clock():
    return Clock()


def wait(told, clock, count, seconds):
    """A thread that waits for `count` kernels of so many seconds each."""
    with told.waiting(count) as word:
        for _ in range(count):
            clock.now += seconds
            word.tick("/kept")
            word.done()


def test_a_short_wait_is_silent(stream, clock):
    wait(Progress(clock, lambda: stream), clock, 3, 0.6)
    assert stream.getvalue() == ""


def test_a_log_gets_one_line(stream, clock):
    wait(Progress(clock, lambda: stream), clock, 9, 0.9)
    assert stream.getvalue() == "tsfuser: compiling 3 of 9 kernels, kept in /kept\n"


def test_waits_that_follow_each_other_are_one(stream, clock):
    """A model's groups get their plans one after the other."""
    told = Progress(clock, lambda: stream)
    for _ in range(5):
        wait(told, clock, 2, 0.4)
        clock.now += 1
    assert stream.getvalue() == "tsfuser: compiling 6 of 6 kernels, kept in /kept\n"
    clock.now += 60
    wait(told, clock, 2, 0.9)
    assert stream.getvalue().count("\n") == 1
    clock.now += 60
    wait(told, clock, 2, 3)
    assert stream.getvalue().endswith("tsfuser: compiling 1 of 2 kernels, kept in /kept\n")


def test_the_line_of_a_terminal_changes_and_goes(stream, clock):
    stream.terminal = True
    told = Progress(clock, lambda: stream)
    wait(told, clock, 4, 1.5)
    shown = stream.getvalue().split("\r\033[K")
    assert shown[1:] == [f"tsfuser: compiling {n} of 4 kernels, kept in /kept" for n in (2, 3, 4)] + [""]
    assert "\n" not in stream.getvalue()
    clock.now += 1
    wait(told, clock, 1, 0.1)
    assert stream.getvalue().split("\r\033[K")[5:] == ["tsfuser: compiling 5 of 5 kernels, kept in /kept", ""]


def test_a_line_that_is_too_long_for_the_terminal_is_cut(stream, clock):
    stream.terminal = True
    with Progress(clock, lambda: stream).waiting(1) as word:
        clock.now += 3
        word.tick("/kept" * 30)
    assert max(map(len, stream.getvalue().split("\r\033[K"))) == 79


def test_kernels_that_do_not_come_are_not_counted(stream, clock):
    told = Progress(clock, lambda: stream)
    with pytest.raises(KeyError), told.waiting(20) as word:
        word.done()
        raise KeyError
    wait(told, clock, 1, 5)
    assert stream.getvalue() == "tsfuser: compiling 2 of 2 kernels, kept in /kept\n"


def test_it_can_be_silenced(stream, clock):
    with options.override(progress=False):
        wait(Progress(clock, lambda: stream), clock, 9, 9)
    assert stream.getvalue() == ""
    assert options.read({"TSFUSER_PROGRESS": "0"})["progress"] is False


@pytest.mark.parametrize("broken", [None, "closed"])
def test_without_a_stderr_nothing_breaks(monkeypatch, clock, broken):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if broken else None)
    with options.override(progress=True):
        wait(Progress(clock), clock, 9, 9)
    assert progress.PATIENCE == 2
