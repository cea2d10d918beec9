"""Schedules and lowering: what the kernels look like, verified after every pass."""

import random
import re

import pytest

from kit.programs import add, build, kernels, relu, stages, tensor, total
from tsfuser.codegen.emit import source, struct_layout
from tsfuser.ir.dtypes import COMPLEX64, DOUBLE, FLOAT, INT8, INT64
from tsfuser.lower import index as ix
from tsfuser.lower.index import Const, Var
from tsfuser.lower.kernel import Param
from tsfuser.lower.literals import literal
from tsfuser.lower.loop_ir import For, If, Let, Load, Store, Uniform
from tsfuser.lower.passes import flatten
from tsfuser.lower.pipeline import lower
from tsfuser.lower.traverse import statements
from tsfuser.lower.verify import verify
from tsfuser.ops.table import find as find_op
from tsfuser.schedule.loops import Schedule
from tsfuser.schedule.machine import HOST
from tsfuser.schedule.pointwise import PointwiseParams
from tsfuser.schedule.reduction_params import ReductionParams
from tsfuser.schedule.transpose import TransposeParams


def accesses(kernel):
    return {s.buffer: s.lanes for s in statements(kernel.body) if isinstance(s, (Load, Store))}


def test_contiguous_tensors_are_one_dimension():
    [kernel] = kernels(add, tensor(4, 8, 16), tensor(4, 8, 16))
    assert not any(
        "%" in line or "/" in line.partition("//")[0]
        for line in source(kernel).splitlines()[4:]
        if "include" not in line
    )
    assert set(accesses(kernel).values()) == {4}


def test_a_bias_is_loaded_outside_the_row_loop():
    text = source(kernels(add, tensor(64, 32, 1023), tensor(1023))[0])
    assert text.index("x1_m") < text.index("x0_m")


@pytest.mark.parametrize(
    "dtype, lanes", [("float32", 4), ("bfloat16", 8), ("float64", 2), ("uint8", 16), ("complex128", 1)]
)
def test_accesses_are_16_bytes(dtype, lanes):
    [kernel] = kernels(relu, tensor(1024, dtype=dtype))
    assert set(accesses(kernel).values()) == {lanes}


def test_a_misaligned_address_narrows_the_access():
    for alignment, lanes in ((4, 1), (8, 2), (16, 4)):
        [kernel] = kernels(add, tensor(1024, alignment=alignment), tensor(1024))
        assert set(accesses(kernel).values()) == {lanes}


def test_an_odd_row_pitch_narrows_the_access():
    [kernel] = kernels(add, tensor(64, 1023), tensor(1023))
    assert set(accesses(kernel).values()) == {1}


def affine(builder, x, mean, scale, weight, bias):
    """As eval or the second pass of a batch norm: four operands of the size of a row beside one that has all
    elements."""
    near = builder.pointwise("sub", (x, mean), FLOAT)
    normal = builder.pointwise("mul", (near, scale), FLOAT)
    return builder.pointwise("add_product", (bias, normal, weight), x.dtype)


def test_what_all_rows_share_stays_in_registers_from_row_to_row():
    row = [tensor(256) for _ in range(4)]
    [kernel] = kernels(affine, tensor(100000, 256, dtype="bfloat16"), *row)
    [loop] = [s for s in kernel.body if isinstance(s, For) and s.bind == "serial"]
    assert {s.buffer for s in statements(loop.body) if isinstance(s, Load)} == {"args.x0"}
    assert {s.buffer for s in kernel.body if isinstance(s, Load)} == {f"args.x{i}" for i in range(1, 5)}


def test_few_elements_more_do_not_narrow_the_access_to_the_many():
    """A row of floats may be read in two accesses, from a cache."""
    [kernel] = kernels(affine, tensor(4096, 256, dtype="bfloat16"), *[tensor(256) for _ in range(4)])
    assert set(accesses(kernel).values()) == {8}
    [kernel] = kernels(add, tensor(4096, 256, dtype="bfloat16"), tensor(4096, 256))
    assert set(accesses(kernel).values()) == {4}


