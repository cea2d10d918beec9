"""Seeds of dropouts: what their lengths say, and how a Fusion returns them."""

import itertools

import pytest

from tsfuser.errors import Refusal
from tsfuser.ir import seed_lengths, text
from tsfuser.ir.build import Builder
from tsfuser.ir.call import Call, TensorArg
from tsfuser.ir.verify import verify
from tsfuser.ops import table


@pytest.mark.parametrize("rank", range(6))
def test_a_length_gives_its_order_back(rank):
    lengths = []
    for order in itertools.permutations(range(rank)):
        length = seed_lengths.length_of(order)
        assert (length is None) == (len(lengths) > seed_lengths.MOST - 2)
        assert length is None or seed_lengths.order_of(rank, length) == order
        lengths += [length] if length else []
    assert lengths[0] == 2 and len(set(lengths)) == len(lengths) and max(lengths) <= seed_lengths.MOST


def test_usual_orders_have_a_length_and_other_numbers_none():
    """Row-major, channels last, batches before heads or turned, matrices turned."""
    for order in [range(8), (0, 2, 3, 1), (0, 2, 3, 4, 1), (0, 2, 1, 3), (1, 0), (1, 0, 2), (2, 1, 0)]:
        assert seed_lengths.length_of(tuple(order)) is not None
    for rank, length in ((2, 1), (2, 0), (2, 4), (0, 3), (8, 65)):
        assert seed_lengths.order_of(rank, length) is None


def built(strides=(5, 1), returned=("result", "seed")):
    builder = Builder(Call((TensorArg("float32", "cpu", (4, 5), strides),)), "cpu")
    x = builder.tensor(0)
    rate = builder.literal(0.25)
    dropouts = [
        table.find("aten::native_dropout").build(builder, input=x, p=rate, train=True) for _ in range(2)
    ]
    for result, mask in dropouts:
        saved = table.find("tsfuser::dropout_seed").build(builder, mask=mask)
        for what in returned:
            builder.output({"result": result, "mask": mask, "seed": saved}[what])
    return builder.finish()


@pytest.mark.parametrize("strides, length", [((5, 1), 2), ((1, 4), 3), ((7, 1), 2)])
def test_a_fusion_with_seeds_is_sound_and_read_back(strides, length):
    fusion = built(strides)
    assert verify(fusion) is None and text.read(str(fusion)) == fusion
    assert fusion.seeds == (length, length) and [op.saved for op in fusion.randoms] == [0, 1]
    assert fusion.results == (("output", 0), ("seed", 0), ("output", 1), ("seed", 1))


def test_a_mask_that_is_stored_as_well_has_a_seed_too():
    fusion = built(returned=("result", "mask", "seed"))
    assert verify(fusion) is None and len(fusion.outputs) == 4 and len(fusion.seeds) == 2


def test_a_seed_alone_has_no_kernel_to_store_it():
    with pytest.raises(Refusal, match="whose result nobody reads"):
        built(returned=("seed",))


def test_a_mask_of_another_make_has_no_seed():
    builder = Builder(Call((TensorArg("bool", "cpu", (4, 5), (5, 1)),)), "cpu")
    mask = builder.tensor(0)
    assert table.find("tsfuser::dropout_seed").build(builder, mask=mask) is mask
