"""Each op's derivative as `tsfuser.joint` writes it, cut into forward and backward, beside eager's.

In: an OpInfo of torch's `op_db`. Out: what holds of the gradients of its samples. Samples of one form, that
is of equal numbers and lists and equal ranks, are one graph, made of the first of them and run for all: sizes
that a rule took for constants would show. Example:

    judge(info)   ->   "right 12", "refused: aten::x has no derivative here", or "wrong: ..."
"""

import warnings
from dataclasses import dataclass, field

import torch
from torch.utils import _pytree as pytree

from tsfuser.errors import Refusal
from tsfuser.graph.types import infer_missing_types
from tsfuser.joint.passes import divide
from tsfuser.joint.reverse import reverse


@dataclass
class Form:
    """Samples that one graph serves: the op's call, the tensors of each sample in order, and which of them
    want a gradient."""

    call: object
    wanted: list
    tensors: list = field(default_factory=list)


def forms(info, dtype, device="cpu"):
    """The forms of the op's samples."""
    found = {}
    for sample in info.sample_inputs(device, dtype, requires_grad=True):
        leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        others = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
        about = ((i, leaves[i]) for i in places)
        alike = tuple((i, t.dim(), t.dtype, t.device, t.requires_grad) for i, t in about)
        wanted = [leaves[i].requires_grad and leaves[i].is_floating_point() for i in places]
        form = found.setdefault(
            (others, alike, str(spec)), Form(_caller(info, sample, leaves, places, spec), wanted)
        )
        form.tensors.append([leaves[i].detach() for i in places])
    return list(found.values())


def _caller(info, sample, leaves, places, spec):
    def call(*tensors):
        filled = list(leaves)
        for place, tensor in zip(places, tensors):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return sample.output_process_fn_grad(info.op(*args, **kwargs))

    return call


class Untraceable(Exception):
    """torch.jit.trace fails."""


def traced(call, tensors):
    """The typed graph of a call. It holds for all sizes of these ranks. Raises Untraceable where this torch
    cannot trace it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            graph = torch.jit.trace(call, tuple(tensors), check_trace=False).graph.copy()
        except RuntimeError as error:
            raise Untraceable(str(error)) from error
    torch._C._jit_pass_inline(graph)
    torch._C._jit_pass_lower_all_tuples(graph)
    return infer_missing_types(graph)


def built(call, tensors, wanted):
    """The joint graph of a call as a function, and what it holds."""
    joint = reverse(traced(call, tensors), wanted)
    return runnable(joint.graph), joint


def runnable(graph):
    """A function that runs a copy of the graph; its results are a tuple."""
    copy = graph.copy()
    copy.makeMultiOutputIntoTuple()
    function = torch._C._create_function_from_graph("joint", copy)

    def run(*given):
        made = function(*given)
        return made if isinstance(made, tuple) else (made,)

    return run


def cut_in_two(joint, **options):
    """The joint graph as a function that runs its forward, then its backward, and what the cut is."""
    parts = divide(joint, **options)
    forward, backward = runnable(parts.forward), runnable(parts.backward)

    def run(*given):
        first = len(given) - len(parts.asked)
        made = forward(*given[:first])
        saved = [given[i] for i in parts.saved_inputs] + [made[i] for i in parts.saved_outputs]
        return (*made[: parts.results], *backward(*given[first:], *saved))

    return run, parts


def share(result):
    """A gradient for a result: numbers without a pattern."""
    generator = torch.Generator().manual_seed(result.numel())
    return torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result)


def ours_and_eagers(function, joint, call, tensors, wanted):
    """Results and gradients: ours and eager's, zeros where eager has none."""
    own = [t.clone().requires_grad_(wants) for t, wants in zip(tensors, wanted)]
    results = [r for r in pytree.tree_leaves(call(*own)) if isinstance(r, torch.Tensor)]
    given = {i: share(results[i].detach()) for i in joint.asked}
    there = [i for i in joint.asked if results[i].requires_grad]
    inputs = [own[i] for i in joint.differentiated]
    gradients = [None] * len(inputs)
    if there and inputs:
        asked, shares = [results[i] for i in there], [given[i] for i in there]
        gradients = torch.autograd.grad(asked, inputs, shares, allow_unused=True)
    made = list(function(*[t.detach() for t in own], *given.values()))
    gradients = [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, gradients)]
    return made, [r.detach() for r in results] + gradients


def judge(info, dtype=torch.float64, most=None):
    """What holds of the gradients of all samples, or of `most` forms from all over the list."""
    count, known = 0, forms(info, dtype)
    for form in known if most is None else known[:: max(1, len(known) // most)]:
        try:
            _, joint = built(form.call, form.tensors[0], form.wanted)
            function, _ = cut_in_two(joint)
        except Refusal as refusal:
            return f"refused: {refusal}"
        except Untraceable:
            continue
        for tensors in form.tensors:
            for own, its in zip(*ours_and_eagers(function, joint, form.call, tensors, form.wanted)):
                if (own.shape, own.dtype) != (its.shape, its.dtype):
                    return f"wrong: {own.dtype} of {list(own.shape)} for {its.dtype} of {list(its.shape)}"
                if not torch.allclose(own, its, rtol=1e-9, atol=1e-10, equal_nan=True):
                    return f"wrong by {(own - its).abs().max():.2g}: {[list(t.shape) for t in tensors]}"
            count += 1
    return f"right {count}" if count else "not traced"
