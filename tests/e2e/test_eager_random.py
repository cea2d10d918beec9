"""PYTORCH_NVFUSER_ENABLE=eager_random, as far as it shows without a GPU: the numbers of the CUDA launch
shape on the host against torch's kernels in Python (aten_random.py), what is left to torch, and in which
order numbers are drawn."""

import pytest
import torch
import torch.nn.functional as F

import tsfuser
from kit.aten_random import Generator
from kit.handwritten import CPU, XY, fused, graph, typed
from kit.support import counted, fresh, fuse, groups, kinds, no_fallback, run_python, train
from tsfuser import options
from tsfuser.errors import Refusal
from tsfuser.grouping.support import Refusals
from tsfuser.ir.build import Builder
from tsfuser.ir.call import Call, TensorArg
from tsfuser.ir.eager_random import Grid
from tsfuser.ir.text import read
from tsfuser.ops import table
from tsfuser.planning import eager_random

BLOCKS = 3  # of a grid, few, so that small tensors are larger than it
SEED = 11
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.fixture
def eager():
    """The word is on; random ops of CPU tensors are left to torch."""
    tsfuser.reset()
    with options.override(enable={"eager_random": ""}):
        yield
    tsfuser.reset()


@pytest.fixture
def fibers(eager, monkeypatch):
    """CPU tensors stand for those of a GPU that runs `BLOCKS` blocks of eager's kernels."""
    monkeypatch.setattr(eager_random, "grid_of", lambda device: Grid(BLOCKS))
    with options.override(host_launch="fibers"), no_fallback():
        yield


def key():
    """What the CPU's generator is going to give as the key of the next group that draws."""
    state = torch.get_rng_state()
    found = torch.empty((), dtype=torch.int64).random_(-(2**63), None).item() % 2**64
    torch.set_rng_state(state)
    return found


def dense(*sizes):
    return torch.linspace(0.5, 2, torch.Size(sizes).numel()).view(sizes)


