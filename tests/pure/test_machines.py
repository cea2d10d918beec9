"""Kernels are planned for the device that is there: made-up machines with the limits of real ones."""

import functools
from dataclasses import replace

import pytest

from kit.programs import add, build, check_kernel, kernels, relu, stages, tensor, total
from kit.walk import planned, walk
from tsfuser.lower.pipeline import lower
from tsfuser.schedule.machine import GPU, HOST, Machine
from tsfuser.schedule.schedulers import propose
from tsfuser.segment import Allocations, segments


def device(name, capability, multiprocessors, shared, threads, reserved=1024):
    return replace(
        GPU,
        name=name,
        capability=capability,
        multiprocessors=multiprocessors,
        shared_per_multiprocessor=shared,
        shared_per_block=shared - reserved,
        shared_reserved=reserved,
        threads_per_multiprocessor=threads,
    )


MACHINES = (
    device("Tesla T4", 75, 40, 64 << 10, 1024, 0),
    device("NVIDIA A100", 80, 108, 164 << 10, 2048),
    device("NVIDIA A10", 86, 72, 100 << 10, 1536),
    device("NVIDIA L4", 89, 58, 100 << 10, 1536),
    GPU,
    device("NVIDIA B200", 100, 148, 228 << 10, 2048),
    device("NVIDIA GeForce RTX 5090", 120, 170, 100 << 10, 1536),
    device("a slice of a GPU", 90, 16, 228 << 10, 2048),
    device("Jetson Orin Nano 4GB", 87, 4, 164 << 10, 1536),
    *(
        replace(GPU, cluster_blocks=n, any_clusters=True, multiprocessors=m)
        for n, m in ((8, 132), (16, 132), (8, 4))
    ),
)
EVERY = pytest.mark.parametrize(
    "machine", MACHINES, ids=[f"sm_{m.capability}x{m.multiprocessors}x{m.cluster_blocks}" for m in MACHINES]
)


def softmax(b, x):
    largest = b.reduce("max", "max", x, [-1], True, x.dtype)
    e = b.pointwise("exp", (add(b, x, largest),), x.dtype)
    return add(b, e, total(b, e, [-1], True))


def columns(b, x):
    y = add(b, x, total(b, x, [-1], True))
    return y, total(b, y, [0])


def channels(b, x):
    return add(b, x, b.reduce("squares", "squares", x, [0], True, x.dtype))


def spread(b, x):
    return add(b, x, b.reduce("squares", "squares", x, [-1], True, x.dtype))


def sums(b, x):
    return total(b, relu(b, x), [0])


SHAPES = [
    (4096, 100),
    (12288, 4096),
    (2048, 12288),
    (300, 100_000),
    (7, 1 << 20),
    (512, 65536),
    (1 << 20, 16),
]


@functools.cache
def lowered(segment, schedule):
    """Machines have most schedules in common."""
    return lower(segment, schedule, segment.name, check_kernel)


@pytest.mark.each_value
@EVERY
@pytest.mark.parametrize("program", [softmax, columns, channels, spread, sums], ids=lambda p: p.__name__)
def test_a_launch_fits_the_device(program, machine):
    """Every pass is verified; a block gets its shared memory, blocks that wait for each other run at the same
    time, and no kernel promises more resident blocks than a multiprocessor takes."""
    for shape in SHAPES:
        for dtype in ("float32", "bfloat16", "float64"):
            x = tensor(*shape, dtype=dtype)
            call, fusion = build(program, x)
            for k in (lowered(s.segment, s.schedule) for s in stages(call, fusion, machine)[0]):
                what = f"{k.name} of {shape} {dtype}"
                assert k.threads <= machine.block_threads, what
                assert k.shared <= machine.shared_per_block, what
                assert k.threads * k.resident <= machine.threads_per_multiprocessor, what
                if k.cluster:
                    blocks = call.value(k.cluster)
                    assert 0 < blocks <= min(machine.largest_cluster, 16 * k.resident), what
                    assert blocks <= machine.multiprocessors * k.resident, what
                    assert call.value(k.grid) > 0 and call.value(k.grid) % blocks == 0, what
                    each = k.shared + machine.shared_reserved
                    assert k.resident * each <= machine.shared_per_multiprocessor, what
                if k.cooperative:
                    each = k.shared + machine.shared_reserved
                    assert k.resident * each <= machine.shared_per_multiprocessor, what
                    assert 0 < call.value(k.grid) <= machine.multiprocessors * k.resident, what


