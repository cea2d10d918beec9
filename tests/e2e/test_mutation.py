"""Made-up programs that change tensors in place, through views, lists, branches and loops: the graph pass
must keep every read on its side of every write.

Values are small integers in float64 and the ops are exact, so results must be equal, as must what is left
in the inputs, and which results share memory. Where unfused TorchScript differs from eager (it does, where
`type_as` or `contiguous` return their operand), it is the reference."""

import random

import pytest
import torch

import tsfuser

pytestmark = pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")

PURE = (
    "{a} + {b}", "{a} - {b}", "{a} * 0.5", "-{a}", "torch.relu({a})", "torch.max({a}, {b})", "{a} + 1.0",
    "{a} * 1.0", "{a} + {b}[0]", "torch.where({a} > 0, {a}, {b})", "{a}.to(torch.float64)",
    "{a}.type_as({b})",
    "{a}.clone()", "({a} > {b}).to(torch.float64)", "{a}.mm({b}) * 0.0 + {b}", "l[-1] + {a}",
    "{a} + float({b}.size(0) + {a}.dim())", "torch.cat([{a}, {b}])[2:6]", "torch.stack(({a}, {b})).sum(0)",
)  # fmt: skip
VIEWS = (
    "{a}.t()", "{a}.view(16).view(4, 4)", "{a}.transpose(0, 1)", "{a}.contiguous()", "{a}[:]",
    "{a}.detach()", "{a}.expand_as({b})", "{a}.unsqueeze(0).squeeze(0)", "{a}.permute(1, 0)",
    "{a}.expand(4, -1)",
    "torch.einsum('ij->ji', {a})", "torch.atleast_2d({a})", "torch.conj_physical({a})", "{a}.to_dense()",
    "torch.broadcast_tensors({a}, {b})[0]", "torch.unsafe_split({a}, 4)[0]",
    "{a}.t().to(torch.float64)", "{a}.reshape(2, 8).reshape(4, 4)", "{a}.flatten().unflatten(0, [4, 4])",
)  # fmt: skip
WRITES = (
    "{a}.add_({b})", "{a}.mul_(0.5)", "{a}.relu_()", "{a}.clamp_(-2.0, 2.0)", "{a}.zero_()",
    "{a}.copy_({b})", "{a}[0].add_(1.0)", "{a}.t().add_({b})", "{a}.sub_(1.0)", "{a}.neg_()", "l.append({a})",
    "assert {a}.dim() == 2",
)  # fmt: skip


class Author:
    """Writes one program."""

    def __init__(self, seed):
        self.choose = random.Random(seed)
        self.count = 0

    def program(self):
        lines, values = self.block(["x", "y"], 1, self.choose.randint(3, 22))
        results = self.choose.sample(values, min(len(values), self.choose.randint(1, 4)))
        head = ["def program(x, y, n: int, flag: bool):", "    l = [x]"]
        return "\n".join([*head, *lines, f"    return [{', '.join(results)}]", ""])

    def block(self, values, depth, length):
        """Lines, and the names that are known after them."""
        values, lines, indent = list(values), [], "    " * depth
        for _ in range(length):
            a, b = self.choose.choice(values[-6:]), self.choose.choice(values[-8:])
            what = self.choose.choices(
                (PURE, VIEWS, WRITES, "if", "for"), (55, 12, 20, 5 * (depth < 3), 5 * (depth < 3))
            )[0]
            if what is WRITES:
                lines.append(indent + self.choose.choice(WRITES).format(a=a, b=b))
                continue
            self.count += 1
            name = f"v{self.count}"
            if isinstance(what, tuple):
                lines.append(f"{indent}{name} = {self.choose.choice(what).format(a=a, b=b)}")
            else:
                head = {"if": self.choose.choice(["if flag:", "if n > 2:"]), "for": "for _ in range(n):"}[
                    what
                ]
                inner, known = self.block([*values, name], depth + 1, self.choose.randint(1, 5))
                update = f"{indent}    {name} = {self.choose.choice(known)}"
                lines += [f"{indent}{name} = {a}", indent + head, *inner, update]
            values.append(name)
        return lines, values


def observe(function, seed, call):
    """What a caller can see: results, inputs afterwards, and which of them share memory."""
    generator = torch.Generator().manual_seed(10 * seed + call)
    inputs = [torch.randint(-3, 4, (4, 4), generator=generator).double() for _ in range(2)]
    seen = [*inputs, *function(*inputs, call % 3 + 1, call != 3)]
    places = [t.untyped_storage().data_ptr() for t in seen]
    return seen, [[p == q for p in places] for q in places]


def check(seed):
    source = Author(seed).program()
    plain, fused = (torch.jit.CompilationUnit(source).program for _ in range(2))
    expected = []
    with torch.jit.fuser("fuser0"):
        try:
            expected = [observe(plain, seed, call) for call in range(5)]
        except RuntimeError:
            return  # eager refuses the program as well: a write to an expanded tensor
    with tsfuser.fuser():
        for call, (want, shared) in enumerate(expected):
            got, sharing = observe(fused, seed, call)
            assert all(map(torch.equal, got, want)), f"seed {seed}, call {call}:\n{source}"
            assert call < 3 or sharing == shared, (
                f"seed {seed}, call {call} shares memory differently:\n{source}"
            )


@pytest.mark.parametrize("batch", range(5))
def test_programs_that_write_in_place(batch):
    for seed in range(10 * batch, 10 * batch + 10):
        check(seed)


@pytest.mark.long
def test_many_programs_that_write_in_place():
    for seed in range(1000, 4000):
        check(seed)


