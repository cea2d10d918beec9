"""Philox gives the published numbers, and a vector of them is what its lanes give one by one."""

import pytest
import torch

from kit import harness

#: counter, key and result of the known-answer tests of Random123 for philox4x32-10
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
WIDTHS = (1, 2, 4, 8, 16)

SOURCE = """#include "tsfuser.h"
struct Args_block { int32_t* y; uint64_t key; uint64_t low; uint64_t high; };
KERNEL(block, Args_block, 1) {
  const philox_block drawn = philox(keys_of(args.key), args.low, args.high);
  for (int i = 0; i < 4; ++i) args.y[i] = static_cast<int32_t>(drawn.words[i]);
}
""" + "\n".join(
    f"""struct Args_{t}_{n} {{ {t}* y; random_state state; int64_t stream; int64_t first; }};
KERNEL(vector_{t}_{n}, Args_{t}_{n}, 128) {{
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * {n};
  const vec<{t}, {n}> u = uniform<{t}, {n}>(start_of(args.state), args.stream, args.first + i);
  for (int lane = 0; lane < {n}; ++lane) args.y[i + lane] = u[lane];
}}
KERNEL(scalar_{t}_{n}, Args_{t}_{n}, 128) {{
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * {n};
  for (int lane = 0; lane < {n}; ++lane)
    args.y[i + lane] = uniform<{t}>(start_of(args.state), args.stream, args.first + i + lane);
}}"""
    for t in ("float", "double")
    for n in WIDTHS
)
DTYPES = {"float": torch.float32, "double": torch.float64}


def signed(number, bits=64):
    return number - (1 << bits) if number >> (bits - 1) else number


def pair(low, high):
    return signed(low | high << 32)


@pytest.mark.parametrize("mode", harness.HERE)
@pytest.mark.parametrize("counter, key, result", KNOWN, ids=["zeros", "ones", "pi"])
def test_known_answers(counter, key, result, mode):
    y = torch.zeros(4, dtype=torch.int32, device=harness.device(mode))
    harness.Kernel(SOURCE, "block", mode)(y, pair(*key), pair(*counter[:2]), pair(*counter[2:]), grid=1)
    assert y.tolist() == [signed(word, 32) for word in result]


def draw(kind, ctype, n, mode, seed=5, offset=8, within=0, captured=0, stream=1, first=0, count=12):
    y = torch.full((count * n,), -1, dtype=DTYPES[ctype], device=harness.device(mode))
    block = 1 if mode == "host" else 4
    kernel = harness.Kernel(SOURCE, f"{kind}_{ctype}_{n}", mode)
    kernel(y, seed, offset, within, captured, stream, first, grid=count // block, block=(block, 1))
    return y


@pytest.mark.parametrize("mode", harness.HERE)
@pytest.mark.parametrize("first", [0, 1, 2, 3, (1 << 34) + 5])
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("ctype", DTYPES)
def test_a_vector_is_its_lanes(ctype, n, first, mode):
    assert torch.equal(
        draw("vector", ctype, n, mode, first=first), draw("scalar", ctype, n, mode, first=first)
    )


@pytest.mark.parametrize("mode", harness.HERE)
@pytest.mark.parametrize("ctype", DTYPES)
def test_numbers_do_not_depend_on_where_a_walk_begins(ctype, mode):
    whole = draw("vector", ctype, 4, mode)
    assert torch.equal(whole[5:29], draw("vector", ctype, 2, mode, first=5))


@pytest.mark.parametrize("mode", harness.HERE)
@pytest.mark.parametrize("ctype", DTYPES)
def test_the_stream_is_the_offset_by_four(ctype, mode):
    """So a generator that advances by 4 an op hands out disjoint numbers."""
    one = draw("vector", ctype, 4, mode, offset=8, stream=1)
    assert torch.equal(one, draw("vector", ctype, 4, mode, offset=12, stream=0))
    for other in (dict(stream=0), dict(stream=2), dict(seed=6), dict(first=1 << 34)):
        assert not (one == draw("vector", ctype, 4, mode, **other)).any()


@pytest.mark.parametrize("mode", harness.HERE)
@pytest.mark.parametrize("ctype, bits", [("float", 24), ("double", 53)])
def test_the_first_numbers(ctype, bits, mode):
    """From the words of the first known answer: the upper bits, below 1."""
    words = KNOWN[0][2]
    if ctype == "double":
        words = [words[1] << 32 | words[0], words[3] << 32 | words[2]]
    width = 32 if ctype == "float" else 64
    expected = [(word >> (width - bits)) / 2**bits for word in words]
    assert draw("scalar", ctype, 4, mode, seed=0, offset=0, stream=0)[: len(words)].tolist() == expected


@pytest.mark.parametrize("mode", [m for m in harness.HERE if m != "host"])
@pytest.mark.parametrize("n", [1, 4])
def test_a_captured_kernel_reads_seed_and_offset_from_memory(n, mode):
    """So that replays of a CUDA graph, before which torch changes the memory, draw other numbers."""
    memory = torch.tensor([6, 8], dtype=torch.int64, device=harness.device(mode))
    for offset in (8, 16):
        memory[1] = offset
        found = draw(
            "vector", "float", n, mode, memory.data_ptr(), memory.data_ptr() + 8, within=12, captured=1
        )
        assert torch.equal(found, draw("vector", "float", n, mode, 6, offset + 12))


@pytest.mark.parametrize("arch", harness.ARCHS)
def test_compiles_for(arch):
    harness.compile_for(SOURCE, "philox", arch)
