"""Every row of the op table against eager torch.

First the rows alone: each sample of each row becomes a Fusion that `evaluate` runs as plain loops. Then
through TorchScript, partition, codegen and launch, many rows in one function, on every target.
"""

import inspect
import itertools

import pytest
import torch

import tsfuser
from kit.evaluate import Batch
from kit.rows import all_rows, build, graph_of, has_numbers, mismatch, tame
from kit.samples import samples, schema_of
from kit.support import groups, no_fallback
from tsfuser.errors import Refusal
from tsfuser.ir.build import Builder
from tsfuser.ir.call import Call, ListArg, TensorArg
from tsfuser.ops import table

QUICK = ("bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64")
ROWS = {f"{row.name}.{row.overloads[0]}": row for row in all_rows()}
#: Rows that this torch lets a complex or bool operand through, but not eager; and others whose samples need
#: more than a schema.
STRUCTURAL_TYPES = ("bool", "int", "str", "List[int]", "List[bool]", "List[float]", "Device")


@pytest.mark.parametrize("name", ROWS)
def test_the_overloads_of_a_row_exist_and_every_argument_is_understood(name):
    row = ROWS[name]
    if row.name.startswith("prim::"):
        return
    parameters = list(inspect.signature(row.evaluate).parameters)[1:]
    for overload in row.overloads:
        schema = schema_of(row.name, overload)
        if schema is None:
            assert torch.__version__ < "2.13", f"{row.name}.{overload} does not exist"
            continue
        for argument in schema.arguments:
            kind = (
                str(argument.type)
                .removeprefix("Optional[")
                .removesuffix("]" if str(argument.type).startswith("Optional[") else "")
            )
            assert argument.name in parameters
            assert (argument.name in row.structural | row.symbolic) == (kind in STRUCTURAL_TYPES)


@pytest.fixture(scope="module")
def cases(request):
    """Row name -> [(sample, dynamic, number in the batch or why it is refused)], and the compiled batch."""
    batch, found = Batch(), {}
    everything = request.config.getoption("--long")
    for name, row in ROWS.items():
        found[name] = []
        for k, sample in enumerate(samples(row, table.ALL if everything else QUICK, mixed=everything)):
            sample = tame(sample)
            if sample is None:
                continue
            for dynamic in (
                ((False, True) if everything else (k % 2 == 1,)) if has_numbers(sample) else (False,)
            ):
                try:
                    found[name].append((sample, dynamic, batch.add(*build(sample, dynamic))))
                except Refusal as refusal:
                    found[name].append((sample, dynamic, str(refusal)))
    batch.compile()
    return found, batch


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_what_eager_computes(cases, name):
    found, batch = cases
    wrong = []
    for sample, dynamic, number in found[name]:
        if isinstance(number, str):
            assert number.strip(), f"{sample} is refused without a reason"
            continue
        try:
            problem = mismatch(sample, batch.run(number)[0])
        except Exception as error:
            problem = f"{sample} is an error in eager: {error}"
        if problem:
            wrong.append(problem + (" (numbers as arguments)" if dynamic else ""))
    assert not wrong, f"{len(wrong)} samples:\n" + "\n".join(wrong[:8])


@pytest.mark.parametrize("name", ROWS)
def test_a_row_serves_a_dtype(cases, name):
    found, _ = cases
    if found[name] and name != "tsfuser::store.":  # stores what its group computes, which no sample has
        assert any(not isinstance(number, str) for _, _, number in found[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
@pytest.mark.parametrize(
    "sizes, wanted",
    [((4, 8), (8,)), ((4, 8), (4, 1)), ((2, 4, 8), (4, 1)), ((4, 8), ()), ((), ()), ((2, 1, 8), (1, 8))],
)
def test_sum_to_size(dtype, sizes, wanted):
    x = torch.randint(-9, 9, sizes).to(dtype)  # whole numbers: sums are exact in any order
    call = Call((TensorArg(str(dtype)[6:], "cpu", sizes, x.stride()), ListArg("int", wanted)))
    builder = Builder(call, "cpu")
    size = [call.item(1, k) for k in range(len(wanted))]
    builder.output(table.find("aten::sum_to_size").build(builder, self=builder.tensor(0), size=size))
    batch = Batch()
    number = batch.add(builder.finish(), call, [x, None])
    batch.compile()
    (result,) = batch.run(number)
    eager = torch.ops.aten.sum_to_size(x, wanted)
    assert (result.dtype, result.shape) == (eager.dtype, eager.shape)
    assert torch.equal(result, eager)


FUSED = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "bool", "complex64")


def _fusible(dtype, device):
    """One sample a row and overload, moved to `device`; integer divisions by unknown numbers are not for
    the CPU."""
    chosen, moved = [], {}
    for row in ROWS.values():
        if row.name.startswith("prim::"):
            continue
        seen = set()
        for sample in samples(row, [dtype], mixed=False):
            if sample.overload in seen or not _works(sample, dtype, device):
                continue
            seen.add(sample.overload)
            for name, tensor in sample.tensors.items():
                key = (tensor.dtype, tuple(tensor.shape), str(tensor.reshape(-1)[:50].tolist()))
                sample.arguments[name] = moved.setdefault(key, tensor.to(device))
            chosen.append(sample)
    return chosen


def _works(sample, dtype, device):
    if (
        not any(str(t.dtype)[6:] == dtype and t.dim() for t in sample.tensors.values())
        or tame(sample) is not sample
    ):
        return False
    try:
        build(sample, device=device)
        sample.eager()
    except Exception:
        return False
    return True


def _chunks(items, size):
    items = iter(items)
    return iter(lambda: list(itertools.islice(items, size)), [])


def _shares(a, b):
    """Whether both are the same memory."""
    return (
        all(isinstance(t, torch.Tensor) for t in (a, b))
        and a.dtype == b.dtype
        and a.data_ptr() == b.data_ptr()
    )


@pytest.mark.parametrize("dtype", FUSED)
def test_rows_fused_by_torchscript(target, device, few, dtype):
    if few and dtype in ("int32", "bool", "float16", "float64"):
        pytest.skip("as int64, bfloat16 or float32, with --long")
    wrong, ran = [], 0
    previous = torch._C._jit_set_nvfuser_single_node_mode(True)
    try:
        for number, chunk in enumerate(_chunks(_fusible(dtype, device), 24)):
            text, inputs = graph_of(chunk)
            function = torch._C._create_function_from_graph(f"rows_{dtype}_{number}", torch._C.parse_ir(text))
            with tsfuser.fuser(), no_fallback():
                for _ in range(3):
                    results = function(*inputs)
            fused = {node.kind() for group in groups(function) for node in group.g("Subgraph").nodes()}
            for sample, result in zip(chunk, results):
                ran += 1
                same = sample.row.family == "casts" and any(result is x or _shares(result, x) for x in inputs)
                # a cast to the dtype that a tensor has is the tensor
                if sample.row.name not in fused and not same:
                    wrong.append(f"{sample} was not fused")
                wrong += filter(None, [mismatch(sample, result)])
    finally:
        torch._C._jit_set_nvfuser_single_node_mode(previous)
    assert ran > 0
    assert not wrong, f"{len(wrong)} of {ran} samples:\n" + "\n".join(wrong[:12])
