"""Compiled programs that change parts of inputs: as in eager, no more is written than those parts."""

import copy

import pytest
import torch

import tsfuser
from kit import compiled_models
from kit.support import assert_matches

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten", "fused_or_error")]

ROWS = 1024


def fill_part(cache, at, x):
    cache[:, :, 2:4] = x


def fill_row(cache, at, x):
    cache[:, :, 3] = x[:, :, 0]


def fill_block(cache, at, x):
    cache[:1, :, 2:4] = x[:1] * 2


def fill_indices(cache, at, x):
    cache[:, :, at] = x


def add_to_indices(cache, at, x):
    cache[:, :, at] += x


def fill_mask(cache, at, x):
    cache[:, :, 5:].masked_fill_((x[:, :, :1] > 0), 2)


def scale_part(cache, at, x):
    cache[:, :, 2:4].mul_(x)


def fill_diagonal(cache, at, x):
    cache.diagonal(dim1=1, dim2=3).fill_(2.0)


def copy_computed(cache, at, x):
    cache[:, :, 1:3] = torch.tanh(x * 2) + 1


FORMS = {
    "index_copy": lambda cache, at, x: cache.index_copy_(2, at, x),
    "copied back": lambda cache, at, x: cache.copy_(cache.index_copy(2, at, x)),
    "index_add": lambda cache, at, x: cache.index_add_(2, at, x, alpha=2),
    "index_fill": lambda cache, at, x: cache.index_fill_(2, at, 3.0),
    "scatter": lambda cache, at, x: cache.scatter_(2, at[None, None, :, None].expand_as(x), x),
    "narrow": lambda cache, at, x: cache.narrow(2, 1, 2).copy_(x),
    "one op on all": lambda cache, at, x: cache.add_(1),
    **{f.__name__: f for f in (fill_part, fill_row, fill_block, fill_indices, add_to_indices, fill_mask)},
    **{f.__name__: f for f in (scale_part, fill_diagonal, copy_computed)},
}


def arguments(device, rows=ROWS):
    at = torch.tensor([rows - 1, 1], device=device)
    return torch.randn(2, 4, rows, 4, device=device), at, torch.randn(2, 4, 2, 4, device=device)


