"""Plans on disk: what was planned once is not planned again, and whatever a plan depends on tells it from
others."""

import os
import random
import shutil
from dataclasses import replace

import pytest
import torch

import tsfuser
from kit.stored_graphs import arguments, empty_store
from kit.support import counted, fuse, no_fallback, run_python, script, train
from tsfuser import _C, options
from tsfuser.ir.call import Call, ListArg, TensorArg
from tsfuser.ir.limits import between
from tsfuser.planning import compile, planner, stored_plans
from tsfuser.planning.plan import Launch, Plan, native
from tsfuser.target.disk_cache import DiskCache

FORWARD = [
    "(x * 2.5 + y).relu()",
    "x.softmax(-1) * y",
    "torch.nn.functional.layer_norm(x, [40], y) + x",
    "(x + y).sum(0) / n",
    "(x * y).mean([0, 1], True) - x",
    "torch.cat([x + 1, x * y], 1).flip([0]) * 2",
    "(x + y).transpose(0, 1).contiguous() * 3",
    "torch.clamp(x, -s, s) * (x > y)",
    "(x + y).to(torch.float16) * 2",
    "torch.nn.functional.gelu(x) * x.var(1, True, True)",
    "x.mul(y).add_(1).sigmoid()",
]
TRAINED = ["(x * y).tanh() * x", "torch.nn.functional.layer_norm(x, [40], y) * x", "(x * y).softmax(1) * y"]


def program(text):
    return script(f"def f(x: Tensor, y: Tensor, s: float, n: int):\n    return {text}\n")


@pytest.fixture(autouse=True)
def store(tmp_path):
    """An empty disk cache in which plans are kept."""
    with empty_store(tmp_path / "cache", stored_plans=True) as folder, no_fallback():
        yield folder


@pytest.fixture
def forbidden(monkeypatch):
    """A function after which nothing is planned: as in a process whose plans are all on disk."""

    def forbid():
        tsfuser.reset()
        monkeypatch.setattr(planner, "compile_fusion", lambda *_: pytest.fail("a group was planned again"))

    return forbid


def shelves(store):
    return sorted(store.glob("??/*.plans"))


@pytest.mark.parametrize("text", FORWARD)
def test_a_second_process_plans_nothing(device, forbidden, text):
    inputs = arguments(device)
    scripted = fuse(program(text), *inputs)
    wanted = scripted(*inputs)
    forbidden()
    with counted() as rise:
        found = fuse(program(text), *inputs)(*inputs)
    assert torch.equal(found, wanted) and found.stride() == wanted.stride() and found.dtype == wanted.dtype
    assert rise["plans_read"] == rise["plans_built"] > 0 == rise["kernels_compiled"]


@pytest.mark.parametrize("text", TRAINED)
def test_a_second_process_that_trains_plans_nothing(device, forbidden, text):
    x, y, *numbers = arguments(device)
    inputs = (x.requires_grad_(), y.requires_grad_(), *numbers)

    def run():
        scripted = program(text)
        with tsfuser.fuser():
            out, gradients = train(scripted, inputs)
        return [out, *gradients]

    wanted = run()
    forbidden()
    with counted() as rise:
        found = run()
    assert all(map(torch.equal, found, wanted))
    assert rise["plans_read"] == rise["plans_built"] > 1


def test_dropout_draws_from_the_generator_of_the_process(device, forbidden):
    scripted = "torch.nn.functional.dropout(x * 2, 0.5, True) * y"
    inputs = arguments(device)
    fuse(program(scripted), *inputs)
    forbidden()
    again = fuse(program(scripted), *inputs)
    drawn = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        drawn.append(again(*inputs))
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])


def test_running_statistics_are_updated(device, forbidden):
    source = (
        "def f(x: Tensor, mean: Tensor, var: Tensor):\n"
        "    return torch.nn.functional.batch_norm(x * 2, mean, var, training=True).relu()\n"
    )

    def run():
        x = arguments(device)[0]
        mean, var = torch.zeros(40, device=device), torch.ones(40, device=device)
        return fuse(script(source), x, mean, var)(x, mean, var), mean, var

    wanted = run()
    forbidden()
    assert all(map(torch.equal, run(), wanted))