@pytest.mark.parametrize(
    "dtype, vector, unroll", [("float32", 1, 8), ("bfloat16", 1, 8), ("bfloat16", 2, 8), ("float32", 4, 4)]
)
def test_narrow_accesses_are_more_in_flight(dtype, vector, unroll):
    columns = 100000 * vector + (vector if vector < 4 else 0)
    [stage] = stages(*build(lambda b, x: total(b, x, [0]), tensor(512, columns, dtype=dtype)))[0]
    assert (stage.params.vector, stage.params.unroll) == (vector, unroll)
    assert stage.schedule.resident >= 2  # which the compiler is told, or it would wait for each


def test_offsets_past_31_bits_use_wide_indices():
    [kernel] = kernels(relu, tensor(1 << 16, 1 << 15))
    assert kernel.index == "int64_t"
    [kernel] = kernels(relu, tensor(1 << 15, 1 << 15))
    assert kernel.index == "int32_t"


def test_operands_that_disagree_meet_in_shared_memory():
    args = tensor(256, 128), tensor(256, 128, strides=(1, 256))
    [stage] = stages(*build(add, *args))[0]
    assert isinstance(stage.params, TransposeParams)
    [kernel] = kernels(add, *args)
    assert kernel.tiles and any(isinstance(s, If) for s in kernel.body)
    assert source(kernel).count("__syncthreads()") == 2  # once for whole tiles, once for those at the edge


def test_other_operands_are_loaded_while_a_tile_is_filled():
    [kernel] = kernels(add, tensor(256, 128), tensor(256, 128, strides=(1, 256)))
    text = source(kernel)
    assert text.index("= load<4>(args.x0") < text.index("x1_tile[") < text.index("__syncthreads()")


def turned_sum(b, x, y):
    product = b.pointwise("mul", (x, y), FLOAT)
    return product, total(b, product, [0])


def test_sums_of_operands_that_disagree_go_over_tiles():
    x, y = tensor(65536, 96, dtype="bfloat16"), tensor(65536, 96, strides=(1, 65536))
    first, _ = stages(*build(turned_sum, x, y))[0]
    own = first.params
    assert isinstance(own, TransposeParams) and own.split
    assert (own.shared, own.rows, own.columns, own.vector) == (("x1",), 64, 32, 4)
    text = source(kernels(turned_sum, x, y)[0])
    loop = text[text.index("r < args.r_size") : text.index("sync_y()")]
    assert loop.count("__syncthreads()") == 4  # before and after the use of a tile that is whole, or cut


def test_a_loop_over_one_tile_is_no_loop_in_both_branches():
    r = ix.Var("r")
    branches = [(Let(name, "int32_t", ix.add(r, k)),) for k, name in enumerate(("whole", "cut"))]
    [chosen] = flatten((For("r", ix.Const(1), "rows", (If(ix.less(r, ix.Var("n")), *branches),)),))
    assert isinstance(chosen, If) and "r" not in ix.names(chosen.condition)
    assert [s.value for s in (*chosen.yes, *chosen.no)] == [ix.Const(0), ix.Const(1)]


@pytest.mark.parametrize("rows, columns", [(65536, 8), (12, 512)])
def test_sums_of_thin_operands_do_without_a_tile(rows, columns):
    [stage, *_] = stages(*build(turned_sum, tensor(rows, columns), tensor(rows, columns, strides=(1, rows))))[
        0
    ]
    assert isinstance(stage.params, ReductionParams)


def test_a_stack_reads_each_operand_only_where_it_is_chosen():
    def stacked(b, *tensors):
        return find_op("aten::stack").build(b, tensors=[relu(b, x) for x in tensors], dim=1)

    text = source(kernels(stacked, *[tensor(512, 256) for _ in range(3)])[0])
    for name, condition in (("x0", "i1 < 1"), ("x1", "i1 < 2 && 1 < i1 + 1"), ("x2", "2 < i1 + 1")):
        assert re.search(rf"const bool {name}_in = .*{re.escape(condition)}", text), text
        assert re.search(rf"args.{name} .*{name}_in", text)


