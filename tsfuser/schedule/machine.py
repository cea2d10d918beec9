"""What schedulers and lowering know about the machine for which they plan.

In: what the driver says about a device. Out: a `Machine`. `HOST` is the record for CPU tensors. `GPU` is that
of an H200, for which kernels are planned if there is no driver. Most fields only steer choices. But a kernel
is wrong if a field promises more memory than a multiprocessor has, or more blocks at a time than can wait for
each other. Example:

    device = replace(GPU, name="Tesla T4", capability=75, multiprocessors=40, ...)
    proposal = propose(call, segment, device)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A device. Schedulers ask what it can do, not what it is called."""

    name: str
    # the device
    capability: int = 0  # compute capability, 90 for 9.0; 0 if it has none
    multiprocessors: int = 1
    registers: int = 65536  # 32-bit registers of a multiprocessor
    shared_per_multiprocessor: int = 0  # bytes of shared memory
    shared_per_block: int = 0  # bytes of shared memory that one block gets at most
    shared_reserved: int = 1024  # bytes of shared memory that each block takes besides
    threads_per_multiprocessor: int = 1
    l2: int = 0  # bytes of the last cache
    bandwidth: float | None = None  # bytes per second of its memory; None if unknown
    # blocks
    block_threads: int = 1024  # at most; 1: blocks have no threads that could combine
    cluster_blocks: int = 0  # of a cluster at most; 0: schedulers make no clusters
    any_clusters: bool = False  # schedulers make clusters wherever a row fits, not only where they are faster
    vectorises_loops: bool = False  # its compiler makes vectors of loops, which need no alignment
    # it has the instructions of which fast forms of ops are made (`symbols.Fast`)
    has_fast_forms: bool = True
    # measured on an H200, and taken for every GPU
    flight: int = 16  # bytes of input that one thread should have in flight: more costs registers only
    access: int = 16  # bytes of the widest memory access
    threads: int = 128  # of a pointwise block
    waves: int = 4  # blocks per multiprocessor that hide latency
    # of the host
    chunk: int = 4096  # elements on which a block works
    lanes: int = 32  # elements that a reduction loop takes side by side, to hide the latency of an addition
    task: int = 0  # elements that make a task of torch's thread pool (its grain size); 0: there are no tasks
    # of any kernel
    parameter_bytes: int = 4096  # of its parameters, at most

    @property
    def has_threads(self) -> bool:
        """Whether a block has several threads, which can combine through its shared memory."""
        return self.block_threads > 1

    @property
    def computes_fast(self) -> bool:
        """Whether a random number, or a few instructions, take less time than a byte of memory traffic. On a
        host they take many times as long."""
        return self.has_threads

    @property
    def overlaps_launches(self) -> bool:
        """Whether a kernel may be set up while the one before it runs."""
        return self.capability >= 90

    @property
    def has_clusters(self) -> bool:
        """Whether blocks can combine through each other's shared memory."""
        return self.capability >= 90

    @property
    def largest_cluster(self) -> int:
        """Blocks of a cluster that is as large as this chip has room for; 0: schedulers make no clusters."""
        large = self.cluster_blocks and self.capability in LARGE_CLUSTERS
        return CLUSTER_BLOCKS if large else self.cluster_blocks


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
#: `multiprocessors` and `waves` give 8 blocks: torch's pool may have more threads, but a few blocks for each
#: balance their load.
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
LARGE_CLUSTERS = (90, 100, 103)  # compute capabilities of chips that have room for clusters of 16 blocks
EXCHANGED = 32768  # bytes of shared memory that the threads of a block may exchange; every GPU has 48 KB
MAILBOX_BYTES = 16  # of shared memory, in which a block of a cluster counts what others send it


def column_bytes(accumulator: int, columns: int, threads: int) -> int:
    """Bytes of shared memory in which the threads of a block combine one accumulator per column, of
    `accumulator` bytes: a slot for each warp, and one for the result."""
    return -(-accumulator * columns * (threads // 32 + 1) // 16) * 16
