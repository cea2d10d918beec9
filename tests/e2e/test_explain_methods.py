"""`explain` and `check` of modules and methods, whatever a method calls its module, and after saving."""

import pytest
import torch

import tsfuser

pytestmark = pytest.mark.graphs


class Named(torch.nn.Module):
    """The first argument of a method may have any name, and another argument may be called `self`."""

    def __init__(this):
        super().__init__()
        this.weight = torch.nn.Parameter(torch.rand(6))
        this.norm = torch.nn.LayerNorm(6)

    def forward(s, x, scale: float = 2.0):
        y = torch.relu(x + s.weight)
        return s.norm(y) * scale

    @torch.jit.export
    def other(module, x, self: float):
        return torch.tanh(x * self) + module.weight


def loaded(module, path):
    torch.jit.save(module, path)
    return torch.jit.load(path)


def frozen(module, method=()):
    return torch.jit.freeze(module.eval(), preserved_attrs=list(method))


MADE = {
    "scripted": lambda m, path: torch.jit.script(m),
    "loaded": lambda m, path: loaded(torch.jit.script(m), path),
    "frozen": lambda m, path: frozen(torch.jit.script(m), ["other"]),
    "frozen and loaded": lambda m, path: loaded(frozen(torch.jit.script(m), ["other"]), path),
    "loaded and frozen": lambda m, path: frozen(loaded(torch.jit.script(m), path), ["other"]),
    "traced": lambda m, path: torch.jit.trace(m, (torch.ones_like(m.weight).expand(3, 6),)),
    "as it is": lambda m, path: m,
}


@pytest.mark.parametrize("made", MADE)
def test_a_method_may_call_its_module_anything(device, tmp_path, made):
    torch.manual_seed(0)
    module = MADE[made](Named().to(device), tmp_path / "m.pt")
    x = torch.rand(3, 6, device=device)
    with torch.no_grad():
        for form in (module, module.forward):
            if form == module.forward and made == "traced":
                continue  # a method of Python's own, that calls the traced one
            found = tsfuser.explain(form, x)
            (group,) = found.groups
            assert [n.kind for n in group.nodes] == [
                "aten::add",
                "aten::relu",
                "aten::layer_norm",
                "aten::mul",
            ]
            assert len(group.kernels) >= 1 and (report := tsfuser.check(form, x)), report
        if made not in ("traced", "as it is"):
            assert len(tsfuser.explain(module.other, x, 0.5).groups) == 1
            report = tsfuser.check(module.other, x, self=0.5)
            assert report and len(report.compared) == 1


def test_wrong_arguments_are_named_whatever_the_module_is_called():
    module = torch.jit.script(Named())
    with pytest.raises(TypeError, match="wants an argument 'x'"):
        tsfuser.explain(module)
    with pytest.raises(TypeError, match="takes 2 arguments, 3 were given"):
        tsfuser.explain(module.forward, torch.rand(6), 1.0, 2.0)
    with pytest.raises(TypeError, match="no argument 's'"):
        tsfuser.explain(module, torch.rand(6), s=1)


def test_a_functions_own_argument_may_be_called_self(device):
    def scaled(x, self: float):
        return torch.relu(x * self) + 1.0

    assert tsfuser.check(scaled, torch.rand(5, device=device), self=2.0)
    assert len(tsfuser.explain(scaled, torch.rand(5, device=device), 2.0).groups) == 1


@pytest.mark.parametrize("made", MADE)
def test_lines_are_the_users(device, tmp_path, made):
    """After saving, too: not those of the code that torch.jit.load compiles."""
    module = MADE[made](Named().to(device), tmp_path / "m.pt")
    with torch.no_grad():
        found = tsfuser.explain(module, torch.rand(3, 6, device=device))
    places = {n.kind: n.place for group in found.groups for n in group.nodes}
    with open(__file__) as file:
        lines = {line.strip(): n for n, line in enumerate(file, 1)}
    for kind, text in (
        ("aten::relu", "y = torch.relu(x + s.weight)"),
        ("aten::mul", "return s.norm(y) * scale"),
    ):
        assert (places[kind].file, places[kind].line, places[kind].text) == (__file__, lines[text], text)
    norm = places["aten::layer_norm"]
    if made in ("frozen and loaded", "traced"):  # inlined, and torch does not keep who called it
        assert norm.file.endswith("functional.py")
    else:
        assert norm.line == lines["return s.norm(y) * scale"] and norm.within.startswith("functional.py:")


def test_a_module_saved_by_another_installation_has_the_users_lines(monkeypatch, tmp_path, device):
    """Torch's own files lie elsewhere there."""
    from tsfuser.debug import source

    module = loaded(torch.jit.script(Named().eval()), tmp_path / "m.pt").to(device)
    monkeypatch.setattr(source, "_TORCH", "/opt/elsewhere/torch/")
    with torch.no_grad():
        found = tsfuser.explain(module, torch.rand(3, 6, device=device))
    assert {n.place.file for group in found.groups for n in group.nodes} == {__file__}
