"""How a program reaches tsfuser through torch.compile: where the backend is found, and what may be chosen."""

import os
import warnings
from pathlib import Path

import pytest
import torch

import tsfuser
from kit import prefork
from kit.support import ROOT, assert_matches

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten", "fused_or_error")]


def compiled(function, **choices):
    return torch.compile(function, backend="tsfuser", **choices)


@pytest.mark.parametrize(
    "choices, words",
    [
        (
            {"options": {"fast": True}},
            "no option 'fast'; its options are skip, horizontal, single_node, recompute, background, "
            "channels_last",
        ),
        ({"options": {"horizontal": 1}}, "'horizontal' cannot be 1: it is True or False"),
        (
            {"options": {"horizontl": False}},
            r"no option 'horizontl'; did you mean 'horizontal'\?; its options",
        ),
        ({"options": {"skip": ["gelu"]}}, r"no op is called 'gelu'; did you mean 'aten::gelu'\?"),
        ({"options": {"skip": ["aten::exp", "aten::softmx"]}}, "did you mean 'aten::softmax'"),
        ({"options": {"skip": [torch.exp]}}, "a list of kinds of ops, like 'aten::gelu'"),
        ({"mode": "max-autotune"}, "no mode 'max-autotune'; leave it out"),
        ({"mode": "reduce_overhead"}, r"no mode 'reduce_overhead'; did you mean 'reduce-overhead'\?; leave"),
    ],
)
def test_choices_without_a_meaning_are_errors(choices, words):
    with pytest.raises(Exception, match=words):
        compiled(lambda x: x.exp() + 1, **choices)(torch.ones(2))


def test_compiling_warns_of_nothing(device):
    """torch warns where a graph is deep-copied."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        torch.compile(module, backend="tsfuser")(torch.randn(3, 8, device=device)).sum().backward()


def test_what_is_skipped_stays_out_of_groups():
    x = torch.randn(8)
    assert_matches(compiled(lambda x: x.exp() + 1, options={"skip": ["aten::exp"]})(x), x.exp() + 1)
    assert tsfuser.stats()["launches"] == 0
    torch._dynamo.reset()
    compiled(lambda x: x.exp() + 1)(x)
    assert tsfuser.stats()["launches"] == 1


def _python(source, folder, *paths):
    others = filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), *others])}
    return prefork.run(["-c", source], env=environment, cwd=folder)


_CALL = """
import torch
{line}
x = torch.randn(8)
result = torch.compile(lambda x: torch.tanh(x * 2) + 1, backend="tsfuser")(x)
torch.testing.assert_close(result, torch.tanh(x * 2) + 1)
import tsfuser
assert tsfuser.stats()["launches"] == 1, tsfuser.stats()
"""


def test_an_installed_tsfuser_is_found_without_an_import(tmp_path):
    """The metadata are those that pip would write from pyproject.toml."""
    from setuptools.config.pyprojecttoml import read_configuration

    points = read_configuration(ROOT / "pyproject.toml", expand=False)["project"]["entry-points"]
    info = tmp_path / "tsfuser-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tsfuser\nVersion: 0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in found.items()) for group, found in points.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    done = _python(_CALL.format(line=""), tmp_path, ROOT, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "line",
    ["import tsfuser", "import torch._dynamo; torch._dynamo.list_backends(); import tsfuser"],
    ids=["before", "after"],
)
def test_a_checkout_is_found_once_it_is_imported(tmp_path, line):
    package = tmp_path / "tsfuser"
    package.symlink_to(Path(tsfuser.__file__).parent)  # no metadata beside it
    done = _python(_CALL.format(line=line), tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_import_leaves_torch_dynamo_alone():
    loaded = "('torch._dynamo' in sys.modules)"
    source = f"import sys, torch; before = {loaded}; import tsfuser; assert {loaded} == before"
    done = _python(source, ROOT, ROOT)
    assert done.returncode == 0, done.stderr
