"""What random programs are compared with: where torch itself may give several things, none of them is a
difference, and nothing else is."""

from dataclasses import replace

import pytest
import torch

from kit.random_compare import compare, expectation
from kit.random_inputs import Input
from kit.random_ops import Statement
from kit.random_programs import prepared
from kit.random_runs import noisy
from kit.random_scripted import execute
from kit.random_world import Program, generate

pytestmark = pytest.mark.optimized

X = Input("x", ("n",), torch.float64, "dense", 1)
COMPLEX = {"x": {"dtype": torch.complex64}}


def program_of(*texts, size=9, **more):
    """Of values `v0`, `v1`, ...; `{0}` is the value before."""
    operands = ["x", *(f"v{k}" for k in range(len(texts)))]
    made = tuple((f"v{k}", Statement(text, (operands[k],))) for k, text in enumerate(texts))
    return Program((X,), made, tuple(operands[1:]), ({"n": size},), **more)


def test_an_op_in_another_dtype_on_the_way_is_allowed_its_roundings():
    """Though eager's float32 may be exact by chance, as here."""
    expected = expectation(program_of("torch.sigmoid({0}.float() * 0).double()", size=1), 0, "cpu")
    _, exact, allowed = expected["result 0"]
    assert torch.finfo(torch.float32).eps / 4 < allowed / float(exact) < 64 * torch.finfo(torch.float32).eps


def test_a_call_that_eager_rejects_may_raise_of_another_op_that_it_rejects():
    inputs, names = (X, Input("y", ("n",), torch.float64, "dense", 2)), "xy"
    statements = tuple(
        (f"v{k}", Statement(t, ("xy"[k],))) for k, t in enumerate(("torch.erf({0})", "{0} > 0"))
    )
    called = {name: {"dtype": torch.complex64} for name in names}
    program = Program(inputs, statements, ("v0", "v1"), ({"n": 3},), (called,), features=("complex",))
    expected = expectation(program, 0, "cpu")
    first, second = expected
    assert "erf" in first and "gt" in second
    for raised in first, second:
        assert compare({raised: torch.tensor(True)}, expected) == ""
    assert "not there" in compare({"raises another error": torch.tensor(True)}, expected)
    assert "not there" in compare({"result 0": torch.ones(3)}, expected)


@pytest.mark.parametrize("reader", ["{0} > 0", "torch.relu({0}.view(-1))", "{0}.floor_()"])
def test_an_op_that_needs_a_rejected_one_raises_nothing(reader):
    """Not even one that reads what the rejected op was to write to."""
    for made in "torch.erf({0})", "{out} = {0} + 0\n{out}.abs_()":
        program = program_of(made, reader, changes=(COMPLEX,), features=("complex",))
        assert len(expectation(program, 0, "cpu")) == 1


@pytest.mark.parametrize(
    "write", ["v1.mul_(v0)", "v1 *= v0", "v1[0] = torch.erf(v0)[0]", "v1.view(-1).mul_(v0)"]
)
def test_what_a_rejected_write_reads_is_still_read_by_others(write):
    """The write has left its operands as they were, and another op rejects one of them, too."""
    texts = (("v0", "x * 2"), ("v1", "x.abs() + 1"), ("", write), ("v2", "v0 > 0"))
    statements = tuple((name, Statement(text, ())) for name, text in texts)
    program = Program((X,), statements, ("v1", "v2"), ({"n": 3},), (COMPLEX,), features=("complex",))
    first, second = expectation(program, 0, "cpu")
    assert "can't be cast" in first or "erf" in first
    assert "gt" in second


def test_sums_of_no_elements_have_no_roundings():
    for text in "torch.log_softmax({0}, 0)", "torch.logsumexp({0}.expand(3, 0), 0)":
        program = program_of(text, size=0)
        assert noisy(program, 0, [2.0**-23])["result 0"].numel() == 0


def test_programs_have_no_dead_code():
    """TorchScript drops it: a write that its alias analysis does not see, an op that eager rejects."""
    programs = [generate(seed, ("loops", "complex")) for seed in range(80)]
    for program in filter(None, programs):
        read = set(program.results)
        for name, st in reversed(program.statements):
            assert not name or name in read, program.source()
            if st.kind == "inplace":
                assert st.operands[0] in read or st.operands[0][0] != "v", program.source()
            read.update(st.used() if name else st.used()[1:])


def test_a_write_behind_a_loop_is_read():
    lines = [line for seed in range(60) if (p := generate(seed, ("loops",))) for line in p.statements]
    loops = [(name, st) for name, st in lines if "{out}_i in range" in st.template or "while" in st.template]
    assert len(loops) > 20
    for _, st in loops:
        last = st.template.split("\n")[-1]
        assert not last.startswith("{out} = ") or "{out}" in last[6:]


@pytest.mark.parametrize("values", ["special", "limits"])
def test_statistics_are_of_ordinary_values(values):
    """Those of others are inf or NaN by how they are added up."""
    programs = [generate(seed, ("views", values)) for seed in range(120)]
    assert not any("batch_norm" in p.source() and ", m, r," in p.source() for p in programs if p)


def test_what_torch_is_wrong_about_in_the_first_call_is_no_difference():
    """Its alias analysis does not say that a loop without a turn gives what entered it, so that it takes the
    second half of `v0` for the first one; with gradients, it does so in the first call only."""
    written = "{out} = {0}\nfor {out}_i in range(n - 2):\n    {out} = {out} - 1\n{out}.zero_()\n"
    statements = (
        ("v0", Statement("{0} + 1", ("x",), exact=True)),
        ("v1", Statement("{0} * 0.5", ("v0",), exact=True)),
        ("v2", Statement(written + "{out} = {0} * 0.5 + {out}.sum()", ("v0",), "writing", exact=True)),
    )
    program = Program((replace(X, leaf=True),), statements, ("v1", "v2"), ({"n": 4},))
    run = prepared(0, program, "cpu")
    execute([run], "cpu")
    assert not run.wrong
