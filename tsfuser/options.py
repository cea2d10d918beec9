"""Every option, in one table; and the state of the live knobs.

In: environment variables, each read once: nvFuser's when the first graph comes, as nvFuser did, the others
when this module is imported. Out: `get(name)` and the short questions below it, for all layers. Example: with
`PYTORCH_NVFUSER_DUMP=cuda_kernel` set, `options.dump("cuda_kernel")` is True.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import option_parsers as parsers
from .errors import warn
from .option_parsers import OptionError


def _inert(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "")


#: The words of each list, and what they do here. Those with "" belong to parts of nvFuser that have no
#: counterpart: they are accepted, with a note. `print_args` is the word of nvFuser's README for
#: `kernel_args`.
DUMP = {
    "cuda_kernel": "The source of each kernel.",
    "cuda_full": "The source of each kernel, with the runtime headers in it, as the compiler sees it.",
    "cuda_to_file": "Writes the source of the N-th kernel to `__tmp_kernelN.cu` in the working directory.",
    "ptx": "Writes the PTX of the N-th CUDA kernel to `__tmp_kernelN.ptx`.",
    "cubin": "Writes the machine code of the N-th CUDA kernel to `__tmp_kernelN.cubin`.",
    "fusion_ir": "Each group as a Fusion, the program of tensor operations that kernels are made from.",
    "segmented_fusion": "The segments of each Fusion; each becomes a kernel.",
    "scheduler_params": "The parameters that the scheduler chose for each segment, and its schedule.",
    "kernel_ir": "Each kernel as a loop nest, before it is written as C++.",
    "launch_param": "Allocations, grids, blocks, shared memory, and the registers of a thread.",
    "fusion_args": "The arguments of the first call of each class.",
    "kernel_args": "The same as `fusion_args`.",
    "print_args": "The same as `fusion_args`.",
    "dump_eff_bandwidth": "Time and bandwidth of each launch. Waits for the device after each.",
    **_inert(
        "fusion_ir_math fusion_ir_presched ca_map debug_info segmenter_logging draw_segmented_fusion "
        "ptxas_verbose buffer_reuse_verbose parallel_dimensions halo perf_debug_verbose python_definition "
        "python_frontend_debug transform_propagator bank_conflict sync_map lower_verbose expr_simplify"
    ),
}
DISABLE = {
    "fallback": "A group that cannot run fused raises, with its graph, instead of running unfused; so does a "
    "pass that fails.",
    "fma": "No fused multiply-add in CUDA kernels.",
    "clusters": "No blocks of CUDA kernels combine in each other's shared memory.",
    "overlap": "No programmatic dependent launch: no CUDA kernel starts while the one before it runs.",
    "settled_branches": "Scripted functions keep branches that follow from sizes and attributes, and are "
    "fused between them.",
    "recompute": "The backward reads all that autodiff saves, and computes nothing again.",
    **_inert(
        "arch_check compile_to_sass grouped_grid_welford_outer_opt index_hoist nvtx predicate_elimination "
        "welford_vectorization magic_zero"
    ),
}
ENABLE = {
    "clusters": "Blocks of CUDA kernels combine in each other's shared memory wherever that is possible, not "
    "only where it was faster on an H200. Compute capability 9.0 and later.",
    "complex": "Always on: complex numbers are fused.",
    "kernel_db": "Always on: kernels are kept on disk.",
    "linear_decomposition": "The bias of a `linear` of four dims or more is added in a group.",
    "conv_decomposition": "The bias of a `conv2d` is added in a group.",
    "eager_random": "Random numbers in groups on CUDA are eager's, bit for bit. On the CPU, random ops are "
    "left to torch.",
    "fast_math": "On CUDA, all ops of float32 have their fast forms ([which](ops.md#fast-forms)).",
    "keep_inputs": "Scripted training keeps tensors that the program is given, instead of those that eager "
    "keeps, where then less is written and read: of `gelu(x + bias)` x, and not the sum. To write to such a "
    "tensor before the backward raises torch's error, as it does with torch.compile.",
    "joint_graph": "Experimental: straight runs of ops in scripted functions and modules are "
    "differentiated by tsfuser's own rules instead of TorchScript's autodiff. What the rules or the cut "
    "cannot take stays as it is.",
    "typed_joint": "Experimental: what a program compiled by torch.compile saves is chosen by the cut of "
    "`joint_graph`, not by torch's. What that cannot take stays as it is.",
    "graph_op_fusion": "Always on: `index_select` and `gather` are fused.",
    **_inert("kernel_profile warn_register_spill"),
}

#: The words that do something here, by option.
ACTING = {
    name: frozenset(word for word, what in words.items() if what)
    for name, words in (("dump", DUMP), ("disable", DISABLE), ("enable", ENABLE))
}


@dataclass(frozen=True)
class Option:
    """One row: `default` is what an unset variable means, `parse` turns the variable's text into a value."""

    name: str
    variable: str
    default: Any
    parse: Callable[[str], Any]
    doc: str

    @property
    def is_late(self) -> bool:
        """Whether it is read when the first graph comes. Programs for nvFuser set its variables after their
        imports, and a mistake in one of them must not end a program that runs already."""
        return self.variable.startswith("PYTORCH_NVFUSER_")


