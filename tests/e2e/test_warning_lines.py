"""A warning names a line of the program, as the traceback of an error would."""

import re

from kit.support import run_python


def places(tmp_path, source, **environment):
    """Each warning of tsfuser's that the program in `source` gives, in order, as "line: text"."""
    status, _, err = run_python(tmp_path, source, **environment)
    assert status == 0, err
    found = re.findall(r"^(\S+): TsfuserWarning: (.*)$", err, re.M)
    assert found, err
    assert {place.rpartition(":")[0] for place, _ in found} == {str(tmp_path / "program.py")}, err
    return [f"{place.rpartition(':')[2]}: {text}" for place, text in found]


def test_of_a_variable_the_line_that_imports_tsfuser(tmp_path):
    [found] = places(tmp_path, "import torch\nimport tsfuser\n", TSFUSER_PROGRES="0")
    assert found == "2: TSFUSER_PROGRES is no option of tsfuser; did you mean 'TSFUSER_PROGRESS'?"


UNFUSED = """import torch
import tsfuser

class Block(torch.nn.Module):
    def forward(self, x):
        y = torch.mm(x, x)
        y = torch.nn.functional.softplus(y) + 1.0
        return y

x = torch.rand(4, 4)
module = torch.jit.script(Block())
for _ in range(3):
    {call}
"""


def test_of_a_group_the_line_of_its_first_op(tmp_path):
    call = "with tsfuser.fuser(): module(x)"
    [found] = places(tmp_path, UNFUSED.format(call=call), CXX="/nowhere/c++")
    assert found.startswith(
        "7: a fusion group (aten::softplus, aten::add) runs unfused: '/nowhere/c++' is not"
    )


def test_of_a_compiled_group_the_line_of_its_first_op(tmp_path):
    call = "torch.compile(Block(), backend='tsfuser')(x)"
    [found] = places(tmp_path, UNFUSED.format(call=call), CXX="/nowhere/c++")
    assert found.startswith(
        "7: a fusion group (aten::softplus, aten::add) runs unfused: '/nowhere/c++' is not"
    )


def test_of_a_group_without_a_line_the_line_of_the_call(tmp_path):
    source = """import torch
import tsfuser
graph = torch._C.parse_ir('''graph(%x : Tensor):
  %one : int = prim::Constant[value=1]()
  %a : Tensor = aten::exp(%x)
  %b : Tensor = aten::add(%a, %one, %one)
  return (%b)''')
function = torch._C._create_function_from_graph("f", graph)
with tsfuser.fuser():
    for _ in range(3):
        function(torch.rand(4))
"""
    [found] = places(tmp_path, source, CXX="/nowhere/c++")
    assert found.startswith("11: a fusion group (aten::exp, aten::add) runs unfused: ")


def test_where_fusion_is_switched_on_too_late(tmp_path):
    source = UNFUSED.format(call="module(x)") + "tsfuser.enable()\n"
    [found] = places(tmp_path, source)
    assert found.startswith("14: fusion is switched on too late for Block.forward (program.py:7): ")