def joined_products(b, x, y, s, t):
    """As the gradients of q and k behind a rotary embedding: s and t are the same for all heads."""
    products = [b.pointwise("mul", pair, FLOAT) for pair in ((x, s), (y, t))]
    return find_op("aten::cat").build(b, tensors=products, dim=1)


def test_what_one_part_of_a_cat_reads_is_not_loaded_for_the_other():
    parts = [tensor(512, 12, 64) for _ in range(2)]
    text = source(kernels(joined_products, *parts, *[tensor(512, 1, 64) for _ in range(2)])[0])
    for name in ("x2", "x3"):
        assert re.search(rf"args.{name} .*{name}_in", text), text
    # what all rows of a thread read stays in front of them
    parts = [tensor(8192, 12, 63) for _ in range(2)]
    text = source(kernels(joined_products, *parts, *[tensor(63) for _ in range(2)])[0])
    assert "x2_in" not in text and text.index("args.x2[") < text.index("#pragma unroll")


def test_a_thin_transpose_does_without_a_tile():
    [stage] = stages(*build(add, tensor(256, 3), tensor(256, 3, strides=(1, 256))))[0]
    assert isinstance(stage.params, PointwiseParams)


def test_params_print_as_code_that_rebuilds_them():
    [stage] = stages(*build(add, tensor(64, 8), tensor(8)))[0]
    assert eval(repr(stage.params)) == stage.params


def test_the_host_vectorises_a_plain_loop():
    text = source(kernels(add, tensor(64, 1000), tensor(1000), machine=HOST)[0])
    assert "SIMD_LOOP" in text and "if (" not in text


def rounded_square(builder, x):
    """As `(x.float() * x.float()).bfloat16()`; then a result that nothing has rounded."""
    square = builder.pointwise("mul", (x, x), FLOAT)
    return builder.pointwise("round_to_bfloat16", (square,), x.dtype), relu(builder, x)


def test_the_host_does_not_round_again_what_is_rounded():
    """It takes a dozen instructions for it, a GPU one."""
    rows = tensor(64, 1000, dtype="bfloat16")
    stores = re.findall(
        r"_out\[.*\] = (\w+)<bfloat16_t>", source(kernels(rounded_square, rows, machine=HOST)[0])
    )
    assert sorted(set(stores)) == ["convert", "exactly"]
    assert "exactly" not in source(kernels(rounded_square, rows)[0])


def test_the_host_stores_a_result_of_each_row_behind_the_loop_over_it():
    """In the loop it would be a branch, of which the compiler makes no vectors."""
    text = source(
        kernels(lambda b, x, y: (add(b, x, y), relu(b, y)), tensor(64, 1024), tensor(64, 1), machine=HOST)[0]
    )
    loop = text[text.index("SIMD_LOOP") :]
    loop, _, behind = loop.partition("}")
    assert "if (" not in loop and "relu_1_out" not in loop and "args.relu_1_out[" in behind


def test_an_output_of_fewer_axes_is_computed_and_stored_once():
    """By the threads of the first row, behind the loops over rows."""
    text = source(kernels(lambda b, x, y: (add(b, x, y), relu(b, y)), tensor(64, 1024), tensor(1024))[0])
    loops, _, first_row = text.partition("if (i0_out < 1) {")
    assert "relu_1 =" in first_row and "relu_1 =" not in loops
    some_rows = lambda b, x, y: (add(b, x, y), relu(b, y))  # which are not the first of all
    text = source(kernels(some_rows, tensor(4, 64, 1024), tensor(4, 1, 1024))[0])
    assert "relu_1 =" in text and "_out < 1) {" not in text


