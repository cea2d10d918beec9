"""The disk cache: what is kept, what is dropped, and which files are used: whole ones of this key that nobody
else can have written."""

import errno
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tsfuser.errors import CompileError, TsfuserWarning
from tsfuser.target import counters, disk_cache
from tsfuser.target.disk_cache import DiskCache

PACKAGE = Path(disk_cache.__file__).parents[1]


@pytest.fixture
def cache(tmp_path):
    return DiskCache(tmp_path / "cache")


@pytest.fixture(autouse=True)
def fresh_counters():
    counters.reset()


def write(text):
    return lambda path: path.write_text(text)


def never(path):
    raise AssertionError(f"{path} is made again")


def warned(run):
    """The result of `run()` and the texts of its warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = run()
    assert all(issubclass(w.category, TsfuserWarning) for w in seen)
    return result, [str(w.message) for w in seen]


def another_user(monkeypatch, *paths):
    """The files become those of another user; who may not give them away becomes another user."""
    if os.geteuid() == 0:
        for path in paths:
            os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


# ---- what is kept


def test_a_file_is_made_once_and_then_hit(cache):
    first = cache.get("key", ".txt", write("made"))
    again = DiskCache(cache.directory).get("key", ".txt", never)
    assert first == again and again.content == b"made"
    assert counters.snapshot() == {"kernels_compiled": 1, "disk_hits": 1, "plans_read": 0, "graphs_read": 0}


def test_other_keys_and_suffixes_are_other_files(cache):
    keys = ("a", ("a",), ("a", 1))
    assert len({cache.get(key, suffix, write("x")).path for key in keys for suffix in (".so", ".cubin")}) == 6


def test_threads_that_ask_at_once_make_it_once(cache):
    barrier = threading.Barrier(8)

    def ask(_):
        barrier.wait()
        return cache.get("key", ".txt", write("made")).content

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {b"made"}
    assert counters.snapshot()["kernels_compiled"] == 1


#: The package without its `__init__`, which takes two seconds to import torch.
WITHOUT_TORCH = f"""
import sys, types
tsfuser = sys.modules["tsfuser"] = types.ModuleType("tsfuser")
tsfuser.__path__ = [{str(PACKAGE)!r}]
from tsfuser.target.disk_cache import DiskCache
"""


def program(source, *arguments, **options):
    """A process that runs `source` with `cache`, which is in the directory of the first argument."""
    source = f"{WITHOUT_TORCH}cache = DiskCache(sys.argv[1])\n{source}"
    command = [sys.executable, "-c", source, *map(str, arguments)]
    return subprocess.Popen(command, text=True, **options)


def test_processes_that_make_the_same_file_at_once_all_read_a_whole_one(cache):
    source = """
for k in range(30):
    assert len(cache.get(k, ".txt", lambda path: path.write_text("x" * 100000)).content) == 100000