JOINS = {
    "cat": "torch.cat([y, y], -1)",
    "cat with another": "torch.cat([y, x], -1)",
    "stack": "torch.stack((y, x))",
    "a tuple": "(y, x)[0]",
    "a list of lists": "torch.cat([[y, x], [x, x]][0])",
    "a dict": '{"y": y}["y"]',
    "a cat of a stack": "torch.cat([torch.stack([y, y]), torch.stack([x, x])])",
}
MADE = {"of groups": "x + 1", "of torch": "torch.sort(x, 0)[0]"}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("join", JOINS)
def test_a_write_in_a_branch_is_seen_through_a_list(device, made, join):
    """Torch's dead code elimination drops a write to what stands in a list by then."""
    source = (
        f"def f(x: Tensor, c: Tensor, s: float):\n    y = {MADE[made]}\n"
        f"    if bool(c.any()):\n        y.mul_(0.5)\n    return {JOINS[join]}, c > s\n"
    )
    scope = {"torch": torch, "Tensor": torch.Tensor}
    exec(source, scope)
    scripted = torch.jit.CompilationUnit(source).f
    x = torch.arange(5.0, device=device)
    with tsfuser.fuser():
        for c in [torch.arange(4.0, device=device)] * 5 + [torch.zeros(4, device=device)]:
            for got, want in zip(scripted(x, c, 0.5), scope["f"](x, c, 0.5), strict=True):
                assert torch.equal(got, want)


#: Ops that give views in eager, which their schemas do not say.
HIDDEN_VIEWS = (
    "torch.einsum('ij->ji', y)", "torch.einsum('ii->i', y[:, :3])", "torch.atleast_1d(y)",
    "torch.atleast_2d(y)", "torch.atleast_3d(y)", "torch.conj_physical(y)", "y.to_dense()",
    "torch.broadcast_tensors(y, y)[0]", "torch.unsafe_chunk(y, 2)[0]", "torch.unsafe_split(y, 1)[0]",
    "torch.unsafe_split_with_sizes(y, [1, 2])[0]", "torch.meshgrid(y[0], y[1])[0]",
    "torch.cartesian_prod(y[0])", "torch.chain_matmul(y)", "y.sum_to_size([3, 4])",
)  # fmt: skip
WRITERS = {
    "the view is written": "y = x * 2 + 1\n    z = {view}\n    z.add_(1)\n    return y * 3, z",
    "what it views is": "y = x * 2 + 1\n    z = {view} * 3\n    y.mul_(2)\n    return (z + 1) * y.sum(), y",
    "an argument is": "y = x\n    z = {view} * 3\n    y.mul_(2)\n    return (z + 1) * y.sum(), y * 1",
}


@pytest.mark.parametrize("written", WRITERS)
@pytest.mark.parametrize("view", HIDDEN_VIEWS)
def test_a_write_is_seen_through_views_that_schemas_hide(device, view, written):
    if "meshgrid" in view and written == "the view is written":
        pytest.skip("eager refuses to write to its results")
    source = f"def f(x: Tensor):\n    {WRITERS[written].format(view=view)}\n"
    scope = {"torch": torch, "Tensor": torch.Tensor}
    exec(source, scope)
    scripted = torch.jit.CompilationUnit(source).f
    with tsfuser.fuser():
        for _ in range(4):
            x, y = (torch.arange(12.0, device=device).reshape(3, 4) for _ in range(2))
            for got, want in zip(scripted(x), scope["f"](y), strict=True):
                assert torch.equal(got, want)
            assert torch.equal(x, y)


@pytest.mark.graphs
@pytest.mark.parametrize("written", WRITERS)
@pytest.mark.parametrize("view", HIDDEN_VIEWS)
def test_a_write_is_seen_through_hidden_views_in_training(device, view, written):
    source = f"def f(x: Tensor):\n    x = x * 1\n    {WRITERS[written].format(view=view)}\n"
    scope = {"torch": torch, "Tensor": torch.Tensor}
    exec(source, scope)
    scripted = torch.jit.CompilationUnit(source).f
    with tsfuser.fuser():
        for _ in range(4):
            x, y = (torch.arange(12.0, device=device).reshape(3, 4).requires_grad_() for _ in range(2))
            try:
                wanted = scope["f"](y)
                sum((k + 1) * t.sum() for k, t in enumerate(wanted)).backward()
            except RuntimeError:
                return  # eager refuses the program, or its backward
            found = scripted(x)
            sum((k + 1) * t.sum() for k, t in enumerate(found)).backward()
            assert all(map(torch.equal, found, wanted)) and torch.equal(x.grad, y.grad)


COPIES = (
    "x.to(x.device, copy=True)", "x.to(x.dtype, copy=True)", "x.to(x, copy=True)", "x.type_as(z)", "x.to(z)",
    "x.to(x.device, torch.float32)", "x.t().contiguous()", "x.t().reshape(2, 8).view(4, 4)",
    "x.t().flatten().view(4, 4)", "x.clone()",
)  # fmt: skip


@pytest.mark.parametrize("write", ["x.add_(2.0)", "x.mul_(v.sum())", "v.add_(x)"])
@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_stays_one_copy_behind_a_write(device, copy, write):
    """A view is made again behind a write, for readers outside of differentiable graphs; a copy never is."""
    source = (
        f"def f(x, z):\n    v = {copy}\n    {write}\n    w = x * 2.0\n    return v * 2.0 + 1.0, w + v.sum()\n"
    )
    space = {"torch": torch}
    exec(source, space)
    scripted = torch.jit.CompilationUnit(source).f
    x, z = torch.arange(16.0, device=device).view(4, 4), torch.zeros(4, 4, device=device, dtype=torch.float64)
    with tsfuser.fuser():
        for _ in range(3):
            given, own = x.clone(), x.clone()
            for ours, eager in zip((*scripted(given, z), given), (*space["f"](own, z), own)):
                assert torch.equal(ours, eager)