def test_other_sizes_of_the_class_are_served_and_others_planned(device, store):
    text = FORWARD[0]
    fuse(program(text), *arguments(device, 24))
    tsfuser.reset()
    for rows, by_columns, read in ((25, 0, True), (24, 1, False), (20, 1, True), (24, 0, True)):
        x, *others = arguments(device, rows)
        inputs = (x.t().contiguous().t() if by_columns else x, *others)
        tsfuser.reset()
        with counted() as rise:
            found = fuse(program(text), *inputs)(*inputs)
        torch.testing.assert_close(found, (inputs[0] * 2.5 + inputs[1]).relu())
        assert rise["plans_built"] == 1 and rise["plans_read"] == read, rows
    assert len(shelves(store)) == 1


def test_a_kernel_that_is_gone_is_compiled_again(device, store):
    inputs = arguments(device)
    wanted = fuse(program(FORWARD[0]), *inputs)(*inputs)
    tsfuser.reset()
    for path in store.glob("??/*"):
        if path.suffix in (".so", ".cubin"):
            path.unlink()
    with counted() as rise:
        assert torch.equal(fuse(program(FORWARD[0]), *inputs)(*inputs), wanted)
    assert rise["plans_read"] == 0 and rise["kernels_compiled"] == 1


@pytest.mark.parametrize("damage", ["cut", "flipped", "another's", "empty"])
def test_a_damaged_shelf_is_not_read(device, store, damage):
    inputs = arguments(device)
    wanted = fuse(program(FORWARD[0]), *inputs)(*inputs)
    (shelf,) = shelves(store)
    content = bytearray(shelf.read_bytes())
    if damage == "another's":
        fuse(program(FORWARD[1]), *inputs)
        (other,) = set(shelves(store)) - {shelf}
        shutil.copy(other, shelf)
    elif damage == "flipped":
        place = random.Random(5).randrange(len(content))
        content[place] ^= 4
        shelf.write_bytes(content)
    else:
        os.truncate(shelf, len(content) // 2 if damage == "cut" else 0)
    tsfuser.reset()
    with counted() as rise:
        assert torch.equal(fuse(program(FORWARD[0]), *inputs)(*inputs), wanted)
    assert rise["plans_read"] == 0 and rise["fallbacks"] == {}
    tsfuser.reset()
    with counted() as rise:
        fuse(program(FORWARD[0]), *inputs)
    assert rise["plans_read"] == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"enable": {"fast_math": ""}},
        {"enable": {"clusters": ""}},
        {"disable": {"fma": ""}},
        {"disable": {"overlap": ""}},
        {"max_registers": 64},
        {"opt_level": 2},
    ],
    ids=str,
)
def test_options_tell_plans_apart(device, store, changed):
    inputs = arguments(device)
    fuse(program(FORWARD[0]), *inputs)
    tsfuser.reset()
    with options.override(**changed):
        fuse(program(FORWARD[0]), *inputs)
    assert tsfuser.stats()["plans_read"] == 0 and len(shelves(store)) == 2


def test_each_option_either_tells_plans_apart_or_is_known_not_to():
    apart = {option.name for option in options.TABLE} - stored_plans._APART
    assert apart == {"dump", "disable", "enable", "max_registers", "opt_level", "host_launch"}


@pytest.mark.parametrize("other", ["x * 2.5000000000000004 + y", "x * 2.5 - y", "x * 2.5 + y + 0.0"])
def test_graphs_tell_plans_apart(device, store, other):
    inputs = arguments(device, dtype=torch.float64)
    for text in ("x * 2.5 + y", other):
        found = fuse(program(text), *inputs)(*inputs)
        x, y = inputs[:2]
        torch.testing.assert_close(found, eval(text, {"x": x, "y": y}), rtol=1e-14, atol=1e-14)
    assert len(shelves(store)) == 2


