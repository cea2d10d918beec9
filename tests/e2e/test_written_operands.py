"""Operands and results that the program writes to between forward and backward: what the backward needs
raises, as in eager, and nothing else does.

All ops of torch's list that the op table names, in each of the forms of kit/written.py, with each choice of
operands that require a gradient. Here every sixth op, another sixth for each form; with --long all.
"""

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.batch import collecting
from kit.opinfo import Program, named, programs, title
from kit.opsweep import plain, single_nodes
from kit.support import script
from kit.written import FORMS, differences

STEP = 6
#: What raises here and not in eager. TorchScript's autodiff computes the gradient of these activations by
#: their results; eager's rms_norm of the CPU is made of several ops, which save their own results.
RAISES = ("nn.functional.relu6", "nn.functional.softplus", "nn.functional.rms_norm")
#: Ops of which a form was wrong, or which op_db has without weights.
CALLS = {
    "floor": "torch.div(x0, x1, rounding_mode='floor')",
    "dividend": "torch.div(x0, x2, rounding_mode='trunc')",
    "group_norm": "torch.nn.functional.group_norm(x0, 2, x1, x2)",
    "instance_norm": "torch.nn.functional.instance_norm(x0, weight=x1, bias=x2)",
    "where": "torch.where(x0 > 0.5, x0 * 2, 1.0)",
    "std": "torch.std(x0, [1], False)",
    "leaky_relu": "torch.nn.functional.leaky_relu(x0, 0.125)",
}


def check(all_programs, form):
    found = []
    with single_nodes(), tsfuser.fuser(), collecting():
        for program in all_programs:
            found += differences(program, form)
    assert not found, "\n".join(found[:20])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", CALLS)
def test_calls(form, call):
    arguments = [torch.rand(2, 4, 4), torch.rand(4) + 0.5, torch.rand(4) + 0.5]
    text = f"def f(x0: Tensor, x1: Tensor, x2: Tensor):\n    return {CALLS[call]}\n"
    check([Program(text, arguments, call)], form)


@pytest.mark.parametrize("form", FORMS)
def test_ops(request, form):
    whole = request.config.getoption("--long")
    ops = [i for i in named() if torch.float32 in i.supported_backward_dtypes("cpu")]
    ops = ops if whole else ops[FORMS.index(form) :: STEP]
    check((p for i in ops if title(i) not in RAISES for p in tensors_of(i, 4 if whole else 1)), form)


def tensors_of(info, count):
    """Programs of the op that give a tensor, and that TorchScript takes."""
    for program in programs(info, torch.float32, "cpu", count):
        try:
            script(program.source)
            made = plain(program.source)(*program.arguments)
        except Exception:
            continue
        if isinstance(made, Tensor) and made.is_floating_point():
            yield program
