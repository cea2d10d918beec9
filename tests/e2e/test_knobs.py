"""nvFuser's switches on torch._C: defaults, return values, precedence, `torch.jit.fuser`."""

import pytest
import torch

import tsfuser
from kit import other_fusers
from kit.support import fuse
from tsfuser import _C, knobs, options
from tsfuser.planning import compile

pytestmark = pytest.mark.graphs

FLAGS = (
    torch._C._jit_can_fuse_on_cpu, torch._C._jit_can_fuse_on_gpu, torch._C._jit_texpr_fuser_enabled,
    torch._C._jit_llga_enabled, knobs.enabled, _C.enabled,
)  # fmt: skip


def add_relu(x):
    return torch.relu(x + 1.0)


def dropped(x):
    return torch.dropout(x * 2.0, 0.5, True)


def flags():
    return [flag() for flag in FLAGS]


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Each test starts from the defaults and leaves them."""
    options.state.__init__()
    knobs.install()
    with other_fusers.kept():
        yield
    options.state.__init__()
    knobs.install()


@pytest.mark.parametrize(
    "name, default",
    [("enabled", False), ("single_node_mode", False), ("horizontal_mode", True), ("guard_mode", True)],
)
def test_a_setter_returns_the_state_before(name, default):
    setter = getattr(torch._C, f"_jit_set_nvfuser_{name}")
    assert [setter(not default), setter(default), setter(not default), setter(default)] == [
        default,
        not default,
        default,
        not default,
    ]


@pytest.mark.parametrize("name", ["enabled", "single_node_mode", "horizontal_mode"])
def test_a_getter_tells_what_was_set(name):
    setter, getter = getattr(torch._C, f"_jit_set_nvfuser_{name}"), getattr(torch._C, f"_jit_nvfuser_{name}")
    for value in (True, False, True):
        setter(value)
        assert getter() is value


def test_none_counts_as_false():
    """`torch.jit.fuser` gives back what the stub returned if it was entered before the import."""
    torch._C._jit_set_nvfuser_enabled(True)
    assert torch._C._jit_set_nvfuser_enabled(None) is True
    assert torch._C._jit_nvfuser_enabled() is False


SWITCHES = [f"_jit_set_nvfuser_{x}" for x in ("enabled", "single_node_mode", "horizontal_mode", "guard_mode")]


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize(
    "value, said",
    [
        ("off", r"not the str 'off'; did you mean False\?"),
        ("True", r"not the str 'True'; did you mean True\?"),
        ("xyzzy", "not the str 'xyzzy'$"),
        ([False], r"not the list \[False\]$"),
    ],
)
def test_a_switch_that_is_set_to_a_text_is_an_error(name, value, said):
    before = vars(options.state).copy()
    with pytest.raises(TypeError, match=f"a switch is True or False, {said}"):
        getattr(torch._C, name)(value)
    assert vars(options.state) == before


def test_switches_of_skipping_and_comparing_take_no_text():
    with pytest.raises(TypeError, match="did you mean True"):
        torch._C._jit_set_nvfuser_skip_node_kind("aten::add", "yes")
    with pytest.raises(TypeError, match="did you mean False"):
        torch._C._jit_nvfuser_set_comparison_callback("no", print)
    assert options.state.skip_kinds == set()


@pytest.mark.parametrize("value, on", [(1, True), (0, False), (torch.tensor(True), True)])
def test_a_number_is_a_switch_as_in_python(value, on):
    torch._C._jit_set_nvfuser_enabled(value)
    assert torch._C._jit_nvfuser_enabled() is on


def test_the_extension_sees_what_is_set():
    torch._C._jit_set_nvfuser_enabled(True)
    torch._C._jit_set_nvfuser_guard_mode(False)
    assert _C.enabled() and not _C.guard_mode()
    torch._C._jit_set_nvfuser_enabled(False)
    torch._C._jit_set_nvfuser_guard_mode(True)
    assert not _C.enabled() and _C.guard_mode()


def test_cannot_be_enabled_without_the_profiling_executor():
    assert torch._C._jit_nvfuser_can_be_enabled() is True
    before = torch._C._jit_set_profiling_executor(False)
    try:
        assert torch._C._jit_nvfuser_can_be_enabled() is False
        with pytest.raises(RuntimeError, match="profiling executor"):
            torch._C._jit_set_nvfuser_enabled(True)
        assert torch._C._jit_set_nvfuser_enabled(False) is False
    finally:
        torch._C._jit_set_profiling_executor(before)


def test_skipped_kinds_flip():
    skip = torch._C._jit_set_nvfuser_skip_node_kind
    assert [skip("aten::add", False), skip("aten::add", True), skip("aten::add", False)] == [
        False,
        False,
        True,
    ]
    assert options.state.skip_kinds == {"aten::add"}
    assert skip("aten::add", True) is True and options.state.skip_kinds == set()
    with pytest.raises(TypeError):
        skip("aten::add")


@pytest.mark.parametrize(
    "kind, said",
    [
        ("aten::addd", "did you mean 'aten::add'"),
        ("aten::Relu", "did you mean 'aten::relu'"),
        ("add", "did you mean 'aten::add'"),
        ("softmx", "did you mean 'aten::softmax'"),
        ("nothing like it", "a kind of node is like aten::add"),
        ("prim::nonsense_copy", "no op is called 'aten::nonsense'"),
    ],
)
def test_an_unknown_node_kind_is_an_error(kind, said):
    for flip in (True, False):
        with pytest.raises(ValueError, match=said):
            torch._C._jit_set_nvfuser_skip_node_kind(kind, flip)
    assert options.state.skip_kinds == set()


@pytest.mark.parametrize("kind, held", [("prim::view_copy", "aten::view"), ("aten::mm", "aten::mm")])
def test_nvfusers_names_of_views_and_ops_that_are_not_fused_may_be_skipped(kind, held):
    skip = torch._C._jit_set_nvfuser_skip_node_kind
    assert skip(kind, True) is False and options.state.skip_kinds == {held}
    assert skip(kind, True) is True and options.state.skip_kinds == set()


@pytest.mark.parametrize("callback", [None, 3, "print", [print]])
def test_a_comparison_callback_that_cannot_be_called_is_an_error(device, callback):
    seen = []
    torch._C._jit_nvfuser_set_comparison_callback(True, lambda *got: seen.append(got))
    try:
        with pytest.raises(TypeError, match="cannot be called; a function is wanted"):
            torch._C._jit_nvfuser_set_comparison_callback(True, callback)
        fuse(add_relu, torch.rand(4, device=device))
        assert seen  # the one that was set before still is
    finally:
        torch._C._jit_nvfuser_clear_comparison_callback()


def test_reset_forgets_plans_but_groups_stay(device):
    x = torch.rand(3, 5, device=device)
    scripted = fuse(add_relu, x)
    before = tsfuser.stats()["groups"]
    assert before >= 1
    tsfuser.reset()
    stay = ("groups", "optimised_too_early")
    rest = {name: n for name, n in tsfuser.stats().items() if name not in stay}
    assert tsfuser.stats()["groups"] == before and not any(rest.values())
    assert torch.equal(scripted(x), add_relu(x)) and tsfuser.stats()["plans_built"] == 1


@pytest.mark.parametrize("run_fallback", [True, False])
def test_comparison_callback_gets_both_results_and_the_graph(device, run_fallback):
    x = torch.rand(3, 5, device=device)
    seen = []
    scripted = fuse(add_relu, x)
    assert torch._C._jit_nvfuser_set_comparison_callback(run_fallback, lambda *got: seen.append(got)) is None
    with tsfuser.fuser():
        out = scripted(x)
    assert torch._C._jit_nvfuser_clear_comparison_callback() is None
    with tsfuser.fuser():
        scripted(x)
    ((fused, unfused, graph),) = seen
    assert len(fused) == 1 and torch.equal(fused[0], out)
    assert len(unfused) == run_fallback
    assert not unfused or (torch.equal(unfused[0], torch.relu(x + 1.0)) and unfused[0] is not fused[0])
    assert "aten::add" in graph and "aten::relu" in graph


def test_what_a_comparison_callback_raises_reaches_the_caller(device):
    x = torch.rand(3, 5, device=device)
    scripted = fuse(add_relu, x)

    def refuse(fused, unfused, graph):
        raise ValueError("they differ")

    torch._C._jit_nvfuser_set_comparison_callback(True, refuse)
    try:
        with pytest.raises(RuntimeError, match="ValueError: they differ"):
            scripted(x)
    finally:
        torch._C._jit_nvfuser_clear_comparison_callback()
    assert torch.equal(scripted(x), torch.relu(x + 1.0))


def test_a_comparison_does_not_change_the_random_numbers_of_the_program(device):
    x = torch.ones(4096, device=device)
    scripted = fuse(dropped, x)

    def draws():
        torch.manual_seed(3)
        return [scripted(x), scripted(x)]

    expected = draws()
    torch._C._jit_nvfuser_set_comparison_callback(True, lambda *got: None)
    try:
        found = draws()
    finally:
        torch._C._jit_nvfuser_clear_comparison_callback()
    assert all(map(torch.equal, found, expected)) and not torch.equal(*expected)


def test_nncs_variable_keeps_fusion_off():
    with options.override(use_nnc=True):
        assert torch._C._jit_set_nvfuser_enabled(True) is False
        assert torch._C._jit_nvfuser_enabled() is False and not _C.enabled()


@pytest.mark.parametrize("context", [tsfuser.fuser, lambda: torch.jit.fuser("fuser2")])
def test_fuser2_switches_on_and_puts_all_back(context):
    before = flags()
    with context():
        assert flags() == [False, False, False, False, True, True]
        with torch.jit.fuser("fuser1"):
            assert not tsfuser.enabled() and torch._C._jit_texpr_fuser_enabled()
            with context():
                assert flags() == [False, False, False, False, True, True]
            assert not tsfuser.enabled() and torch._C._jit_texpr_fuser_enabled()
        assert flags() == [False, False, False, False, True, True]
    assert flags() == before


def test_fuser_puts_back_when_its_block_raises():
    before = flags()
    with pytest.raises(ZeroDivisionError), tsfuser.fuser():
        raise ZeroDivisionError
    assert flags() == before


def test_enable_and_disable():
    tsfuser.enable()
    assert tsfuser.enabled() and not torch._C._jit_texpr_fuser_enabled()
    tsfuser.disable()
    assert not tsfuser.enabled()


@pytest.mark.parametrize("cuda, expected", [("13.0", 1), (None, 0)])
def test_enabling_starts_the_compiler_for_cuda_once_when_torch_has_cuda(monkeypatch, cuda, expected):
    waiting = []
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "_lazy_call", waiting.append)
    compile.expect_cuda.cache_clear()
    knobs.install()
    assert waiting == []  # an import changes nothing
    for _ in range(2):
        with tsfuser.fuser():
            pass
    compile.expect_cuda.cache_clear()
    assert waiting == [compile.start_cuda_compiler] * expected
