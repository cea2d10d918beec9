"""The lines that tell of a wait for tsfuser or compilers: when they come, what they say, and that they go."""

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


def test_a_log_is_told_of_the_wait_and_of_its_end(stream, clock):
    wait(Progress(clock, lambda: stream), clock, 9, 0.9)
    assert stream.getvalue() == (
        "tsfuser: compiling 3 of 9 kernels, kept in /kept\ntsfuser: done after 8 s\n"
    )


def test_waits_that_follow_each_other_are_one(stream, clock):
    """A model's groups get their plans one after the other."""
    told = Progress(clock, lambda: stream)
    for _ in range(5):
        wait(told, clock, 2, 0.4)
        clock.now += 1
    once = "tsfuser: compiling 6 of 6 kernels, kept in /kept\ntsfuser: done after 2 s\n"
    assert stream.getvalue() == once
    clock.now += 60
    wait(told, clock, 2, 0.9)
    assert stream.getvalue() == once
    clock.now += 60
    wait(told, clock, 2, 3)
    assert stream.getvalue() == (
        f"{once}tsfuser: compiling 1 of 2 kernels, kept in /kept\ntsfuser: done after 6 s\n"
    )


def test_a_log_of_many_waits_gets_few_lines(stream, clock):
    told = Progress(clock, lambda: stream)
    for _ in range(20):
        wait(told, clock, 1, 2.5)
    assert stream.getvalue().count("done after") == 1 + 47 // 12


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
    assert stream.getvalue().startswith("tsfuser: compiling 2 of 2 kernels, kept in /kept\n")


class Timers:
    """In the place of threading.Timer: `fire` is what comes once the time is over."""

    def __init__(self):
        self.waiting = []

    def __call__(self, seconds, function, args):
        timer = Timer(self, seconds, function, args)
        self.waiting.append(timer)
        return timer

    def fire(self):
        for timer in self.waiting:
            timer.function(*timer.args)


class Timer:
    def __init__(self, timers, seconds, function, args):
        self.timers, self.seconds, self.function, self.args = timers, seconds, function, args

    def start(self):
        pass

    def cancel(self):
        self.timers.waiting.remove(self)


def work(told, clock, timers, seconds):
    with told.working("tracing a graph"):
        with told.working("planning a part of it"):
            clock.now += seconds
            if seconds > progress.PATIENCE:
                timers.fire()


def test_work_that_takes_long_is_told(stream, clock):
    timers = Timers()
    told = Progress(clock, lambda: stream, timers)
    work(told, clock, timers, 1.0)
    assert stream.getvalue() == ""
    work(told, clock, timers, 7.0)
    assert stream.getvalue() == "tsfuser: tracing a graph\ntsfuser: done after 7 s\n"
    assert not timers.waiting


def test_compilers_that_are_waited_for_are_part_of_the_work(stream, clock):
    timers = Timers()
    told = Progress(clock, lambda: stream, timers)
    with told.working("tracing a graph"):
        clock.now += 3
        timers.fire()
        wait(told, clock, 1, 5)
    assert stream.getvalue() == "tsfuser: tracing a graph\ntsfuser: done after 8 s\n"


def test_work_that_fails_is_not_called_done(stream, clock):
    timers = Timers()
    with pytest.raises(KeyError), Progress(clock, lambda: stream, timers).working("tracing a graph"):
        timers.fire()
        raise KeyError
    assert stream.getvalue() == "tsfuser: tracing a graph\n"


def test_the_line_about_work_goes_from_a_terminal(stream, clock):
    stream.terminal = True
    timers = Timers()
    work(Progress(clock, lambda: stream, timers), clock, timers, 7.0)
    assert stream.getvalue() == "\r\033[Ktsfuser: tracing a graph\r\033[K"


def test_a_timer_that_comes_too_late_says_nothing(stream, clock):
    timers = Timers()
    told = Progress(clock, lambda: stream, timers)
    with told.working("tracing a graph"):
        [late] = timers.waiting
    late.function(*late.args)
    assert stream.getvalue() == ""


def test_it_can_be_silenced(stream, clock):
    with options.override(progress=False):
        timers = Timers()
        told = Progress(clock, lambda: stream, timers)
        wait(told, clock, 9, 9)
        work(told, clock, timers, 9)
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
