"""Kernels of pooling: what they read, in vectors of channels, and where a window has no element."""

import pytest

from kit.programs import build, kernels, relu, stages, tensor
from tsfuser.codegen.emit import source
from tsfuser.ir.text import read
from tsfuser.ir.verify import verify
from tsfuser.ops.table import find
from tsfuser.schedule.machine import GPU, HOST

CHANNELS_LAST = {"strides": (64 * 15 * 14, 1, 64 * 14, 64)}


def pooled(padding, kernel=3, step=2, name="max_pool2d", inner=lambda b, x: x):
    row = find(f"aten::{name}")

    def program(b, x):
        windows = {"kernel_size": [kernel] * 2, "stride": [step] * 2, "padding": [padding] * 2}
        return row.build(b, self=inner(b, x), **windows)

    return program


def sine(b, x):
    return b.pointwise("sin", (x,), x.dtype)


def image(**how):
    return tensor(2, 64, 15, 14, **how)


@pytest.mark.parametrize("machine", [GPU, HOST], ids=["gpu", "host"])
@pytest.mark.parametrize("how", [{}, CHANNELS_LAST], ids=["rows", "channels last"])
@pytest.mark.parametrize("name", ["max_pool2d", "avg_pool2d"])
@pytest.mark.parametrize("inner, expected", [(relu, 1), (sine, 2)], ids=["cheap", "costly"])
def test_its_text_rebuilds_a_fusion_and_each_pass_keeps_its_kernels_well_formed(
    inner, expected, name, how, machine
):
    program = pooled(1, name=name, inner=inner)
    fusion = build(program, image(**how))[1]
    assert verify(fusion) is None and read(str(fusion)) == fusion
    # what windows share is stored, if it costs more than reading it
    assert len(kernels(program, image(**how), machine=machine)) == expected


def test_windows_that_share_no_element_are_one_kernel_with_what_is_before():
    assert len(stages(*build(pooled(0, 2, 2, inner=relu), image()))[0]) == 1


def test_channels_are_read_in_vectors():
    text = source(kernels(pooled(1), image(**CHANNELS_LAST))[0])
    assert text.count("load<4>(") == 9


def test_a_loop_of_the_host_asks_once_whether_all_windows_are_whole():
    """Of a loop that asks for each of its loads the compiler makes no vectors, so it does not in the other
    case either."""
    text = source(kernels(pooled(1), image(**CHANNELS_LAST), machine=HOST)[0])
    asks, _, rest = text.partition("SIMD_LOOP")
    whole, _, cut = rest.partition("} else {")
    assert "if (" in asks and whole.count("? args.") == 0
    assert cut.count("? args.") == 0 and cut.count("choose(") == 8
    assert "} else {" not in source(kernels(pooled(0), image(**CHANNELS_LAST), machine=HOST)[0])


def test_without_padding_no_window_is_asked_about():
    text = source(kernels(pooled(0, 2, 2), image())[0])
    assert "_in &&" not in text and "within" not in text
