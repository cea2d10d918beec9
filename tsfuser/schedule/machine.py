"""What schedulers know of the machine they plan for.

In: the kind of device. Out: a `Machine`. The numbers are those of the H200 where a GPU is meant (132
multiprocessors, 4.3 TB/s measured). They steer choices and never change results, so one record serves all
GPUs; only what bounds how many blocks can wait for each other is that of the device: its number of
multiprocessors, and how much shared memory and how many threads these have.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """`kind` is `gpu` or `host`. `flight`: bytes of input that one thread should have under way to cover
    memory latency (measured: more costs registers and gains nothing); `access`: bytes of its widest memory
    access; `threads`: of a block; `chunk`: elements that a host block works on; `lanes`: elements that a loop
    of the host's reductions takes side by side, enough to hide how long an addition takes; `registers`, bytes
    of `shared` memory and threads (`crowd`) that a multiprocessor has room for; `task`: elements that make a
    task of the host's thread pool (torch's grain size)."""

    kind: str
    multiprocessors: int = 132
    flight: int = 16
    access: int = 16
    threads: int = 128
    registers: int = 65536
    shared: int = 233472
    crowd: int = 2048
    chunk: int = 4096
    task: int = 32768
    lanes: int = 32


GPU = Machine("gpu")
HOST = Machine("host")
EXCHANGED = 32768  # bytes of shared memory in which a block exchanges at a time at most; every GPU has 48 KB


def column_bytes(accumulator: int, columns: int, threads: int) -> int:
    """Bytes of shared memory in which the threads of a block combine accumulators of so many bytes, one a
    column: what each warp has, and what all have together."""
    return -(-accumulator * columns * (threads // 32 + 1) // 16) * 16