INPUTS = {
    "one": dense(1),
    "few": dense(8),
    "odd": dense(1023),
    "pairs": dense(4098),
    "more than threads": dense(5000),
    "rounds": dense(9000),
    "misaligned": dense(4097)[1:],
    "by 8 bytes": dense(4098)[2:],
    "transposed": dense(32, 64).t(),
    "transposed, odd": dense(31, 33).t(),
    "gaps": dense(4, 300)[:, ::2],
    "channels last": dense(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "expanded": dense(5, 1).expand(5, 8),
    "a dim of 1": dense(40, 1, 6).transpose(0, 2),
    "empty": dense(0, 3),
}


def as_dtype(x, dtype):
    """`x` in another dtype, as many elements away from aligned memory and with the same strides."""
    base = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(dtype)
    return base.as_strided(x.shape, x.stride(), x.storage_offset())


def noise(x):
    y, mask = torch.native_dropout(x, 0.3, True)
    return y, mask, torch.rand_like(x), torch.randn_like(x)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_numbers_are_those_of_torchs_kernels(fibers, name, dtype):
    x = as_dtype(INPUTS[name], dtype)
    scripted = fuse(noise, x)
    torch.manual_seed(SEED)
    expected = Generator(key(), BLOCKS)
    with counted() as rise:
        y, mask, uniform, normal = scripted(x)
    assert rise["launches"] == (x.numel() > 0) and rise["fallbacks"] == {}
    for found, wanted in zip((y, mask, uniform), (*expected.native_dropout(x, 0.3), expected.rand_like(x))):
        assert torch.equal(found, wanted) and found.stride() == wanted.stride()
    wanted = expected.randn_like(x)
    torch.testing.assert_close(normal, wanted, rtol=2 * torch.finfo(dtype).eps, atol=4e-6)  # other sines


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", ["cpu-fibers"])
def test_kernels_compile_for_gpus(device, target, dtype, monkeypatch):
    """By NVRTC, to which the `device` of this target hands them."""
    monkeypatch.setattr(eager_random, "grid_of", lambda device: Grid(BLOCKS))
    with options.override(enable={"eager_random": ""}), no_fallback():
        for x in (dense(1, 1024), dense(31, 33).t()):
            fuse(noise, as_dtype(x, dtype))


def in_between(x):
    """The operand of a dropout that the group makes is aligned, wherever x is."""
    return F.dropout(x + 1.0, 0.25, True), F.dropout((x * 2.0).t(), 0.5, True) * 1.0


@pytest.mark.parametrize("shape", [(32, 64), (31, 33)], ids=str)
def test_operands_that_the_group_makes(fibers, shape):
    n = shape[0] * shape[1]
    x = dense(n + 1)[1:].view(shape)
    scripted = fuse(in_between, x)
    torch.manual_seed(SEED)
    expected = Generator(key(), BLOCKS)
    found = scripted(x)
    wanted = expected.native_dropout(x + 1.0, 0.25)[0], expected.native_dropout((x * 2.0).t(), 0.5)[0]
    assert all(map(torch.equal, found, wanted))


def test_one_plan_serves_sizes_of_other_vectors(fibers):
    """How many neighbours eager's threads take is found in each call."""
    scripted = fuse(noise, dense(3, 341))
    for sizes in ((5, 1001), (7, 3), (9, 901)):
        x = dense(*sizes)
        torch.manual_seed(SEED)
        expected = Generator(key(), BLOCKS)
        with counted() as rise:
            found = scripted(x)
        assert torch.equal(found[0], expected.native_dropout(x, 0.3)[0])
        assert torch.equal(found[2], expected.rand_like(x))
    assert rise["plans_built"] == 0


def reduced(x):
    y = F.dropout(x + 0.0, 0.5, True)
    return y, y.sum(0), y.sum(1), torch.softmax(y, 1)


def test_every_kernel_of_a_plan_sees_eagers_numbers(fibers):
    x = torch.ones(67, 130)
    scripted = fuse(reduced, x)
    torch.manual_seed(SEED)
    y = Generator(key(), BLOCKS).native_dropout(x, 0.5)[0]
    found = scripted(x)
    assert torch.equal(found[0], y) and torch.equal(found[1], y.sum(0)) and torch.equal(found[2], y.sum(1))
    torch.testing.assert_close(found[3], torch.softmax(y, 1))


def test_a_step_of_training(fibers):
    """Forward and backward have eager's mask."""
    x, bias = dense(37, 64).requires_grad_(), dense(64).requires_grad_()
    scripted = fresh(biased)
    with tsfuser.fuser():
        train(scripted, (x, bias))
        torch.manual_seed(SEED)
        mask = Generator(key(), BLOCKS).native_dropout(x.detach() + bias.detach(), 0.2)[1]
        out, (gx, _) = train(scripted, (x, bias), calls=1)
    assert torch.equal(out != 0, mask) and torch.equal(gx != 0, mask)
    assert len(groups(scripted)) == 2


def biased(x, bias):
    return F.dropout(x + bias, 0.2, True) * 2.0


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_a_dropout_of_all_or_nothing_draws_nothing(fibers, p):
    scripted = fuse(ALL_OR_NOTHING[p], dense(40, 3))
    before = torch.get_rng_state()
    assert torch.equal(scripted(dense(40, 3)), (dense(40, 3) + 1.0) * (1 - p))
    assert torch.equal(before, torch.get_rng_state())


def keeps(x):
    return torch.native_dropout(x + 1.0, 0.0, True)[0]


def drops(x):
    return torch.native_dropout(x + 1.0, 1.0, True)[0]


ALL_OR_NOTHING = {0.0: keeps, 1.0: drops}


def test_a_plan_draws_as_eager_does_where_nothing_is_stored(fibers):
    """Eager's dropout has drawn when its result is broadcast to nothing."""

    def program(x, y):
        return F.dropout(x + 1.0, 0.5, True) + y

    scripted = fuse(program, dense(5, 1), dense(1, 4))
    before = torch.get_rng_state()
    assert scripted(dense(5, 1), dense(1, 0)).shape == (5, 0)
    assert not torch.equal(before, torch.get_rng_state())
    before = torch.get_rng_state()
    assert scripted(dense(0, 1), dense(1, 4)).shape == (0, 4)
    assert torch.equal(before, torch.get_rng_state())


def variable(x, p: float):
    return F.dropout(x + 1.0, p, True) * 2.0 + 1.0


def test_a_probability_that_is_not_a_constant_is_left_to_torch(fibers):
    scripted = fuse(variable, dense(8), 0.5)
    assert not any("aten::dropout" in kinds(group) for group in groups(scripted))
    torch.manual_seed(SEED)
    found = scripted(dense(8), 0.25)
    torch.manual_seed(SEED)
    assert torch.equal(found, variable(dense(8), 0.25))


# ---- CPU tensors


def program(x):
    y = torch.rand_like(x) * 2.0 + 1.0
    return F.dropout(y - x, 0.5, True) * x + x


@pytest.mark.parametrize("trains", [False, True])
def test_on_the_cpu_random_ops_are_left_to_torch_and_the_rest_is_fused(eager, trains):
    x = dense(33, 65).requires_grad_(trains)
    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            scripted(x).sum().backward() if trains else scripted(x)
        torch.manual_seed(SEED)
        found = scripted(x)
    torch.manual_seed(SEED)
    torch.testing.assert_close(found, program(x))
    fused_kinds = [kind for group in groups(scripted) for kind in kinds(group)]
    assert "aten::mul" in fused_kinds and not {
        "aten::rand_like",
        "aten::dropout",
        "aten::native_dropout",
    } & set(fused_kinds)


def test_the_reason_is_told(eager):
    report = str(tsfuser.explain(fresh(program), dense(4, 8)))
    assert "rand_like is left to torch: eager's random numbers on the cpu come one after another" in report


def evaluated(x):
    return F.dropout(x + 1.0, 0.5, False) * 2.0


def test_outside_of_training_nothing_is_drawn_and_all_is_fused(eager):
    scripted = fuse(evaluated, dense(8))
    assert ["aten::add", "aten::mul"] == [
        k for group in groups(scripted) for k in kinds(group) if k != "aten::dropout"
    ]


IN_PLACE = """
import torch, tsfuser
def f(x):
    y = x + 1.0
    torch.nn.functional.dropout(y, 0.5, True, True)
    return y * 2.0
s = torch.jit.script(f)
x = torch.ones(64)
with tsfuser.fuser():
    for _ in range(4):
        s(x)
print("aten::dropout_(" in str(s.graph_for(x)))
"""


def test_dropout_in_place_stays_in_place(tmp_path):
    """Eager's draws other numbers than dropout's."""
    for words, stays in (("", "False"), ("eager_random", "True")):
        status, out, err = run_python(tmp_path, IN_PLACE, PYTORCH_NVFUSER_ENABLE=words)
        assert (status, out.strip()) == (0, stays), err


# ---- graphs of CUDA tensors


@pytest.fixture
def known(eager, monkeypatch):
    """As if the numbers of cuda:0 had been compared."""
    compared = eager_random.grid_of

    def grid_of(device):
        return Grid(BLOCKS) if device == "cuda:0" else compared(device)

    monkeypatch.setattr(eager_random, "grid_of", grid_of)


ORDER = """
%a = aten::dropout(%x, 0.5, True)
%b = aten::mul(%a, %x)
%n = {between}
%c = aten::dropout(%y, 0.5, True)
%d = aten::mul(%c, %y)
%r = aten::add(%b, %d, 1)
"""


@pytest.mark.parametrize(
    "between", ["aten::bernoulli(%x, None)", "aten::randn_like(%x, 5, 0, None, False, None)"]
)
def test_numbers_are_drawn_in_the_order_of_the_program(known, between, monkeypatch):
    """What torch draws between two dropouts keeps them out of one group, whoever's numbers they are."""
    monkeypatch.setattr(options.state, "skip_kinds", {"aten::randn_like"})
    for enabled in ({}, {"eager_random": ""}):
        with options.override(enable=enabled):
            found = fused(XY, ORDER.format(between=between), "%r, %n")
            dropouts = [group.count("aten::dropout") for group in found]
            assert sum(dropouts) == 2 and max(dropouts) == 1
            found = fused(XY, ORDER.format(between="aten::neg(%x)"), "%r, %n")
            assert max(group.count("aten::dropout") for group in found) == 2


def test_ops_of_one_group_keep_their_order(known):
    [group] = fused(XY, ORDER.format(between="aten::rand_like(%y, 6, 0, None, False, None)"), "%r, %n")
    assert [kind for kind in group if kind in ("aten::dropout", "aten::rand_like")] == [
        "aten::dropout",
        "aten::rand_like",
        "aten::dropout",
    ]


def test_tensors_of_the_cpu_beside_them_are_left_to_torch(known):
    body = "%a = aten::dropout(%x, 0.5, True)\n%b = aten::mul(%a, %x)\n%r = aten::add(%b, %x, 1)"
    types = {name: typed(4, 8, device=CPU) for name in ("%a", "%b", "%r")}
    assert fused({"%x": typed(4, 8, device=CPU)}, body, "%r", types) == [["aten::mul", "aten::add"]]
    assert fused({"%x": typed(4, 8)}, body, "%r") == [["aten::dropout", "aten::mul", "aten::add"]]


def test_without_a_gpu_the_reason_is_that_nothing_was_compared(eager):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    refusals = Refusals()
    from tsfuser.frontends.torchscript import passes

    passes.fuse(graph(XY, "%a = aten::dropout(%x, 0.5, True)\n%r = aten::mul(%a, %y)", "%r"), refusals)
    assert any("could not be compared" in sentence for _, sentence in refusals.entries)


# ---- fusions


def built(dtype, sizes, op, **args):
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    builder = Builder(
        Call((TensorArg(dtype, "cuda:0", sizes, tuple(strides)),)),
        "cuda:0",
        eager=lambda device: Grid(BLOCKS),
    )
    name = "input" if op == "aten::native_dropout" else "self"
    results = table.find(op).build(builder, **{name: builder.tensor(0)}, **args)
    for result in results if isinstance(results, tuple) else (results,):
        builder.output(result)
    return builder.finish()


def test_a_fusion_is_what_its_text_says():
    fusion = built("float16", (37, 64), "aten::rand_like")
    assert read(str(fusion)) == fusion and fusion.drawn is not None


@pytest.mark.parametrize("op", ["aten::rand_like", "aten::randn_like"])
@pytest.mark.parametrize("dtype, most", [("float32", 2**29), ("float64", 2**28), ("float16", 2**30)])
def test_more_than_two_gigabytes_are_refused(op, dtype, most):
    """Eager cuts them up."""
    assert built(dtype, (most,), op).randoms
    with pytest.raises(Refusal, match="2 GB"):
        built(dtype, (most + 1,), op)


# ---- the comparison


def test_a_plan_runs_outside_of_a_group(fibers):
    """As the comparison has it run."""
    x = dense(37, 64)
    torch.manual_seed(SEED)
    expected = Generator(key(), BLOCKS)
    plan = eager_random._plan(Grid(BLOCKS), [x, x.double()])
    uniform, _, y, mask, wide, *_ = plan.run([x, x.double()])
    assert torch.equal(uniform, expected.rand_like(x))
    expected.randn_like(x)
    assert all(map(torch.equal, (y, mask), expected.native_dropout(x, 0.3)))
    assert torch.equal(wide, expected.rand_like(x.double()))
    for wrong in ([x], [x[:, :1], x.double()]):
        with pytest.raises(ValueError):
            plan.run(wrong)


@pytest.fixture
def compared(eager, monkeypatch):
    monkeypatch.setattr(eager_random, "_found", {})


def test_what_differs_is_left_to_torch(compared, monkeypatch):
    monkeypatch.setitem(
        eager_random._found, "cuda:0", "this torch's dropout gives other random numbers than are known of it"
    )
    with pytest.raises(Refusal, match="other random numbers"):
        eager_random.grid_of("cuda:0")
    body = "%a = aten::dropout(%x, 0.5, True)\n%b = aten::mul(%a, %x)\n%r = aten::add(%b, %x, 1)"
    assert fused(XY, body, "%r") == [["aten::mul", "aten::add"]]


@pytest.mark.parametrize(
    "between, parted",
    [
        ("aten::scaled_dot_product_attention(%x, %x, %x, None, 0.0, False, None, False)", False),
        ("aten::scaled_dot_product_attention(%x, %x, %x, None, 0.5, False, None, False)", True),
        ("aten::dropout(%x, 0.5, False)", False),
        ("aten::normal_(%fresh, 0.0, 1.0, None)", True),
        ("aten::_no_grad_uniform_(%fresh, 0.0, 1.0, None)", True),
        ("aten::tril(%x, 0)", False),
    ],
)
def test_what_draws_nothing_parts_no_group(known, between, parted):
    text = ORDER.format(between=between).replace("%n =", "%fresh = aten::tril(%x, 0)\n%n =")
    with options.override(enable={}):
        found = fused(XY, text, "%r, %n")
    assert (max(group.count("aten::dropout") for group in found) < 2) is parted
