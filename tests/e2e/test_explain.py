"""`tsfuser.explain`: what is fused, how, and why the rest is not."""

import html.parser
import re
import sys
from types import SimpleNamespace

import pytest
import torch

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.support import FORKED, fresh, run_python, script
from tsfuser.__main__ import main as command
from tsfuser.ops import unsupported

pytestmark = pytest.mark.graphs


def program(x, b, w):
    y = torch.relu(x + b) * 2.0
    z = torch.mm(y, w)
    u = torch.nn.functional.gelu(z + 1.0)
    return torch.sort(u, 0)[0]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(6), torch.nn.LayerNorm(6)
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x):
        h = self.first(x)
        h = torch.relu(self.linear(h)) + 1.0
        return self.second(h)


def operands(device, gradients=False):
    torch.manual_seed(0)
    shapes = (4, 6), (6,), (6, 5)
    return [torch.rand(s, device=device, requires_grad=gradients) for s in shapes]


def line_of(text):
    """The number of the line of this file that holds `text`."""
    with open(__file__) as file:
        return next(n for n, line in enumerate(file, 1) if text in line)


def test_groups_have_nodes_kernels_times_and_bytes(device):
    found = tsfuser.explain(fresh(program), *operands(device))
    (graph,) = found.graphs
    assert graph.title == "inference"
    first, second = graph.groups
    assert [n.kind for n in first.nodes] == ["aten::add", "aten::relu", "aten::mul"]
    assert [n.kind for n in second.nodes] == ["aten::add", "aten::gelu"]
    (kernel,) = first.kernels
    assert (
        kernel.name == "fused_add_relu_mul"
        and kernel.seconds > 0
        and kernel.schedule.startswith("pointwise: ")
    )
    assert kernel.bytes == 4 * (24 + 6 + 24)
    assert (kernel.fraction is not None) == (device == "cuda")
    assert first.arguments[0].startswith("float32[4, 6] on ")
    assert first.nodes[0].place.line == line_of("y = torch.relu(x + b)")


def test_each_node_left_out_has_a_reason_and_its_line(device):
    found = tsfuser.explain(fresh(program), *operands(device))
    assert [(n.kind, n.reason, n.place.text) for n in found.left_out] == [
        ("aten::mm", unsupported.sentence("aten::mm"), "z = torch.mm(y, w)"),
        ("aten::sort", unsupported.sentence("aten::sort"), "return torch.sort(u, 0)[0]"),
    ]
    assert found.left_out[0].place.line == line_of("z = torch.mm(y, w)")
    assert found.graphs[0].edges == ((0, 1), (1, 2), (2, 3))


def between_products(x, w):
    return torch.dropout(x @ w, 0.5, True) @ w


def test_what_tsfuser_put_into_a_graph_needs_no_reason(device):
    """Of the dropout's result the second product would have a copy, if a group made it."""
    x, w = (torch.rand(6, 6, device=device, requires_grad=True) for _ in range(2))
    found = tsfuser.explain(fresh(between_products), x, w)
    kinds = {node.kind for node in found.left_out}
    assert "aten::native_dropout" in kinds and "tsfuser::packed" not in kinds
    assert all("no reason" not in node.reason for node in found.left_out)


def test_in_training_forward_and_backward_graphs_are_explained(device):
    found = tsfuser.explain(fresh(program), *operands(device, gradients=True))
    titles = [graph.title for graph in found.graphs]
    assert titles == [
        "around the differentiated parts", "differentiated part 1, forward", "differentiated part 1, backward"
    ]  # fmt: skip
    if by_joint_graphs():  # which take a sort, too
        [part], [outside] = found.graphs[0].items, [n for n in found.graphs[1].left_out if "sort" in n.kind]
    else:
        part, outside = found.graphs[0].items
        assert found.graphs[0].edges == ((0, 1),)
    assert part.number == 1
    assert outside.kind == "aten::sort"
    assert outside.reason == unsupported.sentence("aten::sort")
    assert len(found.graphs[1].groups) == 2 and found.graphs[2].groups
    assert all(node.reason and "no reason" not in node.reason for node in found.left_out)