@pytest.mark.parametrize("clusters", [0, 8])
@pytest.mark.parametrize("multiprocessors", [1, 2, 4, 6])
def test_rows_have_blocks_where_there_are_few_multiprocessors(multiprocessors, clusters):
    """Blocks that share a row are no more than run at the same time: else no set of them would."""
    machine = replace(GPU, multiprocessors=multiprocessors, cluster_blocks=clusters)
    for program in (softmax, columns, channels, spread, sums):
        for shape in (1, 8192), (300, 40_000), (300, 100_000), (7, 1 << 20):
            for dtype in ("float32", "float64"):
                call, fusion = build(program, tensor(*shape, dtype=dtype))
                for s in stages(call, fusion, machine)[0]:
                    k = lowered(s.segment, s.schedule)
                    blocks = call.value(k.grid)
                    assert blocks > 0, f"{k.name} of {shape} {dtype}"
                    assert not k.cooperative or blocks <= multiprocessors * k.resident


@EVERY
def test_threads_touch_what_is_theirs(machine):
    for program, shape in (
        (softmax, (3, 70_000)),
        (softmax, (150, 33_333)),
        (columns, (150, 40_000)),
        (columns, (2000, 1024)),
        (channels, (64, 4096)),
        (channels, (1100, 512)),
        (spread, (150, 90_000)),
        (sums, (5000, 96)),
    ):
        walk(*planned(program, tensor(*shape), machine=machine), whole=False)


def cooperative_rows(machine, rows=64):
    [k] = kernels(softmax, tensor(rows, 1 << 18), machine=machine)
    return k.cooperative, k.resident


def test_what_a_device_has_room_for_decides():
    """A T4 has room for two blocks of 512 threads, and a fourth of the shared memory. Where there are rows
    for all multiprocessors of an H100, each has one block, with room for a part of a row and of the next."""
    assert cooperative_rows(GPU, 9) == (True, 3)
    assert cooperative_rows(GPU) == (True, 1)
    assert not cooperative_rows(MACHINES[0])[0] or cooperative_rows(MACHINES[0])[1] <= 2
    few, many = (kernels(sums, tensor(65536, 256), machine=m)[0] for m in (MACHINES[7], GPU))
    call, _ = build(sums, tensor(65536, 256))
    assert call.value(few.grid) < call.value(many.grid)


def test_only_devices_that_overlap_launches_say_so_in_kernels():
    first, second = kernels(sums, tensor(65536, 1024), machine=GPU)
    assert first.leads and second.combines_partials and not (first.combines_partials or second.leads)
    for k in kernels(sums, tensor(65536, 1024), machine=MACHINES[1]):
        assert not k.leads and not k.combines_partials


def test_the_record_says_what_a_device_can_do():
    assert GPU.has_threads and GPU.has_clusters and not GPU.vectorises_loops
    assert HOST.vectorises_loops and not HOST.has_threads and not HOST.overlaps_launches
    assert not MACHINES[3].has_clusters and MACHINES[5].overlaps_launches
    names = {"T": Machine}
    assert eval(repr(GPU), {"Machine": names["T"]}) == GPU


def test_the_reason_why_a_schedule_is_not_for_the_host():
    call, fusion = build(channels, tensor(512, 65536))
    said = []
    segments(call, fusion, Allocations(1), lambda s: said.append(propose(call, s, HOST)))
    assert "outer_rows: blocks have no threads that could combine" in said[0]