"""
    running = [program(source, cache.directory) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert not list(cache.directory.glob("making-*"))


def test_a_child_is_not_kept_waiting_by_what_its_parent_was_making(cache):
    """Only the thread that forks lives on in a child, which no other lets go of a lock."""
    begun, go_on = threading.Event(), threading.Event()

    def make(path):
        begun.set()
        go_on.wait(60)
        path.write_text("made")

    thread = threading.Thread(target=cache.get, args=("key", ".txt", make))
    thread.start()
    begun.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(cache.get("key", ".txt", write("made")).content != b"made")
    status = os.waitpid(child, 0)[1]
    go_on.set()
    thread.join()
    assert status == 0


def test_a_failure_leaves_nothing_behind(cache):
    def fail(path):
        path.write_text("half")
        raise CompileError("no")

    with pytest.raises(CompileError):
        cache.get("key", ".txt", fail)
    assert cache.get("key", ".txt", write("made")).content == b"made"
    assert counters.snapshot() == {"kernels_compiled": 1, "disk_hits": 0, "plans_read": 0, "graphs_read": 0}
    assert not cache._making


def test_the_longest_unused_files_go_first(cache):
    paths = [cache.get(k, ".txt", write("x" * 100)).path for k in range(10)]
    for age, path in enumerate(paths):
        os.utime(path, (1000 - age, 1000 - age))
    cache.get(9, ".txt", never)  # used just now
    cache.limit = 3 * paths[0].stat().st_size
    cache.trim()
    assert [path for path in paths if path.exists()] == [paths[0], paths[1], paths[9]]


def test_all_files_are_looked_at_once_an_hour(cache):
    def made_by_another_process(key):
        other = DiskCache(cache.directory, limit=350)
        return other.get(key, ".txt", write("x" * 100)).path

    first = made_by_another_process(1)
    second = made_by_another_process(2)
    third = made_by_another_process(3)
    # too much, but the first process has just looked
    assert first.exists() and second.exists() and third.exists()
    marker = cache.directory / "trimmed"
    os.utime(marker, (marker.stat().st_mtime - 4000,) * 2)
    os.utime(first, (1000, 1000))
    fourth = made_by_another_process(4)
    assert fourth.exists() and not first.exists()


def test_what_killed_processes_leave_is_deleted_after_an_hour(cache):
    old, new = cache.directory / "making-old", cache.directory / "making-new"
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (1000, 1000))
    cache.trim()
    assert not old.exists() and new.exists()


# ---- whole files of this key


def damaged(content, lengths, flips):
    """Ways in which a file can be broken: cut at `lengths` places, one bit flipped in `flips` places."""
    rng = random.Random(0)
    for length in sorted({0, 1, len(content) - 1, *(rng.randrange(len(content)) for _ in range(lengths))}):
        yield content[:length]
        yield content[:length] + bytes(len(content) - length)  # a machine that crashed leaves zeros
    for _ in range(flips):
        place = rng.randrange(len(content))
        yield content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
    yield content + b"\0"


def test_a_damaged_file_is_made_again(cache, request):
    share = 1 if request.config.getoption("--long") else 5  # each is written to the disk, and made again
    content = random.Random(1).randbytes(20000)
    path = cache.get("key", ".so", lambda path: path.write_bytes(content)).path
    sealed = path.read_bytes()
    for broken in damaged(sealed, 200 // share, 1000 // share):
        path.write_bytes(broken)
        assert cache.get("key", ".so", lambda path: path.write_bytes(content)).content == content
        assert path.read_bytes() == sealed
    assert counters.snapshot()["kernels_compiled"] > 1400 / share


def test_a_file_of_another_key_is_made_again(cache):
    first, second = (cache.get(k, ".txt", write(str(k))) for k in (1, 2))
    shutil.copyfile(second.path, first.path)
    assert cache.get(1, ".txt", write("1")).content == b"1"
    assert cache.get(2, ".txt", never).content == b"2"


def test_a_file_that_is_no_file_is_no_hindrance(cache):
    for k, plant in enumerate((Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/nowhere"))):
        path = cache.get(k, ".txt", write("made")).path
        path.unlink()
        plant(path)
        result, _ = warned(lambda k=k: cache.get(k, ".txt", write("made")))
        assert result.content == b"made"


def test_a_file_larger_than_memory_is_not_read(cache):
    path = cache.get("key", ".txt", write("made")).path
    with open(path, "ab") as file:
        file.truncate(1 << 40)
    assert cache.get("key", ".txt", write("made")).content == b"made"
    assert path.stat().st_size < 1000


def test_a_process_may_be_killed_at_any_moment(cache):
    """Whatever it was doing: whoever comes after it reads whole files only."""
    rng, first = random.Random(0), 1

    def made(k, make=None):
        text = f"{k} " * 100000
        assert cache.get(k, ".txt", make or write(text)).content == text.encode()

    start = time.monotonic()
    made(0)
    of_one = time.monotonic() - start
    for _ in range(20):
        running, at_work = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(at_work, b".")
            for k in itertools.count(first):
                made(k)
        os.read(running, 1)  # a busy machine may start it late
        time.sleep(rng.random() * 6 * of_one)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(running)
        os.close(at_work)
        count = len(list(cache.directory.glob("??/*")))
        for k in range(first, count):
            made(k, never)
        first = count
    assert first > 1 and counters.snapshot()["kernels_compiled"] == 1


# ---- disks that are full or cannot be written


def test_a_directory_that_cannot_be_written_is_replaced_with_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "cache")
    stored, texts = warned(lambda: cache.get("key", ".txt", write("made")))
    assert len(texts) == 1 and "cannot write to" in texts[0] and "TSFUSER_CACHE_DIR" in texts[0]
    assert warned(lambda: cache.get("key", ".txt", never)) == (stored, [])
    assert warned(lambda: cache.get("other", ".txt", write("other")))[1] == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_on_a_full_disk_what_is_there_is_used_and_what_is_new_works(cache, monkeypatch, code):
    kept = cache.get("kept", ".txt", write("kept"))
    real = disk_cache.tempfile.mkstemp

    def full(prefix, dir):
        if Path(dir) == kept.path.parents[1]:
            raise OSError(code, os.strerror(code))
        return real(prefix=prefix, dir=dir)

    monkeypatch.setattr(disk_cache.tempfile, "mkstemp", full)
    other = DiskCache(cache.directory)
    assert warned(lambda: other.get("kept", ".txt", never)) == (kept, [])
    new, texts = warned(lambda: other.get("new", ".txt", write("new")))
    assert new.content == b"new" and len(texts) == 1 and os.strerror(code) in texts[0]
    assert warned(lambda: other.get("new", ".txt", never)) == (new, [])
    assert warned(lambda: other.get("newer", ".txt", write("newer")))[1] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_small_disk_that_is_full(tmp_path):
    command = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", str(tmp_path)]
    if subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this system lets nobody mount anything")
    try:
        cache, texts = DiskCache(tmp_path / "cache"), []
        for k in range(40):  # 20 KB each
            texts += warned(lambda k=k: cache.get(k, ".txt", write(f"{k:05}" * 4000)))[1]
        assert len(texts) == 1 and "No space left on device" in texts[0]
        for k in range(40):
            assert cache.get(k, ".txt", never).content == f"{k:05}".encode() * 4000
        assert not list(tmp_path.glob("cache/making-*"))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_fills_up_while_files_are_written(cache):
    """No file may grow beyond some bytes: each write fails at another place, in the cache and elsewhere."""
    source = """