def largest(function, *args):
    """The bytes of the largest tensor that a call allocates."""
    if args[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function(*args)
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profile:
        function(*args)
    return max(event.self_cpu_memory_usage for event in profile.events())


@pytest.mark.each_value
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_only_the_part_is_written(name, dynamic, device):
    def function(cache, at, x):
        FORMS[name](cache, at, x)
        return cache.select(2, 1) @ x.mT.select(1, 0) + 1  # reads the new one

    run = torch.compile(function, backend="tsfuser", fullgraph=True, dynamic=dynamic)
    for rows in (ROWS, ROWS + 3) if dynamic else (ROWS,):
        args = arguments(device, rows)
        cache, plain = args[0], args[0].clone()
        for _ in range(2):
            version, address = cache._version, cache.data_ptr()
            found, expected = run(cache, *args[1:]), function(plain, *args[1:])
            assert_matches(cache, plain, ops=20)
            assert_matches(found, expected, ops=40)
            assert cache._version > version and cache.data_ptr() == address
        assert largest(run, cache, *args[1:]) < cache.numel() * 4


def read_behind(cache, at, x):
    new = cache.index_copy(2, at, x)
    old = cache.sum(2)
    cache.copy_(new)
    return old


def returned(cache, at, x):
    new = cache.index_copy(2, at, x)
    cache.copy_(new)
    return new


def returned_view(cache, at, x):
    new = cache.index_copy(2, at, x)
    cache.copy_(new)
    return new[0]


def returned_in_a_view(cache, at, x):
    cache.index_copy_(2, at, x)
    return cache[0]


def from_itself(cache, at, x):
    cache[:, :, 1:4] = cache[:, :, 0:3]


def from_itself_by_indices(cache, at, x):
    cache.index_copy_(2, at, cache[:, :, :2])


def swapped(cache, at, x):
    rows = cache[:, :, :2]
    new = x.index_copy(2, at * 0 + 1, rows[:, :, :1].expand_as(x))
    cache.copy_(cache.index_copy(2, at, x))
    x.copy_(new)


def twice(cache, at, x):
    cache.index_copy_(2, at, x)
    cache[:, :, :2] = x * 2
    cache.index_add_(2, at, x)


def another_part(cache, at, x):
    """What is placed was made of another part than it is placed in."""
    changed = cache[:, :, 0:2].clone().index_copy(2, at.clamp(max=1), x)
    cache.copy_(cache.slice_scatter(changed, 2, 4, 6))


def read_twice(cache, at, x):
    part = cache[:, :, 0:2].index_copy(2, at.clamp(max=1), x)
    cache.copy_(cache.slice_scatter(part, 2, 0, 2))
    return torch.sin(part @ x.mT)


def in_another_order(cache, at, x):
    new = cache.index_copy(2, at, x)
    first = torch.exp(new) + 1
    cache.copy_(new)
    return first, new.transpose(0, 1).reshape(-1, 4) @ x[0, 0].mT


def tensors(values):
    return [t for t in torch.utils._pytree.tree_leaves(values) if t is not None]


@pytest.mark.parametrize("layout", ["dense", "transposed", "strided"])
@pytest.mark.parametrize(
    "function",
    [
        read_behind,
        returned,
        returned_view,
        returned_in_a_view,
        from_itself,
        from_itself_by_indices,
        swapped,
        twice,
        another_part,
        read_twice,
        in_another_order,
    ],
)
def test_who_reads_the_old_value_or_keeps_the_new_one(function, layout, device):
    def laid(tensor):
        if layout == "dense":
            return tensor.clone()
        if layout == "transposed":
            return tensor.transpose(0, 3).contiguous().transpose(0, 3)
        return torch.cat([tensor, tensor], -1)[..., ::2]

    cache, at, x = arguments(device, 8)
    ours, plain = ((laid(cache), at, x.clone()) for _ in range(2))
    run = torch.compile(function, backend="tsfuser", fullgraph=True)
    for _ in range(2):
        if function in (from_itself, from_itself_by_indices):
            rows = plain[0].clone()  # in eager mode, some would be read after they are written
            places = torch.arange(1, 4, device=device) if function is from_itself else at
            plain[0].index_copy_(2, places, rows[:, :, : len(places)])
            run(*ours)
            assert_matches(ours[0], plain[0])
            continue
        found, expected = run(*ours), function(*plain)
        for a, b in zip(*map(tensors, ((found, ours), (expected, plain)))):
            assert_matches(a, b, ops=40)
        if function in (returned, returned_view):
            assert found.untyped_storage().data_ptr() != ours[0].untyped_storage().data_ptr()
        if function is returned_in_a_view:
            assert found.data_ptr() == ours[0].data_ptr()


def test_what_counts_calls_is_one_op(device):
    """Each counter starts from another number; one is read, one counts by another step."""
    norms = [torch.nn.BatchNorm2d(4) for _ in range(4)]
    model = torch.nn.Sequential(*norms).to(device)
    steps, twos = torch.arange(3, device=device), torch.zeros((), dtype=torch.int64, device=device)

    def function(x, small):
        steps[2:].add_(2)
        twos.add_(2)
        small.add_(0.5)
        y = model(x)
        return y * model[3].num_batches_tracked

    for k, norm in enumerate(norms):
        norm.num_batches_tracked.fill_(k)
    run, small = torch.compile(function, backend="tsfuser"), torch.zeros((), device=device)
    for call in range(1, 4):
        x = torch.randn(3, 4, 5, 5, device=device)
        found = run(x, small)
        twin = torch.nn.functional.batch_norm
        exact = x.double()
        for _ in norms:
            exact = twin(exact, None, None, training=True)
        assert_matches(found, (exact * (3 + call)).float(), exact * (3 + call), ops=400)
        assert [int(norm.num_batches_tracked) for norm in norms] == [k + call for k in range(4)]
        assert steps.tolist() == [0, 1, 2 + 2 * call] and float(small) == 0.5 * call
        assert int(twos) == 2 * call
    with torch.profiler.profile() as profile:
        run(x, small)
    names = [event.name for event in profile.events()]
    assert names.count("aten::_foreach_add_") == 1
    assert "_foreach_add_" in str(tsfuser.explain(run, x, small))


def test_a_cache_of_keys_and_values_is_not_copied(device):
    model = compiled_models.Llama(length=ROWS).to(device).eval()
    twin, run = copy.deepcopy(model), torch.compile(model, backend="tsfuser")
    with torch.no_grad():
        for at in (0, 5):
            x, places = torch.randn(2, 5, 16, device=device), torch.arange(at, at + 5, device=device)
            assert_matches(run(x, places), twin(x, places), ops=200)
            assert_matches(model.keys, twin.keys, ops=50)
            assert_matches(model.values, twin.values, ops=50)
        with torch.profiler.profile() as profile:
            run(x, places)
    names = [event.name for event in profile.events()]
    assert names.count("aten::index_copy_") == 2
    assert not {"aten::copy", "aten::index_copy", "aten::_foreach_copy_"} & set(names)
