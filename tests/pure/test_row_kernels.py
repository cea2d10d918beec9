"""What the threads of a row keep in registers, and what the compiler is told of their number."""

import pytest

from kit.programs import add, kernels, tensor, total
from tsfuser.codegen.emit import source
from tsfuser.ops.joins import stack
from tsfuser.ops.lookup import index_select


def mul(b, x, y):
    return b.pointwise("mul", (x, y), b.promote(x, y))


def scaled(b, x, weight, bias):
    """A row without its mean, with parameters that all rows share."""
    mean = b.pointwise("mul", (total(b, x, [1], True), b.literal(1e-3)), x.dtype)
    return add(b, mul(b, b.pointwise("sub", (x, mean), x.dtype), weight), bias)


def with_gradients(b, gradient, x, weight):
    """As in the backward of a norm: a sum over a row is subtracted, two run over all rows. Both loops need
    each operand."""
    wide = [b.pointwise("convert", (v,), b.promote(v, b.literal(1.0)), name="wide") for v in (gradient, x)]
    scale = mul(b, gradient, weight)
    row = total(b, mul(b, scale, x), [1], True)
    result = b.pointwise("sub", (scale, mul(b, x, row)), gradient.dtype)
    result = add(b, add(b, result, gradient), weight)
    return result, total(b, mul(b, *wide), [0]), total(b, wide[0], [0])


@pytest.mark.parametrize("dtype, packs", [("bfloat16", True), ("float16", True), ("float32", False)])
def test_narrow_elements_of_a_row_share_registers_beside_sums_over_the_rows(dtype, packs):
    """Each loop converts them anew: the compiler would keep what it has converted, and lack registers."""
    x = tensor(8192, 768, dtype=dtype)
    text = source(kernels(with_gradients, x, x, tensor(768, dtype=dtype))[0])
    assert "iteration" in text and "_total[" in text
    assert (" packed<" in text and " hide(" in text) is packs
    if packs:  # the gradient, x and the weight: each is packed once, and hidden from the second loop
        assert text.count("load_packed<8>(") == 3 == text.count(" hide(")
        assert text.count("i0 < args.i0_size)") > 2 and "load<8>(args.x" not in text


def test_rows_that_registers_hold_for_one_row_only_are_not_packed():
    x = tensor(8192, 768, dtype="bfloat16")
    parameter = tensor(768, dtype="bfloat16")
    assert "packed<" not in source(kernels(scaled, x, parameter, parameter)[0])


@pytest.mark.parametrize("length, together", [(4096, True), (16384, False)])
def test_parameters_of_long_rows_are_loaded_where_they_are_used(length, together):
    """All of them at once would take twice the registers of the row: then one block fits where two would."""
    text = source(kernels(scaled, tensor(2048, length), tensor(length), tensor(length))[0])
    assert "> x0_v[" in text
    assert [f"> x{k}_v[" in text for k in (1, 2)] == [together] * 2


def test_what_differs_from_row_to_row_is_loaded_together():
    x = tensor(2048, 16384)
    text = source(kernels(scaled, x, x, x)[0])
    assert "> x1_v[" in text and "> x2_v[" in text


def test_indices_of_a_lookup_are_loaded_before_it():
    """The kernel is verified after each pass."""

    def program(b, x, table, index, *others):
        row = b.pointwise("sub", (x, total(b, x, [1], True)), x.dtype)
        made = mul(b, row, index_select(b, table, 0, index))
        for other in others:
            made = add(b, made, other)
        return made

    parameters = [tensor(4095) for _ in range(3)]
    kernels(program, tensor(512, 4095), tensor(4095), tensor(4095, dtype="int64"), *parameters)


@pytest.mark.parametrize("length, across", [(4096, 256), (2048, 128), (1536, 96)])
def test_the_compiler_knows_the_threads_of_a_row(length, across):
    """And so how many of its warps combine."""
    text = source(kernels(lambda b, x: add(b, x, total(b, x, [1], True)), tensor(2048, length))[0])
    warps = {256: 8, 128: 4, 96: 4}[across]
    assert f"store_partial_x<Sum, 1, {across}>" in text and f"sync_x<{across}>();" in text
    assert f"load_partial_x<Sum, {warps}, 1, {across}>" in text


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_product_is_kept_instead_of_two_operands_that_only_it_needs(dtype):
    def program(b, gradient, x, weight):
        scale = mul(b, gradient, weight)
        result = b.pointwise("sub", (scale, mul(b, x, total(b, scale, [1], True))), gradient.dtype)
        return result, total(b, x, [0])

    x = tensor(8192, 768, dtype=dtype)
    text = source(kernels(program, x, x, tensor(768, dtype=dtype))[0])
    assert "vec<float, " in text and "> mul_0_kept[" in text
    assert text.count("convert<float>(x0_") + text.count("= x0_v") == 1  # the second loop does not need it


def with_row_values(b, gradient, x, weight, mean):
    """The same, of x without the mean of its row."""
    return with_gradients(b, gradient, b.pointwise("sub", (x, mean), x.dtype), weight)


def test_what_a_row_has_one_of_is_loaded_while_threads_work_on_the_row_before():
    x = tensor(8192, 16384)
    text = source(kernels(with_row_values, x, x, tensor(16384), tensor(8192, 1))[0])
    before, loop = text.split("for (int64_t iteration", 1)
    assert "x3_ahead[0] = x3_begin_m;" in before and before.count("args.x3[") == 1
    # taken before it is replaced: the compiler may not move it out of the loop, where it would never change
    assert loop.index("x3_now = x3_ahead[0];") < loop.index("x3_ahead[0] = ") < loop.index("fetch_wait()")
    assert loop.count("args.x3[") == 1 and "_ahead_m = iteration + 1 < args.iterations && " in loop


def without_means(b, x, *means):
    """Rows without their means, of which each index of the outermost dim has a tensor, and without their
    largest element; and sums over all rows."""
    mean = stack(b, means) if len(means) > 1 else means[0]
    rest = b.pointwise("sub", (x, mean), x.dtype)
    largest = b.reduce("amax", "max", rest, [-1], True, x.dtype)
    return b.pointwise("sub", (rest, largest), x.dtype), total(b, rest, [0, 1])


@pytest.mark.parametrize("means, ahead", [([(2, 256, 1)], True), ([(256, 1), (256, 1)], False)])
def test_what_only_some_rows_need_is_loaded_by_these(means, ahead):
    text = source(kernels(without_means, *(tensor(*shape) for shape in [(2, 256, 1 << 16), *means]))[0])
    assert "_prefetched" in text
    assert ("x1_ahead[" in text) is ahead and ("bool x1_in" in text) is not ahead


@pytest.mark.parametrize(
    "program, shapes",
    [
        (with_row_values, [(8192, 16384), (8192, 16384), (16384,), (1, 1)]),  # all rows have the same one
        (scaled, [(8192, 768), (768,), (768,)]),  # a thread has one row only
    ],
)
def test_other_values_are_loaded_where_they_are_needed(program, shapes):
    assert "_ahead[" not in source(kernels(program, *(tensor(*shape) for shape in shapes))[0])