import resource, warnings
warnings.simplefilter("ignore")
cache.directory
for k in range(40):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000 + 37 * k, resource.RLIM_INFINITY))
    assert cache.get(k, ".txt", lambda path: path.write_bytes(b"x" * 1000)).content == b"x" * 1000
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert program(source, cache.directory).wait() == 0
    for k in range(40):
        assert cache.get(k, ".txt", write("made")).content in (b"x" * 1000, b"made")
    assert not list(cache.directory.glob("making-*"))


def test_without_room_for_temporary_files_it_says_so(cache, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_cache.tempfile, "TemporaryDirectory", full)
    with pytest.raises(CompileError, match="temporary files .*No space left"):
        cache.get("key", ".txt", write("made"))


# ---- whose files are used


@pytest.mark.parametrize("mode", [0o770, 0o757, 0o1777])
def test_a_directory_that_others_can_write_is_not_used(cache, mode):
    planted = cache.get("key", ".txt", write("planted"))
    os.chmod(cache.directory, mode)
    other = DiskCache(cache.directory)
    stored, texts = warned(lambda: other.get("key", ".txt", write("made")))
    assert stored.content == b"made" and stored.path != planted.path
    assert stored.path.parents[1].stat().st_mode & 0o077 == 0
    assert len(texts) == 1 and f"{cache.directory} can be written by other users" in texts[0]
    assert warned(lambda: other.get("other", ".txt", write("made")))[1] == []