def test_partial_sums_and_their_finish():
    first, last = kernels(lambda b, x: total(b, x, [0]), tensor(1 << 16, 64))
    assert "load_partial_y<Sum" in source(first) and "load_partial_y<Sum" in source(last)
    assert "store_partial_x<Sum" in source(kernels(lambda b, x: total(b, x, [1]), tensor(64, 1 << 12))[0])


SHAPES = [((7, 5, 3), (3,)), ((7, 5, 3), (5, 1)), ((1, 5, 1), (7, 5, 3)), ((), (4,)), ((), ()),
          ((0, 3), (3,)), ((1,), (1,)),
          ((2, 3, 4, 5, 6), (3, 1, 5, 1))]  # fmt: skip


@pytest.mark.parametrize("machine", [None, HOST], ids=["gpu", "host"])
@pytest.mark.parametrize("a, b", SHAPES)
def test_every_pass_keeps_the_ir_well_formed(a, b, machine):
    generator = random.Random(str((a, b)))
    args = []
    for sizes in (a, b):
        order = list(range(len(sizes)))
        generator.shuffle(order)
        strides, step = [0] * len(sizes), 1
        for d in order:
            strides[d], step = step, step * max(sizes[d], 1)
        args.append(tensor(*sizes, strides=tuple(strides)))
    options = {} if machine is None else {"machine": machine}
    assert kernels(add, *args, **options)

    def summed(builder, x, y):
        s = add(builder, x, y)
        dims = [d for d in range(len(s.dims)) if d % 2 == 0 and s.dims[d] is not None]
        return (s, total(builder, s, dims)) if dims else s

    assert kernels(summed, *args, **options)


def test_a_schedule_prints_its_loops_in_order():
    [stage] = stages(*build(add, tensor(64, 8), tensor(8)))[0]
    loops = re.findall(r"^ +Loop\('(\w+)', .*bind='([\w.]+)'\),$", str(stage.schedule), re.M)
    assert loops == [(x.name, x.bind) for x in stage.schedule.loops] and loops[0] == ("block", "block")


def test_an_exact_split_needs_a_factor():
    [stage] = stages(*build(relu, tensor(64)))[0]
    with pytest.raises(AssertionError, match="no factor"):
        Schedule.over(stage.schedule.domain).split("i0", 48, ("a", "b"), exact=True)


def test_index_expressions_fold():
    n, m = Var("n"), Var("m")
    assert ix.add(ix.mul(n, 1), 0) == n and ix.mul(n, 0) == Const(0) and ix.add(2, 3) == Const(5)
    assert str(ix.mul(ix.add(n, 1), m)) == "(n + 1) * m"
    assert str(ix.sub(n, ix.sub(m, 1))) == "n - (m - 1)"
    assert ix.coefficient(ix.add(ix.mul(n, m), 3), "n") == m
    assert ix.coefficient(ix.mul(n, n), "n") is None
    assert ix.substitute(ix.add(n, m), {"n": Const(0)}) == m


def test_literals_are_exact():
    assert literal(0.1, FLOAT) == "0.1f" and literal(0.1, DOUBLE) == "0.1" and literal(3, FLOAT) == "3.0f"
    assert (
        literal(float("nan"), FLOAT) == "not_a_number<float>()"
        and literal(-1e300, FLOAT) == "-infinity<float>()"
    )
    assert literal(300, INT8) == "int8_t(44ll)" or "44" in literal(300, INT8)
    assert "9223372036854775807" in literal(-(1 << 63), INT64)
    assert literal(1j, COMPLEX64) == "complex_t<float>(0.0f, 1.0f)"


def test_struct_layout_is_that_of_c():
    params = (Param("flag", "bool", ("number", 0, "bool")), Param("x", "const float*", ("input", 0)),
              Param("n", "int32_t", ("size", 0)),
              Param("z", "complex_t<double>", ("number", 1, "complex128")),
              Param("h", "half_t", ("element", 2)))  # fmt: skip
    assert struct_layout(params) == ([0, 8, 16, 32, 48], 64)


