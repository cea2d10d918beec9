"""torch's own list of ops, op_db, against the op table: each op that the table names, in a function of its
own, fused alone.

Here a few samples of each; with --long all samples, torch's longer lists, and all dtypes. Run with -s for the
counts.
"""

import pytest
import torch
from opinfo import extremal, named, op_db, programs, row_of, rows, title
from opsweep import Tally, single_nodes, sweep

from tsfuser import options

DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.int8,
    torch.uint8, torch.int16, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
FLOATING = [t for t in DTYPES if t.is_floating_point]
#: The dtypes of the short form, by target.
SHORT = {"cpu": (torch.float32, torch.bfloat16, torch.int32), "cpu-fibers": (torch.float16,)}
SAMPLES = 2  # of an op, in the short form
RANDOM = {"nn.functional.dropout", "rand_like", "randn_like"}  # other numbers than eager's, see test_random
#: Ops that are not fused in some dtype, and why not. A refusal that is not listed is a failure.
REFUSED = {}


@pytest.fixture
def place(target):
    """The device of a target. Unlike `device` it has NVRTC compile nothing: test_op_rows does."""
    with options.override(host_launch="fibers" if target == "cpu-fibers" else "block"):
        yield "cuda" if target == "cuda" else "cpu"


@pytest.fixture
def chosen(request, target):
    """`chosen(dtypes)`: those of them that are swept; and whether it is the long form."""
    everything = request.config.getoption("--long")
    short = SHORT.get(target, (torch.float32, torch.bfloat16, torch.int32))
    return lambda dtypes: [t for t in dtypes if everything or t in short], everything


def swept(place, dtype, everything, training=False, limits=False, **options):
    """(op, program) of all ops for a dtype."""
    count = None if everything else SAMPLES
    for info in named():
        supported = info.supported_backward_dtypes if training else info.supported_dtypes
        if title(info) in RANDOM or dtype not in supported(place):
            continue
        if options.get("inplace") and info.inplace_variant is None:
            continue
        for program in programs(info, dtype, place, count=count, training=training, **options):
            yield title(info), extremal(info, program) if limits else program


def check(tally, what):
    print(f"\n{what}: {tally}")
    for reason, count in tally.reasons.most_common(8):
        print(f"    {count} x {reason}")
    assert tally.ran
    assert not tally.wrong, f"{len(tally.wrong)} of {tally}:\n" + "\n".join(tally.wrong[:20])


def test_an_op_gives_what_eager_gives(place, target, chosen):
    dtypes, everything = chosen
    for dtype in dtypes(DTYPES):
        tally = Tally()
        with single_nodes():
            sweep(swept(place, dtype, everything), tally)
            if everything:
                sweep(swept(place, dtype, everything, reference=True), tally)
        check(tally, f"{target} {dtype}")
        taken = {title(i) for i in named() if str(dtype)[6:] in row_of(i).dtypes}
        never = {op for op in tally.ran if op in taken and not tally.fused[op]}
        assert never <= REFUSED.keys(), f"{dtype}: never fused: {sorted(never - REFUSED.keys())}"


def test_gradients(place, target, chosen):
    dtypes, everything = chosen
    for dtype in dtypes(FLOATING):
        tally = Tally()
        with single_nodes():
            sweep(swept(place, dtype, everything, training=True), tally, gradients=True, roundings=8)
        check(tally, f"{target} {dtype} with gradients")


def test_ops_in_place(place, target, chosen):
    dtypes, everything = chosen
    for dtype in dtypes(DTYPES if everything else (torch.float32,)):
        tally = Tally()
        with single_nodes():
            sweep(swept(place, dtype, everything, inplace=True), tally)
        check(tally, f"{target} {dtype} in place")


def test_limits_infinities_and_nan(place, target, chosen):
    dtypes, everything = chosen
    for dtype in dtypes(FLOATING):
        tally = Tally()
        with single_nodes():
            sweep(swept(place, dtype, everything, limits=True), tally)
        check(tally, f"{target} {dtype} limits")


def test_without_guards_a_group_serves_other_dtypes_and_numbers(place, target, chosen):
    dtypes, everything = chosen
    tally = Tally()
    with single_nodes(guards=False):
        every = (pair for t in dtypes(DTYPES) for pair in swept(place, t, everything, dynamic=True))
        sweep(sorted(every, key=lambda pair: pair[0]), tally, shared=True)
    check(tally, f"{target} without guards")


#: Rows of which op_db has no entry, and what tests them.
UNLISTED = {}


def test_what_torch_does_not_list():
    listed = {row_of(info).name for info in op_db() if row_of(info)}
    unlisted = {row.name for row in rows().values()} - listed
    assert unlisted == UNLISTED.keys()
