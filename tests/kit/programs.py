"""Fusions and kernels built by hand, for the tests of IR, schedules and lowering."""

import tsfuser.ops  # noqa: F401  it defines the symbols
from tsfuser import segment
from tsfuser.ir.build import Builder
from tsfuser.ir.call import Call, ScalarArg, TensorArg
from tsfuser.lower.pipeline import lower
from tsfuser.lower.verify import verify
from tsfuser.schedule import fusion_stages
from tsfuser.schedule import verify as schedule_verify
from tsfuser.schedule.machine import GPU


def row_major(sizes):
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def tensor(*sizes, dtype="float32", strides=None, device="cuda:0", alignment=256):
    return TensorArg(dtype, device, sizes, strides or row_major(sizes), alignment)


def build(program, *args, device="cuda:0"):
    """The Call and the Fusion of `program(builder, *values)`, which returns one value or a tuple."""
    call = Call(args)
    builder = Builder(call, device)
    values = [
        builder.number(i) if isinstance(a, ScalarArg) else builder.tensor(i) for i, a in enumerate(args)
    ]
    results = program(builder, *values)
    for result in results if isinstance(results, tuple) else (results,):
        builder.output(result)
    return call, builder.finish()


def stages(call, fusion, machine=GPU):
    """All stages that the schedulers choose, verified, and the temporaries they asked for."""
    found, allocations = fusion_stages(call, fusion, machine)
    for _, stage in found:
        complaint = segment.verify(stage.segment) or schedule_verify.verify(stage.schedule)
        assert complaint is None, f"{complaint}\n{stage.segment}\n{stage.schedule}"
    stored = [(b.kind, b.index) for _, stage in found for b in stage.segment.stores]
    assert len(stored) == len(set(stored)), "two kernels store one tensor"
    return [stage for _, stage in found], allocations.temporaries


def check_kernel(step, kernel):
    """Asserts that the kernel is right after a pass."""
    complaint = verify(kernel)
    assert complaint is None, f"after {step}: {complaint}\n{kernel}"


def kernels(program, *args, machine=GPU):
    """The kernels of a program, each verified after every pass."""
    return [
        lower(s.segment, s.schedule, s.segment.name, check_kernel)
        for s in stages(*build(program, *args), machine)[0]
    ]


def add(builder, x, y):
    return builder.pointwise("add", (x, y), builder.promote(x, y))


def relu(builder, x):
    return builder.pointwise("relu", (x,), x.dtype)


def total(builder, x, dims, keepdim=False):
    return builder.reduce("sum", "sum", x, dims, keepdim, x.dtype)