# ---- random numbers


def noisy(builder, x, *rest):
    value = builder.pointwise("add", (x, builder.uniform(x)), x.dtype)
    for other in rest:
        value = add(builder, value, other)
    return value


def uniforms(kernel):
    return [s for s in statements(kernel.body) if isinstance(s, Uniform)]


@pytest.mark.parametrize("dtype, lanes", [("float32", 4), ("bfloat16", 8)])
def test_random_numbers_are_drawn_in_vectors(dtype, lanes):
    [kernel] = kernels(noisy, tensor(64, 1024, dtype=dtype))
    assert {s.lanes for s in uniforms(kernel)} == {lanes}
    assert f"uniform<float, {lanes}>(random, 0, " in source(kernel)
    assert "const random_start random = start_of(args.random);" in source(kernel)
    assert ("random",) in {p.source for p in kernel.params}


@pytest.mark.parametrize("sizes, strides", [((64, 128), (1, 64)), ((64, 32, 16), (512, 1, 32))])
def test_a_random_number_is_counted_in_the_order_of_memory(sizes, strides):
    """So a transposed or channels-last tensor is one dim, and a lane's neighbours come out of the same Philox
    block."""
    program = build(noisy, tensor(*sizes, strides=strides))
    [stage] = stages(*program)[0]
    assert len(stage.schedule.domain.dims) == 1
    [kernel] = kernels(noisy, tensor(*sizes, strides=strides))
    assert set(accesses(kernel).values()) == {4} and {s.lanes for s in uniforms(kernel)} == {4}


def test_a_random_op_keeps_apart_the_dims_that_it_does_not_walk_as_one():
    def program(builder, x, transposed):
        return add(builder, x, noisy(builder, transposed))

    [stage] = stages(*build(program, tensor(64, 128), tensor(64, 128, strides=(1, 64))))[0]
    assert len(stage.schedule.domain.dims) == 2


def test_a_broadcast_random_op_is_drawn_outside_the_row_loop():
    def program(builder, x, row):
        return add(builder, x, noisy(builder, row))

    [kernel] = kernels(program, tensor(64, 32, 1024), tensor(1024))
    [drawn] = uniforms(kernel)
    assert not any(isinstance(s, For) and drawn in s.body for s in kernel.body)


def test_kernels_that_repeat_a_random_op_repeat_its_stream():
    def program(builder, x):
        first, second = builder.uniform(x), builder.uniform(x)
        y = add(builder, add(builder, x, first), second)
        return total(builder, y, [0]), total(builder, y, [1])

    streams = [sorted({s.stream for s in uniforms(k)}) for k in kernels(program, tensor(1 << 12, 128))]
    assert len([s for s in streams if s]) > 1 and all(s in ([], [0, 1]) for s in streams)


def test_the_sweeps_over_a_row_share_what_is_drawn():
    def program(builder, x):
        y = noisy(builder, x)
        return builder.pointwise("sub", (y, total(builder, y, [1], keepdim=True)), x.dtype)

    [kernel] = kernels(program, tensor(64, 2048))
    assert len(uniforms(kernel)) == 1


def test_a_row_of_an_element_a_thread_keeps_its_values_under_their_names():
    """Without loops all sweeps are one scope."""

    def program(b, x):
        y = b.pointwise("exp", (x,), x.dtype)
        return b.pointwise("div", (y, total(b, y, [0], True)), x.dtype)

    [kernel] = kernels(program, tensor(5, alignment=4))
    assert source(kernel).count("exp(") == 1


def test_a_schedule_may_have_nothing_but_blocks():
    [stage] = stages(*build(relu, tensor(64)))[0]
    schedule = Schedule.over(stage.schedule.domain).bind(i0="block")
    kernel = lower(stage.segment, schedule, "k")
    assert verify(kernel) is None and "i0 = blockIdx.x" in str(kernel)