TABLE = (
    Option("dump", "PYTORCH_NVFUSER_DUMP", {}, parsers.words(DUMP), "What to print."),
    Option("disable", "PYTORCH_NVFUSER_DISABLE", {}, parsers.words(DISABLE), "Parts to switch off."),
    Option("enable", "PYTORCH_NVFUSER_ENABLE", {}, parsers.words(ENABLE), "Parts to switch on."),
    Option("no_fallback", "PYTORCH_NVFUSER_DISABLE_FALLBACK", 0, parsers.number,
           "The old form of PYTORCH_NVFUSER_DISABLE=fallback: an integer other than 0."),
    Option("on_at_import", "PYTORCH_JIT_ENABLE_NVFUSER", False, parsers.switch,
           "Whether the import switches fusion on: 0 and OFF mean no, anything else yes."),
    Option("use_nnc", "PYTORCH_JIT_USE_NNC_NOT_NVFUSER", False, parsers.strict_switch,
           "1 or ON keeps fusion off, whatever else switches it on."),
    Option("log_levels", "PYTORCH_JIT_LOG_LEVEL", {}, parsers.log_levels,
           "Logs on stderr, in torch's grammar: file stems, separated by colons, each with a > per level. "
           "graph_fuser: graphs before and after; >graph_fuser: after each pass; >partition: why nodes are "
           "not fused; parser: groups and what is made of them; manager: which group gets a plan; "
           ">kernel_cache: plans; >>kernel_cache: each run of a group."),
    Option("max_registers", "PYTORCH_NVFUSER_MAX_REG_COUNT", None,
           parsers.number_from(1, 255, "a number of registers"),
           "The most registers that a thread of a CUDA kernel may have, 1 to 255."),
    Option("opt_level", "PYTORCH_NVFUSER_JIT_OPT_LEVEL", None, parsers.number_from(0, 4, "a level"),
           "How much ptxas optimises CUDA kernels, 0 to 4; its own default is 3."),
    Option("trace", "PYTORCH_NVFUSER_TRACE", "", str,
           "Accepted with a note: torch.profiler shows the runs of groups and their kernels."),
    Option("library_path", "TORCH_NVFUSER_LIBRARY_PATH", "", str,
           "Accepted with a note: there is no library to load."),
    Option("cache_dir", "TSFUSER_CACHE_DIR", Path("~/.cache/tsfuser"), Path,
           "Where compiled kernels and plans are kept; processes may share it."),
    Option("stored_plans", "TSFUSER_STORED_PLANS", True, parsers.switch,
           "Whether plans, and what was found out about ops, are kept beside the kernels, so that the next "
           "process does none of that again."),
    Option("stored_graphs", "TSFUSER_STORED_GRAPHS", True, parsers.switch,
           "Whether graphs that torch.compile has traced and grouped, and what is made of scripted programs, "
           "are kept beside the plans, so that the next process does not make them again."),
    Option("cache_limit", "TSFUSER_CACHE_LIMIT", 1 << 30, parsers.size,
           "How large the files of the cache may become, in bytes, or as in 500K, 200M, 4G: then those that "
           "were not used for the longest time are deleted."),
    Option("compile", "TSFUSER_COMPILE", "wait", parsers.one_of("wait", "background"),
           "What a call does whose group has no kernels yet: wait for the compiler, or, with background, run "
           "unfused, as later calls do until the kernels are there."),
    Option("compile_timeout", "TSFUSER_COMPILE_TIMEOUT", 120,
           parsers.number_from(1, 1_000_000, "a number of seconds"),
           "The seconds that the compiler of a kernel may take. A compiler that takes longer is ended, "
           "and its group runs unfused."),
    Option("progress", "TSFUSER_PROGRESS", True, parsers.switch,
           "Whether a wait of more than 2 s for tracing, planning or compilers is shown on stderr: by a line "
           "that changes in a terminal, by a line at the begin and one at the end in a log."),
    Option("host_launch", "TSFUSER_HOST_LAUNCH", "block",
           parsers.one_of("block", "fibers", "fibers_races", "fibers_memory"),
           "How kernels for CPU tensors run: block is a loop over blocks; fibers, for tests, the launch "
           "shape of CUDA; fibers_races and fibers_memory end the program at a race between threads, and "
           "at an access outside of all tensors (with g++; the latter with its libasan.so preloaded; races "
           "between blocks are seen with OMP_NUM_THREADS=1)."),
)  # fmt: skip


def read(environ: Mapping[str, str], rows: Iterable[Option] = TABLE) -> dict[str, Any]:
    """The value of each option, by name; an empty variable counts as unset. Raises OptionError, with the
    variable's name, on text that does not parse."""
    values = {}
    for option in rows:
        text = environ.get(option.variable, "").strip()
        try:
            values[option.name] = option.parse(text) if text else option.default
        except OptionError as error:
            raise OptionError(f"{option.variable}: {error}", error.rest) from None
    return values


