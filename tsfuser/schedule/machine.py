"""What schedulers and lowering know of the machine they plan for.

In: what the driver tells of a device. Out: a `Machine`. `HOST` is the record of CPU tensors, `GPU` that of an
H200, for which kernels are planned where there is no driver. A record steers choices and never changes
results, but for what bounds how many blocks can wait for each other and what fits on a multiprocessor.
Example:

    device = replace(GPU, name="Tesla T4", capability=75, multiprocessors=40, ...)
    proposal = propose(call, segment, device)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A device. Schedules ask for what it can do, not for what it is called.

    Of the device itself: `capability` (compute capability, 90 for 9.0; 0 where there is none),
    `multiprocessors`, and what each has room for: `registers` (32-bit), bytes of shared memory
    (`shared_per_multiprocessor`; one block gets `shared_per_block` at most, and a block takes
    `shared_reserved` for itself) and threads (`threads_per_multiprocessor`); `l2` (bytes of the last cache),
    `bandwidth` (bytes a second of its memory, None where unknown).

    Of what a block is: `block_threads` (at most; 1: blocks have no threads that could combine),
    `cluster_blocks` (of a cluster at most; 0: schedules make none; `any_clusters`: they make them wherever a
    row fits, not only where they are faster), `vectorises_loops` (its compiler makes
    vectors of loops, for which no address is wrong), `has_fast_forms` (it has the instructions that fast
    forms of ops are made of, `ir.symbols.Fast`).

    Measured on an H200, and taken for all: `flight`: bytes of input that one thread should have in flight to
    cover memory latency (more costs registers and gains nothing); `access`: bytes of its widest memory
    access; `threads`: of a pointwise block; `waves`: blocks a multiprocessor that hide latency. Of the host:
    `chunk`: elements that a block works on; `lanes`: elements that a loop of reductions takes side by side,
    enough to hide how long an addition takes; `task`: elements that make a task of torch's thread pool (its
    grain size), 0 where blocks need no tasks.

    `parameter_bytes`: of a kernel's parameters, at most."""

    name: str
    capability: int = 0
    multiprocessors: int = 1
    registers: int = 65536
    shared_per_multiprocessor: int = 0
    shared_per_block: int = 0
    shared_reserved: int = 1024
    threads_per_multiprocessor: int = 1
    l2: int = 0
    bandwidth: float | None = None
    block_threads: int = 1024
    cluster_blocks: int = 0
    any_clusters: bool = False
    vectorises_loops: bool = False
    has_fast_forms: bool = True
    flight: int = 16
    access: int = 16
    threads: int = 128
    waves: int = 4
    chunk: int = 4096
    lanes: int = 32
    task: int = 0
    parameter_bytes: int = 4096

    @property
    def has_threads(self) -> bool:
        """Whether a block has threads, which combine through its shared memory."""
        return self.block_threads > 1

    @property
    def overlaps_launches(self) -> bool:
        """Whether a kernel may be set up while the one before it runs."""
        return self.capability >= 90

    @property
    def has_clusters(self) -> bool:
        """Whether blocks can combine through each other's shared memory."""
        return self.capability >= 90


GPU = Machine(
    "NVIDIA H200",
    capability=90,
    multiprocessors=132,
    shared_per_multiprocessor=233472,
    shared_per_block=232448,
    threads_per_multiprocessor=2048,
    l2=62914560,
    bandwidth=4.8e12,
)
#: `multiprocessors` and `waves`: torch's pool has more threads, but few blocks a thread even them out.
HOST = Machine(
    "host",
    multiprocessors=4,
    waves=2,
    block_threads=1,
    vectorises_loops=True,
    has_fast_forms=False,
    threads=1,
    task=32768,
)
CLUSTER_BLOCKS = 16  # of a cluster at most, on any device
PORTABLE_CLUSTER_BLOCKS = 8  # of a cluster that every device with clusters has room for
EXCHANGED = 32768  # bytes of shared memory in which a block exchanges at a time at most; every GPU has 48 KB


def column_bytes(accumulator: int, columns: int, threads: int) -> int:
    """Bytes of shared memory in which the threads of a block combine accumulators of so many bytes, one a
    column: what each warp has, and what all have together."""
    return -(-accumulator * columns * (threads // 32 + 1) // 16) * 16
