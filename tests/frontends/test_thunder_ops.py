"""Ops of lightning-thunder's own list, each in a region with tsfuser, against torch and double."""

import importlib
import importlib.util

import pytest
import torch

from kit import thunders

if importlib.util.find_spec("thunder") is None:
    pytest.skip("lightning-thunder is not installed", allow_module_level=True)

pytestmark = pytest.mark.graphs
#: What runs without --long: name -> how much of it is in regions
SOME = {"silu": "all of it", "var_mean": "all of it", "layer_norm": "all of it", "argsort": "nothing"}


@pytest.fixture(scope="module")
def ops():
    """thunder's OpInfos by name."""
    try:
        thunders.load()
        return {info.name: info for info in importlib.import_module("thunder.tests.opinfos").opinfos}
    except ImportError as error:
        pytest.skip(str(error))


def swept(infos, dtype):
    sweep = importlib.import_module("kit.thunder_ops").sweep
    dtype = importlib.import_module("thunder").dtypes.to_dtype(dtype)
    return sweep(infos, dtype, report=lambda text: None)


@pytest.mark.filterwarnings("ignore")
def test_some_ops_are_in_regions_and_equal_to_torchs(ops):
    tally = swept([ops[name] for name in SOME], torch.float32)
    assert tally.wrong == []
    assert {name: set(found) for name, found in tally.ran.items()} == {k: {v} for k, v in SOME.items()}
    assert tally.stayed["argsort"] == {"argsort": "sorting is left to torch"}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_all_ops(ops):
    tally = swept(list(ops.values()), torch.float32)
    assert tally.wrong == [] and len(tally.of("all of it")) > 100