def test_the_table_shows_what_was_found(device):
    text = str(tsfuser.explain(fresh(program), *operands(device)))
    assert text.startswith("program: 5 ops fused in 2 groups and 2 kernels, 2 not fused\n")
    assert re.search(r"group \d+: add, relu, mul\n    from test_explain\.py:\d+\n", text)
    launch = r"grid \d+, block \d+ x \d+" if device == "cuda" else r"\d+ pieces?"
    assert re.search(
        rf"segment 0: fused_add_relu_mul\n      pointwise: .*\n      {launch}, .* [un]s, 216 bytes", text
    )
    assert re.search(
        r"mm  at test_explain\.py:\d+: z = torch\.mm\(y, w\)\n      a matrix product is left to", text
    )


def test_lines_of_torchs_own_code_lead_back_to_the_program(device):
    """layer_norm stands in torch/nn/functional.py; the user wrote `self.first(x)`."""
    with torch.no_grad():
        found = tsfuser.explain(torch.jit.script(Block().to(device)), torch.rand(3, 6, device=device))
    norms = [n for g in found.groups for n in g.nodes if "norm" in n.kind]
    linear = [n for n in found.left_out if n.kind == "aten::linear"]
    assert norms and all(n.place.file == __file__ for n in norms)
    assert norms[-1].place.within.startswith("functional.py:")
    assert linear[0].place.line == line_of("torch.relu(self.linear(h))")


def test_the_front_end_of_a_plain_function_is_said(device):
    sentence = "as torch.jit.script takes it"
    x = torch.rand(3, 6, device=device)
    with torch.no_grad():
        plain = tsfuser.explain(Block().to(device), x)
        scripted = tsfuser.explain(torch.jit.script(Block().to(device)), x)
    assert str(plain).splitlines()[1].strip().startswith(sentence) and sentence in plain.to_html()
    assert not scripted.front_end and sentence not in str(scripted)


def test_lines_of_a_notebook_name_the_cell(device, monkeypatch):
    names = {__file__: ("Cell", "In[3]")}  # as IPython's compiler tells them
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=names.get))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    found = tsfuser.explain(fresh(program), *operands(device))
    assert found.left_out[0].place.outer == f"In[3]:{line_of('z = torch.mm(y, w)')}"
    assert "from In[3]:" in str(found)


class Inplace(torch.nn.Module):
    """Two calls of the same module function from two lines, and in-place ops."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.BatchNorm1d(6), torch.nn.BatchNorm1d(6)

    def forward(self, x):
        h = torch.nn.functional.relu(self.first(x), inplace=True)
        return self.second(h) * 2.0


class Counted(Inplace):
    """Reads a counter, so that no counter is left for the end of the graph."""

    def forward(self, x):
        h = torch.nn.functional.relu(self.first(x), inplace=True)
        return self.second(h) * self.first.num_batches_tracked


def test_each_call_of_a_module_has_its_own_line(device):
    module, x = torch.jit.script(Inplace().to(device)), torch.rand(4, 6, device=device)
    with torch.no_grad():
        found = tsfuser.explain(module, x)
    lines = {n.place.line for g in found.groups for n in g.nodes if n.kind == "aten::batch_norm"}
    assert lines == {line_of("functional.relu(self.first(x)"), line_of("self.second(h) * 2.0")}
    found = tsfuser.explain(torch.jit.script(Counted().to(device)), x)
    counts = [n.reason for n in found.left_out if n.kind == "aten::add_"]
    assert len(counts) == 2 and all("a tensor of the module" in reason for reason in counts)
    assert not [n for n in found.left_out if n.kind == "aten::relu_"]  # made functional, and fused


def test_an_op_that_has_to_stay_in_place_has_a_hint(device):
    def seen_through_a_view(x, w):
        y = torch.mm(x, w)
        v = y.view(-1)
        return torch.relu_(y) * 2.0, v

    x = torch.rand(4, 4, device=device, requires_grad=True)
    found = tsfuser.explain(fresh(seen_through_a_view), x, x)
    (hint,) = [n.reason for n in found.left_out if n.kind == "aten::relu_"]
    assert "write relu, or inplace=False" in hint


def test_a_group_that_runs_unfused_says_why(device, monkeypatch):
    def refuses(*_):
        raise tsfuser.errors.Refusal("it is Friday")

    tsfuser.reset()
    monkeypatch.setattr("tsfuser.planning.planner.compile_fusion", refuses)
    with pytest.warns(tsfuser.TsfuserWarning, match="it is Friday"):
        found = tsfuser.explain(fresh(program), *operands(device))
    tsfuser.reset()
    assert [group.refusal for group in found.groups] == ["it is Friday", "it is Friday"]
    assert "runs unfused: it is Friday" in str(found) and "0 ops fused" in str(found)


def test_single_ops_cycles_and_views_have_sentences(device):
    source = """