def test_graphs_whose_texts_may_hide_a_difference_are_not_kept():
    """torch does not print the signs of both parts of a complex number."""
    texts = []
    for number in (complex(0.5, 0.0), complex(0.5, -0.0), 0.5):
        graph = torch._C.Graph()
        graph.registerOutput(graph.insertConstant(number))
        texts.append(graph.str(False))
        assert (stored_plans._text(graph) is None) == isinstance(number, complex)
    assert texts[0] == texts[1]


def test_arguments_and_settings_tell_plans_apart(device, store):
    fuse(program(FORWARD[0]), *arguments(device))
    fuse(program(FORWARD[0]), *arguments(device, dtype=torch.float64))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        tsfuser.reset()
        fuse(program(FORWARD[0]), *arguments(device))
    finally:
        torch.set_default_dtype(before)
    assert tsfuser.stats()["plans_read"] == 0 and len(shelves(store)) == 3


def test_another_version_of_tsfuser_plans_anew(device, store, monkeypatch):
    fuse(program(FORWARD[0]), *arguments(device))
    tsfuser.reset()
    monkeypatch.setattr(stored_plans, "VERSIONS", ("another",))
    fuse(program(FORWARD[0]), *arguments(device))
    assert tsfuser.stats()["plans_read"] == 0 and len(shelves(store)) == 2


def test_versions_are_those_of_the_code_that_was_imported(tmp_path):
    package = shutil.copytree(os.path.dirname(tsfuser.__file__), tmp_path / "tsfuser")
    (package / "ops" / ".#arithmetic.py").symlink_to("nobody@nowhere")  # as Emacs locks files
    code = (
        "from tsfuser.planning import stored_plans as s; from pathlib import Path; import tsfuser\n"
        "before = s._versions(); file = Path(tsfuser.__file__).parent / 'ops' / 'arithmetic.py'\n"
        "file.write_text(file.read_text() + ' ')\n"
        "print(s.VERSIONS == before, s.VERSIONS == s._versions())"
    )
    status, out, err = run_python(tmp_path, code, PYTHONPATH=str(tmp_path))
    assert status == 0 and out.split() == ["True", "False"], err


def test_a_store_that_fails_costs_nothing_but_time(device, store, monkeypatch):
    inputs = arguments(device)
    wanted = fuse(program(FORWARD[0]), *inputs)(*inputs)
    tsfuser.reset()
    monkeypatch.setattr(stored_plans.marshal, "loads", lambda content: [(1, 2)])
    with counted() as rise:
        assert torch.equal(fuse(program(FORWARD[0]), *inputs)(*inputs), wanted)
    assert (rise["plans_read"], rise["plans_built"], rise["fallbacks"]) == (0, 1, {})


def test_where_somebody_looks_on_plans_are_made(device, store, capfd):
    inputs = arguments(device)
    fuse(program(FORWARD[0]), *inputs)
    for watch in ({"dump": {"fusion_ir": ""}}, {"log_levels": {"kernel_cache": 1}}):
        tsfuser.reset()
        with options.override(**watch):
            fuse(program(FORWARD[0]), *inputs)
        found = capfd.readouterr()
        assert "fusion_ir" in found.out or "planned 1 kernel" in found.err
        assert tsfuser.stats()["plans_read"] == 0


def test_a_shelf_keeps_its_latest_plans(store, monkeypatch):
    monkeypatch.setattr(stored_plans, "_MOST", 3)
    call = Call((ListArg("int", (1,)),))
    shelf = stored_plans.Shelf(compile.disk_cache("cpu"), ("of a test",), "cpu")
    plans = [Plan(1, (("const", k, 0),), ((0, 0, k),)) for k in range(5)]
    for plan in [*plans, plans[3]]:
        shelf.keep(plan)
    assert list(shelf._plans()) == [plans[3], plans[4], plans[2]]
    assert shelf.find(call) is None
    shelf.keep(plans[1])
    assert shelf.find(call) == plans[1]


