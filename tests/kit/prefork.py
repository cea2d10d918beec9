"""Runs Python programs as processes of their own, without each of them importing torch, which takes 2 s.

One process a test run imports torch, and nothing of tsfuser, and forks for each program: the child takes over
the arguments, environment, folder and output of the program, and runs it as `__main__`. Another process has
imported what torch.compile needs, too, which takes as long again, and forks for the programs that name it.
Then the child waits for its threads and calls what is registered with `atexit`, as Python does; that Python
takes itself and all of torch apart, which takes .2 s, is left to programs with `whole_end`.
Example:

    done = run(["program.py", "3"], env={**os.environ, "PYTORCH_NVFUSER_DUMP": "cuda_kernels"})
    done.returncode, done.stdout, done.stderr

A program whose environment says something that torch or Python reads when it starts gets a Python of its own.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import types

#: Beginnings of the variables that torch, its libraries or Python read when they start.
READ_AT_START = (
    "TORCH",
    "PYTORCH_JIT",
    "OMP_",
    "MKL_",
    "LD_",
    "MALLOC_",
    "GLIBC_",
    "PYTHON",
    "CUDA_",
    "ASAN_",
)
#: They begin so, but are read later: the child puts the first into sys.path, torch and tsfuser read the
#: others when they first need them.
READ_LATER = {
    "PYTHONPATH",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTORCH_JIT_LOG_LEVEL",
    "PYTORCH_JIT_ENABLE_NVFUSER",
    "PYTORCH_JIT_USE_NNC_NOT_NVFUSER",
}

#: What torch imports when it first compiles a function.
COMPILES = ("torch._dynamo.backends.debugging", "torch._inductor.scheduler", "torch.export._trace")


def run(arguments, env=None, cwd=None, timeout=300, whole_end=False):
    """A `subprocess.CompletedProcess` of `python *arguments`: a file, or `-c` and a program, or `-m` and a
    module, with its arguments. `whole_end`: it ends with all that Python does. Raises
    `subprocess.TimeoutExpired`."""
    env = dict(os.environ if env is None else env)
    command = [sys.executable, *map(str, arguments)]
    started = {name: os.environ.get(name) for name in {*env, *os.environ} if name.startswith(READ_AT_START)}
    own = any(env.get(name) != value for name, value in started.items() if name not in READ_LATER)
    if own or not (server := _server(_compiles(arguments, cwd or ""))).forks:
        return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout)
    with tempfile.TemporaryDirectory(prefix="tsfuser-prefork-") as folder:
        outputs = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        request = [list(map(str, arguments)), env, os.fspath(cwd or os.getcwd()), outputs, whole_end]
        status = server.run(request, timeout)
        said = []
        for path in outputs:
            with open(path) as file:
                said.append(file.read())
    return subprocess.CompletedProcess(arguments, status, *said)


def _compiles(arguments, cwd):
    """Whether a program, or a file that it is given, names torch.compile."""
    for text in map(str, arguments):
        path = os.path.join(cwd, text)
        if os.path.isfile(path):
            with open(path, errors="replace") as file:
                text = file.read()
        if "torch.compile" in text:
            return True
    return False


@functools.cache
def _server(compiles):
    return _Server(compiles)


class _Server:
    """The process that forks. Started when first asked; ends with its standard input. `forks`: its imports
    have not asked the driver for its devices, after which no child could use them."""

    def __init__(self, compiles):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *COMPILES[: compiles * len(COMPILES)]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        atexit.register(self._process.stdin.close)
        self.forks = self._process.stdout.readline().strip() == "True"

    def run(self, request, timeout):
        """The exit status of a program; negative where a signal ended it."""
        print(json.dumps(request), file=self._process.stdin, flush=True)
        child = int(self._process.stdout.readline())
        late = threading.Timer(timeout, os.kill, (child, signal.SIGKILL))
        late.start()
        status = int(self._process.stdout.readline())
        if not late.is_alive():
            raise subprocess.TimeoutExpired(request[0], timeout)
        late.cancel()
        return status


def _next_program():
    """Serves requests; returns in the children alone: what to run."""
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            return request
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()


def _become(arguments, env, cwd, outputs):
    """Makes this process that of a program."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, path in zip((1, 2), outputs):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    first = os.path.dirname(os.path.abspath(arguments[0])) if arguments[0][0] != "-" else cwd
    sys.path[0:1] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = arguments if arguments[0][0] != "-" else arguments[1:]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    return main.__dict__


def _fits(torch):
    """Whether a child could use CUDA."""
    child = os.fork()
    if child == 0:
        os._exit(bool(torch.cuda._is_in_bad_fork()))
    return os.waitpid(child, 0)[1] == 0


def _main():
    import torch

    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.collect()
    print(_fits(torch), flush=True)
    gc.freeze()  # else a child that ends looks through all of torch, in pages that it has to copy for that
    arguments, *others, whole_end = _next_program()
    names = _become(arguments, *others)
    if whole_end:
        _execute(arguments, names)
        return
    status = 0
    try:
        _execute(arguments, names)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and status is not end.code:
            print(end.code, file=sys.stderr)
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        file.flush()
    ctypes.CDLL(None).fflush(None)  # what C++ has printed
    os._exit(status & 255)


def _execute(arguments, names):
    if arguments[0] == "-m":
        import runpy

        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv[0] = "-c"
        exec(compile(arguments[1], "<string>", "exec"), names)
    else:
        names["__file__"] = arguments[0]
        with open(arguments[0], "rb") as file:
            exec(compile(file.read(), arguments[0], "exec"), names)


if __name__ == "__main__":
    _main()
