"""Random programs against eager, a few dozen here and two thousand with --long; `tests/random_programs.py`
runs as many as one likes. A failure prints a script."""

import pytest
from random_programs import sweep
from random_shrink import script_of, shrink

COUNT = {"cpu": 60, "cpu-fibers": 30}
#: Seeds of programs that failed once: strides of masked_fill, of a number's power, of expanded bools, of
#: logsigmoid on the CPU, of dims of size 1, of rms_norm, of batch norm and of what is promoted; the sign of a zero;
#: sums of terms that cancel; gradients that only TorchScript has; results that ask for gradients without a way to get any; and a kernel without a loop.
FAILED_ONCE = [1343, 1689, 1859, 1647, 2384, 21207, 24278, 9200866, 8100526, 8801042]
FAILED_ONCE += [8301137, 8400070, 8500667, 9400343, 20001403, 20002461, 21002067, 21002298, 21010865, 21011050, 21014019]
FAILED_ONCE += [33010406, 36000145]


def run(seeds, target, device):
    lines = []
    counts, failed, _ = sweep(seeds, device, report=lines.append)
    print(f"\n{target}: {lines[-1]}")
    assert counts["fused"] > 0
    for run in failed:
        text = script_of(*shrink(run, device)[:1], target, run.wrong, run.seed)
        pytest.fail(f"{len(failed)} programs; seed {run.seed}:\n{text}")


def test_random_programs(place, target, request):
    count = 2000 if request.config.getoption("--long") else COUNT.get(target, 60)
    run(range(count), target, place)


def test_programs_that_failed_once(place, target):
    run(FAILED_ONCE, target, place)