def test_a_plan_comes_back_whole():
    launch = Launch("host", 0, "name", 3, 3, 3, 3, 3, 16, ((0, "input", 1), (8, "int64", 2)), 4, 5)
    plan = Plan(
        3,
        (("add", 0, 1), ("const", 7, 0)),
        ((1, 3, 9),),
        (("float32", (0, 1), (1, 4)),),
        (launch,),
        (("allocation", 0), ("input", 2)),
        random=2,
        updates=((1, True),),
        drawn=4,
        limits=((2, between(0.0, 1.0)),),
        reuses=((0, 1, ((0, 1, 2),)),),
        sources=("a digest",),
    )
    again = stored_plans._plan(stored_plans._plain(plan))
    assert again == plan and again.sources == plan.sources
    assert again == replace(plan) != replace(plan, drawn=5)


def test_plans_serve_what_cpp_says_they_serve():
    call = Call((TensorArg("float32", "cpu", (24, 40), (40, 1), 64),))
    generator = random.Random(8)
    ops = ["add", "sub", "mul", "div", "mod", "ceildiv", "min", "max", "eq", "lt", "le", "pow2", "nextpow2"]
    served = 0
    for _ in range(300):
        count = len(call.leaves)
        instructions = [("const", generator.randrange(9), 0)]
        for k in range(1, 8):
            instructions.append((generator.choice(ops), *(generator.randrange(count + k) for _ in range(2))))
        plan = Plan(count, tuple(instructions), ())
        values = native(plan).evaluate(call.leaves)
        spots = sorted(generator.sample(range(8), 2))
        checks = tuple((k + 1, count + k, values[count + k] + (generator.random() < 0.3)) for k in spots)
        plan = replace(plan, checks=checks)
        expected = native(plan).evaluate(call.leaves) is not None
        assert stored_plans.serves(plan, call.leaves) == expected
        served += expected
    assert 50 < served < 250
    assert not stored_plans.serves(plan, call.leaves[1:])


SOURCE = """
import torch, tsfuser
def program(x, y):
    return torch.nn.functional.layer_norm((x + y).sigmoid() * x, [64])
x, y = torch.randn(16, 64, requires_grad=True), torch.randn(64)
scripted = torch.jit.script(program)
with tsfuser.fuser():
    for _ in range(4):
        scripted(x, y).sum().backward()
stats = tsfuser.stats()
print(stats["plans_built"], stats["plans_read"], stats["kernels_compiled"] > 0, len(stats["fallbacks"]))
"""


def test_processes_share_plans(tmp_path):
    variables = dict(TSFUSER_CACHE_DIR=str(tmp_path / "shared"), TSFUSER_STORED_PLANS="1")
    printed = []
    for _ in range(2):
        status, out, err = run_python(tmp_path, SOURCE, **variables)
        assert status == 0 and not err, err
        printed.append(out.split())
    (built, none, compiled, _), (again, read, anew, _) = printed
    assert (none, compiled, anew) == ("0", "True", "False") and built == again == read != "0"
    assert {found[3] for found in printed} == {"0"}
    status, out, err = run_python(tmp_path, SOURCE, **{**variables, "TSFUSER_STORED_PLANS": "0"})
    assert out.split()[1] == "0"


def test_a_plan_that_cannot_be_kept_costs_nothing_but_time(device, store, monkeypatch):
    put = DiskCache.put

    def no_room(cache, key, suffix, content):
        if suffix == ".plans":
            raise OSError(28, "No space left on device")
        put(cache, key, suffix, content)

    inputs = arguments(device)
    monkeypatch.setattr(DiskCache, "put", no_room)
    found = fuse(program(FORWARD[0]), *inputs)(*inputs)
    torch.testing.assert_close(found, (inputs[0] * 2.5 + inputs[1]).relu())
    assert not shelves(store) and _C.stats()["fallbacks"] == {}