def test_a_directory_of_another_user_is_not_used(cache, monkeypatch):
    planted = cache.get("key", ".txt", write("planted"))
    another_user(monkeypatch, cache.directory)
    other = DiskCache(cache.directory)
    stored, texts = warned(lambda: other.get("key", ".txt", write("made")))
    assert stored.content == b"made" and stored.path != planted.path
    assert len(texts) == 1 and "belongs to another user" in texts[0] and "TSFUSER_CACHE_DIR" in texts[0]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_not_used(cache, mode):
    path = cache.get("key", ".txt", write("planted")).path
    os.chmod(path, mode)
    stored, texts = warned(lambda: cache.get("key", ".txt", write("made")))
    assert stored.content == b"made" and len(texts) == 1 and "can be written by other users" in texts[0]
    assert DiskCache(cache.directory).get("key", ".txt", never).content == b"made"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_not_used(cache, monkeypatch):
    path = cache.get("key", ".txt", write("planted")).path
    another_user(monkeypatch, path)
    stored, texts = warned(lambda: cache.get("key", ".txt", write("made")))
    assert stored.content == b"made" and len(texts) == 1 and "belongs to another user" in texts[0]
    assert DiskCache(cache.directory).get("key", ".txt", never).content == b"made"


def test_files_of_root_are_used(cache, monkeypatch):
    """A cache that was filled for all users of a machine."""
    stored = cache.get("key", ".txt", write("made"))
    if stored.path.stat().st_uid != 0:
        pytest.skip("only root has files of root")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert warned(lambda: DiskCache(cache.directory).get("key", ".txt", never)) == (stored, [])


def as_user(number, run):
    """What `run()` returns, a list of texts, in a process of another user."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with open(writer, "w") as out:
            try:
                os.setgroups([])
                os.setegid(number)
                os.seteuid(number)
                out.write("\n".join(run()))
            except BaseException as error:
                out.write(repr(error))
        os._exit(0)
    os.close(writer)
    with open(reader) as found:
        texts = found.read().splitlines()
    os.waitpid(child, 0)
    return texts


@pytest.fixture
def open_folder():
    """A folder that every user can enter, and only root can write."""
    folder = Path(tempfile.mkdtemp(prefix="tsfuser-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("made", ["the folder", "the folder above", "a folder in it", "a file in it"])
def test_what_root_has_made_is_named_with_the_remedy(open_folder, made):
    """As a container, which runs as root, does with a home that is mounted. Work goes on without it."""
    place = open_folder / "above" / "cache"
    mine = DiskCache(place)
    path = mine.get("key", ".txt", write("made")).path
    culprit = {"the folder": place, "the folder above": place.parent, "a folder in it": path.parent}.get(
        made, path
    )
    for other in (open_folder / "above", place, path.parent, path):
        if other != culprit and culprit not in other.parents:
            os.chown(other, 12345, 12345)
    if made == "the folder above":
        shutil.rmtree(place)

    def run():
        cache = DiskCache(place)
        stored, texts = warned(lambda: cache.get("key", ".txt", write("again")))
        again, none = warned(lambda: cache.get("key", ".txt", never))
        return [stored.content.decode(), again.content.decode(), *texts, *none]

    first, second, *texts = as_user(12345, run)
    assert first == second == "again" and len(texts) == 1, (first, second, texts)
    [text] = texts
    assert f"{culprit} belongs to root, as where a container has made it" in text
    assert f"`sudo chown -R 12345 {culprit}` makes it yours, or set TSFUSER_CACHE_DIR to a directory" in text


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077])
def test_what_it_makes_it_uses_whatever_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        stored = DiskCache(tmp_path / "a" / "b").get("key", ".txt", write("made"))
        assert warned(lambda: DiskCache(tmp_path / "a" / "b").get("key", ".txt", never)) == (stored, [])
    finally:
        os.umask(before)
    for path in (stored.path, stored.path.parent, stored.path.parents[1]):
        assert path.stat().st_mode & 0o077 == 0


def test_the_directory_stays_where_it_was_when_the_process_goes_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = DiskCache("here")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    assert cache.get("key", ".txt", write("made")).path.parents[1] == tmp_path / "here"
