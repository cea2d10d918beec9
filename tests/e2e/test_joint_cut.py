"""What a forward saves that `tsfuser.joint` has cut from its backward, beside what eager saves."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from kit import opinfo
from kit.derivatives import Untraceable, built, cut_in_two, forms, ours_and_eagers, runnable
from kit.joint_programs import LEFT, MASKS, PROGRAMS, infos, tensors
from tsfuser.errors import Refusal
from tsfuser.joint.cut import LONGEST
from tsfuser.joint.example_types import note_types
from tsfuser.joint.min_cut import UNBOUNDED, Network
from tsfuser.joint.order import compute_late
from tsfuser.joint.passes import divide, write_to_new

#: Ops whose inputs eager reads otherwise: it copies a matrix first; its trace has a size as a tensor.
OTHERWISE = {"matmul", "nn.functional.kl_div"}


def saved_by_eager(call, own):
    """The numbers of the inputs that eager saves, and the bytes of all else that it saves."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        results = pytree.tree_leaves(call(*own))
    places = {t.untyped_storage().data_ptr() for t in saved}
    alive = [t for t in (*own, *results) if isinstance(t, torch.Tensor)]
    return {i for i, t in enumerate(own) if t.untyped_storage().data_ptr() in places}, new_bytes(saved, alive)


def new_bytes(saved, alive):
    """The bytes of saved tensors that are not in the memory of others."""
    known = {t.untyped_storage().data_ptr() for t in alive}
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for place, size in memory.items() if place not in known)


def saved_by_us(parts, own):
    """The same of a cut."""
    given = [t.detach() for t in own]
    made = runnable(parts.forward)(*given)
    saved = [made[i] for i in parts.saved_outputs if isinstance(made[i], torch.Tensor)]
    return set(parts.saved_inputs), new_bytes(saved, [*given, *made[: parts.results]])


def cut_of(call, given, mask=None, **options):
    _, joint = built(call, given, mask or (True,) * len(given))
    return divide(joint, **options)


def kinds(graph):
    return [node.kind().partition("::")[2] for node in graph.nodes() if node.kind().startswith("aten::")]


