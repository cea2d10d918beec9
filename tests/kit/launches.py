"""How the target `cpu-fibers` of tests runs.

In: the variable TSFUSER_TEST_FIBERS, which `scripts/check_kernels` sets. Out: a word of TSFUSER_HOST_LAUNCH.
Example:

    with options.override(host_launch=FIBERS): ...
"""

import os

FIBERS = os.environ.get("TSFUSER_TEST_FIBERS") or "fibers"