def read_late(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The values of the options that are read late, without what does not parse, and sentences about that."""
    values: dict[str, Any] = {}
    mistakes = []
    for option in TABLE:
        if option.is_late:
            try:
                values |= read(environ, (option,))
            except OptionError as error:
                values[option.name] = option.default if error.rest is None else error.rest
                mistakes.append(f"ignored: {error}")
    return values, mistakes


def inert(values: Mapping[str, Any]) -> list[str]:
    """The chosen words and variables that do nothing here, as `PYTORCH_NVFUSER_DUMP=halo`."""
    found = []
    for row in TABLE:
        if row.name in ACTING:
            words = [word for word in values.get(row.name, ()) if word not in ACTING[row.name]]
            found += [f"{row.variable}={word}" for word in words]
        elif row.name in ("trace", "library_path") and values.get(row.name):
            found.append(row.variable)
    return found


#: Variables of ours that are no options: of the build of C++ programs, and of tests.
_OTHER_VARIABLES = ("TSFUSER_PYTHON", "TSFUSER_TEST_FIBERS")


def unknown(environ: Mapping[str, str], prefix: str) -> list[str]:
    """A sentence about each variable with the prefix that is none of ours."""
    known = [row.variable for row in TABLE]
    return [
        f"{name} is no option of tsfuser{parsers.did_you_mean(name, known, prefix)}"
        for name in sorted(environ)
        if name.startswith(prefix) and name not in known and name not in _OTHER_VARIABLES
    ]


def _warn(values: Mapping[str, Any], mistakes: Iterable[str]) -> None:
    unused = inert(values)
    notes = [f"accepted, but without a meaning in tsfuser: {', '.join(unused)}"] if unused else []
    for text in (*mistakes, *notes):
        warn(text)


_values = read(os.environ, [option for option in TABLE if not option.is_late])
_warn(_values, unknown(os.environ, "TSFUSER_"))
_read = threading.Event()  # set when the late options are read
_reading = threading.RLock()  # held meanwhile
_waiting: list[Callable[[], None]] = []  # registry: what is to be done once they are read


def when_read(function: Callable[[], None]) -> None:
    """Has `function` called when the late options are read, before any graph is looked at."""
    _waiting.append(function)


def first_graph() -> None:
    """Reads the late options; only the first call does anything. A front end calls it when a graph comes."""
    if _read.is_set():
        return
    with _reading:
        if _read.is_set():
            return
        values, mistakes = read_late(os.environ)
        _values.update(values)
        while _waiting:
            _waiting.pop()()
        _read.set()
    _warn(values, [*mistakes, *unknown(os.environ, "PYTORCH_NVFUSER_")])


def get(name: str) -> Any:
    """The value of the option `name`."""
    if name not in _values:
        first_graph()
    return _values[name]


@contextlib.contextmanager
def override(**changed: Any) -> Iterator[None]:
    """Set options for a while, for tests: `with override(host_launch="fibers"): ...`."""
    known = [option.name for option in TABLE]
    unknown = changed.keys() - set(known)
    if unknown:
        raise OptionError(f"unknown options {sorted(unknown)}; known are: {', '.join(known)}")
    before = {name: get(name) for name in changed}
    _values.update(changed)
    try:
        yield
    finally:
        _values.update(before)


def enabled(word: str) -> bool:
    """Whether PYTORCH_NVFUSER_ENABLE asks for `word`."""
    return word in get("enable")


def dump(word: str) -> bool:
    """Whether PYTORCH_NVFUSER_DUMP asks for `word`."""
    if word not in DUMP:
        raise OptionError(f"{word!r} is not a dump option")
    return word in get("dump")


def disabled(word: str) -> bool:
    """Whether PYTORCH_NVFUSER_DISABLE names `word`."""
    if word not in DISABLE:
        raise OptionError(f"{word!r} is not a disable option")
    return word in get("disable")


def fallback_enabled() -> bool:
    """Whether a group that cannot be fused, or fails, runs unfused instead of raising."""
    return not disabled("fallback") and not get("no_fallback")


def cache_dir() -> Path:
    """Where compiled kernels are kept."""
    try:
        return _values["cache_dir"].expanduser()
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / f"tsfuser-{os.geteuid()}"


def host_launch() -> str:
    """`block`, `fibers`, or fibers that check themselves."""
    return _values["host_launch"]


@dataclass
class State:
    """What the knobs change while a program runs. `enabled` is None until someone sets it."""

    enabled: bool | None = None
    single_node_mode: bool = False
    horizontal_mode: bool = True
    guard_mode: bool = True
    background: bool | None = None
    skip_kinds: set[str] = field(default_factory=set)


state = State()


def in_background() -> bool:
    """Whether groups that are made now wait for no compiler: what was last set, then TSFUSER_COMPILE."""
    return get("compile") == "background" if state.background is None else state.background


def fusion_enabled() -> bool:
    """nvFuser's precedence: PYTORCH_JIT_USE_NNC_NOT_NVFUSER, then what was last set, then
    PYTORCH_JIT_ENABLE_NVFUSER; else off, where nvFuser was on: importing tsfuser changes no program."""
    if _values["use_nnc"]:
        return False
    return _values["on_at_import"] if state.enabled is None else state.enabled