@pytest.mark.parametrize("info", infos(), ids=opinfo.title)
def test_no_more_is_saved_than_eager_saves(info):
    """Neither inputs, so that no program may not write to one that eager lets it write to, nor bytes."""
    if opinfo.title(info) in LEFT or opinfo.title(info) in OTHERWISE:
        pytest.skip("not compared")
    known = forms(info, torch.float64)
    for form in known[:: max(1, len(known) // 4)]:
        given = form.tensors[0]
        if not all(t.numel() for t in given):
            continue
        try:
            parts = cut_of(form.call, given, form.wanted)
        except (Refusal, Untraceable):
            continue
        own = [t.clone().requires_grad_(wants) for t, wants in zip(given, form.wanted)]
        (inputs, size), (its_inputs, its_size) = saved_by_us(parts, own), saved_by_eager(form.call, own)
        assert inputs <= its_inputs and size <= its_size


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_a_program_cut_in_two(program, mask):
    """At two sets of sizes; and it saves no more than eager."""
    _, joint = built(program, tensors(PROGRAMS[program][0]), mask)
    function, parts = cut_in_two(joint)
    for shapes in PROGRAMS[program]:
        given = tensors(shapes)
        for own, its in zip(*ours_and_eagers(function, joint, program, given, mask), strict=True):
            torch.testing.assert_close(own, its, rtol=1e-10, atol=1e-12)
    own = [t.requires_grad_(wants) for t, wants in zip(tensors(PROGRAMS[program][0]), mask)]
    (inputs, size), (its_inputs, its_size) = saved_by_us(parts, own), saved_by_eager(program, own)
    assert inputs <= its_inputs and size <= its_size


def test_what_follows_from_inputs_is_computed_again():
    parts = cut_of(lambda x, w: torch.sin(x * w), tensors(((4, 8), (8,))))
    assert (parts.saved_inputs, parts.saved_outputs) == ((0, 1), ())
    assert {"mul", "cos"} <= set(kinds(parts.backward))


def test_an_input_that_eager_does_not_save_is_not_saved():
    """The program may write to it before the backward, but not if it says that it does not."""

    def program(x, b):
        return F.gelu(x + b)

    given = tensors(((4, 8), (8,)))
    parts = cut_of(program, given)
    assert (parts.saved_inputs, kinds(parts.backward).count("gelu_backward")) == ((), 1)
    assert len(tensors_saved(parts)) == 1
    parts = cut_of(program, given, keep_inputs=True)
    assert (parts.saved_inputs, tensors_saved(parts)) == ((0, 1), [])


def tensors_saved(parts):
    made = list(parts.forward.outputs())
    return [made[i] for i in parts.saved_outputs if made[i].type().kind() == "TensorType"]


def test_a_result_that_eager_does_not_save_is_not_saved():
    """h is returned, and no derivative reads it: it is computed again from what one reads."""
    parts = cut_of(lambda x, w: ((h := x * w), h.relu() * h.detach().floor().neg()), tensors(((4,), (4,))))
    assert 0 not in parts.saved_outputs


def test_views_are_not_saved():
    parts = cut_of(lambda x, w: (x @ w).t().relu() @ x, tensors(((8, 8), (8, 8))))
    assert {v.node().kind() for v in tensors_saved(parts)} == {"aten::relu"}
    parts = cut_of(lambda x, w: (x @ w).t() @ (x @ w).sin(), tensors(((8, 8), (8, 8))))
    assert "aten::t" not in {v.node().kind() for v in tensors_saved(parts)}


def test_reductions_and_operands_of_products_are_not_computed_again():
    """The backward of the product reads `a`, and that of the quotient the sum. Both follow from inputs."""

    def program(x, w):
        a = torch.tanh(x * w)
        return (a @ w) / (x * x).sum(-1, True)

    parts = cut_of(program, tensors(((6, 6), (6, 6))))
    assert "tanh" not in kinds(parts.backward)
    assert {v.node().kind() for v in tensors_saved(parts)} >= {"aten::tanh", "aten::sum"}


def test_the_later_of_two_equal_values_is_saved():
    """The cosine needs the sum, or twice the sum."""
    parts = cut_of(lambda x, v: ((x + v) * 2.0).sin(), tensors(((5, 5), (5, 5))))
    assert [v.node().kind() for v in tensors_saved(parts)] == ["aten::mul"]


def test_what_the_forward_stores_anyway_is_saved_before_a_later_value():
    """The product is in memory; its half need not be."""
    parts = cut_of(lambda x, w: ((x @ w) * 0.5).sin(), tensors(((5, 5), (5, 5))))
    assert [v.node().kind() for v in tensors_saved(parts)] == ["aten::matmul"]


def test_a_host_saves_results_of_slow_functions_rather_than_operands():
    """The product is in memory, and as large. The derivative reads the sigmoid."""
    parts = cut_of(lambda x, w, v: (x @ w).sigmoid() * v, tensors(((5, 5), (5, 5), (5, 5))))
    assert [v.node().kind() for v in tensors_saved(parts)] == ["aten::sigmoid"]
    assert "sigmoid" not in kinds(parts.backward)


def test_what_is_computed_again_stands_before_its_reader():
    graph = torch._C.parse_ir("""graph(%grad : Tensor, %x : Tensor):
      %a : Tensor = aten::sin(%x)
      %b : Tensor = aten::exp(%a)
      %c : Tensor = aten::cos(%b)
      %d : Tensor = aten::tan(%a)
      %e : Tensor = aten::mul(%grad, %c)
      %f : Tensor = aten::div(%e, %d)
      return (%f)""")
    compute_late(graph, 1)
    assert kinds(graph) == ["sin", "exp", "cos", "mul", "tan", "div"]


def test_random_numbers_are_not_drawn_twice():
    def program(x):
        return F.dropout(x.exp(), 0.5, True).sin()

    x = torch.randn(64, dtype=torch.float64)
    _, joint = built(program, [x], (True,))
    function, parts = cut_in_two(joint)
    assert "native_dropout" not in kinds(parts.backward)
    torch.manual_seed(1)
    result, gradient = function(x, torch.ones_like(x))
    torch.manual_seed(1)
    own = x.clone().requires_grad_()
    expected = program(own)
    torch.testing.assert_close((result, gradient), (expected, *torch.autograd.grad(expected.sum(), own)))


def test_what_is_compared_with_a_saved_value_is_not_computed_again():
    """A value and its row maximum: what a kernel computes again may differ in the last bit. So it is saved
    which elements are the largest."""
    parts = cut_of(lambda x: (x * x.sigmoid()).amax(1, True), tensors(((4, 8),)))
    assert "aten::eq" in {v.node().kind() for v in tensors_saved(parts)}
    assert "eq" not in kinds(parts.backward)


def test_chains_that_are_computed_again_end():
    def program(x):
        for _ in range(3 * LONGEST):
            x = x.sin()
        return x

    parts = cut_of(program, tensors(((4,),)))
    assert 2 <= len(tensors_saved(parts)) <= 4


def test_a_sum_that_is_carried_along_is_not_computed_again():
    def residual(x, w):
        for _ in range(8):
            x = x + torch.mm(torch.tanh(x).bfloat16(), w).float()
        return x

    parts = cut_of(residual, [torch.randn(8, 8), torch.randn(8, 8).bfloat16()])
    lengths = {value.unique(): None for value in list(parts.backward.inputs())[: len(parts.asked)]}
    for node in parts.backward.nodes():
        read = [lengths.get(v.unique(), 0) for v in node.inputs()]
        length = None if None in read else max(read, default=0) + (node.kind() == "aten::add")
        lengths.update((v.unique(), length) for v in node.outputs())
    assert max(length for length in lengths.values() if length is not None) == 0


def test_a_long_chain_of_views():
    """Longer than Python's stack is deep."""

    def program(x):
        for _ in range(1100):
            x = x.t()
        return x.exp()

    parts = cut_of(program, tensors(((3, 3),)))
    assert parts.saved_inputs == () and len(tensors_saved(parts)) == 1


def test_sizes_are_saved_as_numbers():
    """The gradient of a part needs the sizes of the whole."""
    parts = cut_of(lambda x: x[:, 1:3].exp(), tensors(((4, 8),)))
    assert parts.saved_inputs == ()


# ---- the cut of a network


def network(edges, vertices):
    made = Network(vertices)
    for start, end, capacity in edges:
        made.edge(start, end, capacity)
    return made


def test_the_cheapest_cut_nearest_to_the_sink():
    assert network([(0, 1, 5), (1, 2, 5)], 3).sink_side(0, 2) == {2}
    assert network([(0, 1, 4), (1, 2, 5)], 3).sink_side(0, 2) == {1, 2}
    assert network([(0, 1, UNBOUNDED), (1, 2, UNBOUNDED)], 3).sink_side(0, 2) is None


def test_cuts_of_random_networks_are_the_cheapest():
    """Of all cuts."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(40):
        pairs = [(a, b) for a in range(6) for b in range(6) if a != b]
        caps = torch.randint(-4, 6, (len(pairs),), generator=generator).tolist()
        edges = [(a, b, c) for (a, b), c in zip(pairs, caps) if c > 0]
        side = network(edges, 6).sink_side(0, 5)
        sides = [{5} | {v + 1 for v in range(4) if bits >> v & 1} for bits in range(16)]
        prices = {frozenset(s): sum(c for a, b, c in edges if a not in s and b in s) for s in sides}
        assert prices[frozenset(side)] == min(prices.values())
        assert len(side) == min(len(s) for s, price in prices.items() if price == prices[frozenset(side)])


# ---- sizes


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_types_are_those_of_a_call(program):
    """Of all values, with the gradients: dtypes, sizes and strides."""
    given = tensors(PROGRAMS[program][0])
    _, joint = built(program, given, (True, True, True))
    graph = joint.graph.copy()
    note_types(graph)
    nodes = [node for node in graph.nodes() if node.kind() != "prim::Constant"]
    made = [v for node in nodes for v in node.outputs() if v.type().kind() == "TensorType" and v.uses()]
    known = [(v.node().kind(), v.type().dtype(), v.type().sizes(), v.type().strides()) for v in made]
    for _ in range(len(list(graph.outputs()))):
        graph.eraseOutput(0)
    for value in made:
        graph.registerOutput(value)
    grads = list(graph.inputs())[-len(joint.asked) :]
    seen = runnable(graph)(*given, *(torch.ones(g.type().sizes(), dtype=torch.float64) for g in grads))
    for fact, result in zip(known, seen, strict=True):
        kind, dtype, sizes, strides = fact
        assert (dtype, sizes) == (result.dtype, list(result.shape)), kind
        wide = [d for d, size in enumerate(sizes) if size != 1]
        assert [strides[d] for d in wide] == [result.stride(d) for d in wide], kind


@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16])
def test_statistics_of_a_norm_have_the_dtype_that_eager_gives_them(of_weight):
    x, w = torch.randn(4, 8, dtype=torch.bfloat16), torch.ones(8, dtype=of_weight)
    _, joint = built(lambda x, w: F.layer_norm(x, [8], w, w, 1e-5), [x, w], (True, True))
    note_types(joint.graph)
    norm = joint.graph.findNode("aten::native_layer_norm")
    eagers = torch.native_layer_norm(x, [8], w, w, 1e-5)
    assert [v.type().dtype() for v in norm.outputs()] == [t.dtype for t in eagers]


def test_a_tensor_of_which_only_the_dtype_is_asked_is_not_saved():
    """Nor a copy of it."""

    def program(x, w):
        return w * (x * x.mean(-1, True)).type_as(x)

    parts = cut_of(program, [torch.randn(4, 8), torch.randn(8)], (False, True))
    assert parts.saved_inputs == () and "clone" not in kinds(parts.forward)


# ---- the passes around it


def test_a_result_of_a_norm_is_computed_again_of_its_statistics():
    def program(x, w, b):
        return F.silu(F.layer_norm(x, [8], w, b, 1e-5))

    given = tensors(((4, 8), (8,), (8,)))
    _, joint = built(program, given, (True, True, True))
    function, parts = cut_in_two(joint)
    assert kinds(parts.forward).count("native_layer_norm") == 1 and "sub" not in kinds(parts.forward)
    assert sum(v.type().dim() == 2 for v in tensors_saved(parts)) == 2  # the statistics
    for own, its in zip(*ours_and_eagers(function, joint, program, given, (True,) * 3), strict=True):
        torch.testing.assert_close(own, its, rtol=1e-10, atol=1e-12)


def test_a_result_of_a_norm_that_a_product_reads_is_saved():
    def program(x, w, b):
        return F.layer_norm(x, [8], w, b, 1e-5) @ w

    _, joint = built(program, tensors(((4, 8), (8,), (8,))), (True, True, True))
    function, parts = cut_in_two(joint)
    made = {v.node().kind() for v in tensors_saved(parts)}
    assert made == {"aten::native_layer_norm"} and "sub" not in kinds(parts.forward)


def test_two_dropouts_of_one_value_stay_two():
    def program(x):
        return F.dropout(x, 0.5, True) - F.dropout(x, 0.5, True)

    _, joint = built(program, [torch.ones(64, dtype=torch.float64)], (True,))
    _, parts = cut_in_two(joint)
    assert kinds(parts.forward).count("native_dropout") == 2


def test_a_gradient_at_places_is_written_to_zeros():
    """Not to a copy of them. What another op reads, too, is not written to."""
    index = torch.tensor([1, 0, 1])
    _, joint = built(lambda x: x[index, index].exp(), tensors(((4, 8),)), (True,))
    function, parts = cut_in_two(joint)
    assert "index_put_" in kinds(parts.backward)
    graph = torch._C.parse_ir(
        """graph(%x : Tensor, %n : int[], %i : Tensor?[], %no : NoneType, %yes : bool):
  %z : Tensor = aten::new_zeros(%x, %n, %no, %no, %no, %no)
  %a : Tensor = aten::index_put(%z, %i, %x, %yes)
  %b : Tensor = aten::index_put(%z, %i, %x, %yes)
  return (%a, %b)"""
    )
    write_to_new(graph)
    assert kinds(graph) == ["new_zeros", "index_put", "index_put"]


@pytest.mark.parametrize("size, expected", [([1, 1], "div"), ([2, 2], "_adaptive_avg_pool2d_backward")])
def test_the_gradient_of_a_mean_of_images_is_no_gradient_of_windows(size, expected):
    parts = cut_of(lambda x: F.adaptive_avg_pool2d(x.sin(), size), tensors(((2, 3, 4, 4),)))
    assert expected in kinds(parts.backward)