def f(x, y):
    a = torch.relu(x)
    m = torch.mm(a, a)
    v = m.t()
    return m, v, torch.sort(v, 0)[0]
"""
    x = torch.rand(4, 4, device=device)
    found = tsfuser.explain(script(source), x, x)
    reasons = {node.kind: node.reason for node in found.left_out}
    assert (
        reasons["aten::relu"]
        == "none of the nodes around it can be fused, and a group of one op saves nothing"
    )
    assert "view" in reasons["aten::t"] and found.groups == []


def test_nothing_of_the_callers_changes(device):
    x, b, w = operands(device, gradients=True)
    before, state = [t.detach().clone() for t in (x, b, w)], torch.get_rng_state()
    scripted = fresh(program)
    tsfuser.explain(scripted, x, b, w)
    assert all(map(torch.equal, (x, b, w), before)) and x.grad is None and w.grad is None
    assert torch.equal(torch.get_rng_state(), state) and not tsfuser.enabled()
    with pytest.raises(RuntimeError, match="optimized_plan_"):  # it never ran
        scripted.get_debug_state()


def test_a_group_that_the_call_does_not_reach_is_said_to(device):
    """Loops are unrolled for eight turns, and this one has five."""

    def loop(x, n: int):
        for i in range(n):
            x = torch.tanh(x * 0.5 + i)
        return x

    found = tsfuser.explain(loop, torch.rand(4, device=device), 5)
    assert [group.reached for group in found.groups] == [False, True]
    assert "did not run: its guard" in str(found) and "did not run: its guard" in found.to_html()


def test_a_method_has_its_module_with_gradients(device):
    module = torch.jit.script(Block().to(device))
    x = torch.rand(3, 6, device=device)
    assert len(tsfuser.explain(module.forward, x).graphs) == len(tsfuser.explain(module, x).graphs) > 1
    assert all(p.grad is None for p in module.parameters())


def test_keyword_arguments_defaults_and_wrong_ones():
    def scaled(x, k: float = 2.0, add: int = 1):
        return torch.relu(x * k) + add

    scripted = torch.jit.script(scaled)
    assert len(tsfuser.explain(scripted, torch.rand(5), add=3).groups) == 1
    with pytest.raises(TypeError, match="wants an argument 'x'"):
        tsfuser.explain(scripted, k=1.0)
    with pytest.raises(TypeError, match="no argument 'z'"):
        tsfuser.explain(scripted, torch.rand(5), z=1)


class Tags(html.parser.HTMLParser):
    """Counts the tags, and checks that each is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.addresses, self.names = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.addresses += [v for k, v in attributes if k in ("src", "href")]
        self.names += [f"#{v}" for k, v in attributes if k == "id"]
        if tag not in ("meta", "wbr", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_no_other_file(device, tmp_path):
    path = tmp_path / "page.html"
    page = tsfuser.explain(fresh(program), *operands(device)).to_html(path)
    assert path.read_text(encoding="utf-8") == page
    tags = Tags()
    tags.feed(page)
    assert tags.open == [] and set(tags.addresses) <= set(tags.names) and "@import" not in page
    assert tags.seen.count("svg") == 1 and tags.seen.count("rect") == 4 and tags.seen.count("path") == 3
    assert "a matrix product is left to" in page and "z = torch.mm(y, w)" in page


SCRIPT = """
import torch

@torch.jit.script
def activated(x, y):
    return torch.relu(x + y) * 0.5

@torch.jit.script
def summed(x):
    return torch.sort(torch.relu(x + 1.0), 0)[0]

def main():
    x = torch.rand(8, 8)
    print("result", tuple(activated(x, x).shape), tuple(summed(x).shape))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "chosen, others", [([], ["activated: ", "summed: "]), (["--only", "summed"], ["summed: "])]
)
def test_the_command_explains_the_scripted_functions_of_a_script(tmp_path, chosen, others):
    (tmp_path / "model.py").write_text(SCRIPT)
    call = (
        f"import sys, runpy\nsys.argv = ['tsfuser', 'explain', *{chosen}, {str(tmp_path / 'model.py')!r}]\n"
    )
    status, out, err = run_python(tmp_path, call + "runpy.run_module('tsfuser', run_name='__main__')\n")
    assert status == 0, err
    assert "result (8, 8) (8, 8)" in out
    assert [line for line in ("activated: ", "summed: ") if line in out] == others
    assert "sorting is left to torch" in out and "model.py:10" in out


def test_words_behind_the_script_are_its_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "words.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    assert command(["explain", str(script), "--html", "--only", "1"]) == 1  # it calls nothing to explain
    assert "['--html', '--only', '1']" in capsys.readouterr().out


def test_a_script_that_is_not_there_is_told_in_a_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command(["explain", str(tmp_path / "no.py")])
    assert capsys.readouterr().err.endswith(f"argument SCRIPT: there is no file {tmp_path / 'no.py'}\n")


@pytest.mark.parametrize("look", [tsfuser.explain, tsfuser.check])
def test_what_is_neither_scripted_nor_compiled_nor_can_be(look):
    wanted = "a result of torch.jit.script or of torch.compile.* is needed"
    with pytest.raises(TypeError, match=wanted + ", not a value of the type int"):
        look(3, torch.ones(2))
    with pytest.raises(
        TypeError, match=wanted + ": takes_any is neither, and torch.jit.script does not take it"
    ):

        def takes_any(*xs):
            return xs[0] + 1

        look(takes_any, torch.ones(2))


def test_branches_that_did_not_run_are_told_apart(device):
    def branches(x, flag: bool):
        if flag and bool(x.sum() > 0):
            y = torch.relu(x + 1.0)
        else:
            y = torch.sort(torch.tanh(torch.mm(x, x)), 0)[0]
        return y * 2.0 + 1.0

    found = tsfuser.explain(fresh(branches), torch.rand(4, 4, device=device), True)
    idle = {
        n.kind for n in found.left_out if n.reason == "it is in a branch that did not run while profiling"
    }
    assert idle == {"aten::sort", "aten::tanh", "aten::mm"}
    assert str(found).partition("\n")[0].endswith("0 not fused, 3 in branches that did not run")
    page = found.to_html()
    assert page.count('class="box idle"') == 3 and "box left" not in page and "not fused: " not in page
    assert "did not run: mm, sort, tanh" in page


def test_a_fork_is_explained(device):
    found = tsfuser.explain(script(FORKED), torch.rand(4, 8, device=device))
    assert ["aten::add", "aten::relu", "aten::mul"] in [[n.kind for n in g.nodes] for g in found.groups]
    assert all(g.kernels for g in found.groups)
    assert found.graphs[-1].title == "in a branch, a loop, a fork or a fallback"
