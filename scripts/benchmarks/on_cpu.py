"""CPU tensors with torch.compile: tsfuser beside inductor and eager, forward and training.

In: names of CASES. Out: for each case and mode a row of microseconds, the least that one thread has spent in
a call. Peers take turns, and time of other processes does not count, so the figures hold on a machine that is
not idle; memory that others use still slows down all. Example: `scripts/bench --cpu --only gelu,layer_norm`.
"""

import math
import time

import torch
import torch.nn.functional as F

PEERS = ("eager", "inductor", "tsfuser")
MODES = ("forward", "training")
ROUNDS, CALLS = 5, 8
BF16 = torch.bfloat16


def leaf(*sizes, dtype=torch.float32, grad=True):
    return torch.randn(sizes).to(dtype).requires_grad_(grad)


def gelu(x, b, y):
    return F.gelu(x + b) * y


def bias(x, b):
    return torch.relu(x + b)


def layer_norm(x, y, w, b):
    return F.layer_norm(x + y, w.shape, w, b) * 2


def lone_layer_norm(x, w, b):
    return F.layer_norm(x, w.shape, w, b)


def rms_norm(x, w):
    return F.rms_norm(x, w.shape, w)


def softmax(x, mask):
    return torch.softmax(x * 0.125 + mask, -1)


def row_sums(x, y):
    return (x * y).sum(-1)


def column_sums(x, y):
    return (x * y).sum(0)


def batch_norm(x, w, b):
    return F.relu(F.batch_norm(x, None, None, w, b, True))


def transposed_add(x, y):
    return x + y.t() * 1.5


def top_p(x):
    likely = torch.softmax(x, -1)
    return likely * ((torch.cumsum(likely, -1) - likely).detach() < 0.9)


def running_sums(x):
    return torch.cumsum(x * 2, -1) + 1


def running_sums_of_columns(x):
    return torch.cumsum(x * 2, 0) + 1


def small(x, y):
    return torch.relu(x * y + 1)


#: By name: the function, the sizes of its operands, their dtype, and that of those with one dim.
CASES = {
    "gelu": (gelu, ("NC", "C", "NC"), torch.float32, torch.float32),
    "gelu_bf16": (gelu, ("NC", "C", "NC"), BF16, BF16),
    "bias": (bias, ("NC", "C"), torch.float32, torch.float32),
    "layer_norm": (layer_norm, ("NC", "NC", "C", "C"), torch.float32, torch.float32),
    "layer_norm_bf16": (layer_norm, ("NC", "NC", "C", "C"), BF16, BF16),
    "lone_layer_norm": (lone_layer_norm, ("NC", "C", "C"), torch.float32, torch.float32),
    "rms_norm": (rms_norm, ("NC", "C"), torch.float32, torch.float32),
    "rms_norm_bf16": (rms_norm, ("NC", "C"), BF16, BF16),
    "softmax": (softmax, ("NC", "NC"), torch.float32, torch.float32),
    "softmax_bf16": (softmax, ("NC", "NC"), BF16, BF16),
    "row_sums": (row_sums, ("NC", "NC"), torch.float32, torch.float32),
    "row_sums_bf16": (row_sums, ("NC", "NC"), BF16, BF16),
    "column_sums": (column_sums, ("NC", "NC"), torch.float32, torch.float32),
    "batch_norm": (batch_norm, ("BKHH", "K", "K"), torch.float32, torch.float32),
    "batch_norm_bf16": (batch_norm, ("BKHH", "K", "K"), BF16, torch.float32),
    "transposed_add": (transposed_add, ("CC", "CC"), torch.float32, torch.float32),
    "top_p": (top_p, ("NC",), torch.float32, torch.float32),
    "running_sums": (running_sums, ("NC",), torch.float32, torch.float32),
    "running_sums_of_columns": (running_sums_of_columns, ("NC",), torch.float32, torch.float32),
    "small": (small, ("SS", "SS"), torch.float32, torch.float32),
}
SIZES = {"N": 2048, "C": 1024, "B": 32, "K": 64, "H": 28, "S": 8}
TINY = {"N": 24, "C": 32, "B": 2, "K": 4, "H": 6, "S": 8}


def operands(case, sizes):
    _, dims, dtype, of_rows = case
    given = [tuple(sizes[d] for d in text) for text in dims]
    return [leaf(*s, dtype=of_rows if len(s) == 1 else dtype) for s in given]


def step(function, given, mode):
    """A call without arguments."""
    if mode == "forward":
        given = [x.detach() for x in given]
        return lambda: function(*given)
    gradient = torch.randn_like(function(*given))
    return lambda: torch.autograd.grad(function(*given), given, gradient)


def least_us(call):
    """Of a few calls, by the clock of this thread."""
    times = []
    for _ in range(CALLS):
        begin = time.clock_gettime_ns(time.CLOCK_THREAD_CPUTIME_ID)
        call()
        times.append(time.clock_gettime_ns(time.CLOCK_THREAD_CPUTIME_ID) - begin)
    return min(times) / 1e3


def measure(names, peers, quick=False):
    """A dict for each case and mode; with `us` by peer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in names:
            for mode in MODES:
                yield {"case": name, "mode": mode, "us": _row(CASES[name], mode, peers, quick)}
    finally:
        torch.set_num_threads(threads)


def _row(case, mode, peers, quick):
    given, calls = operands(case, TINY if quick else SIZES), {}
    for peer in peers:
        torch._dynamo.reset()
        made = case[0] if peer == "eager" else torch.compile(case[0], backend=peer, dynamic=False)
        calls[peer] = step(made, given, mode)
        for _ in range(3):
            calls[peer]()
    rounds = [{peer: least_us(call) for peer, call in calls.items()} for _ in range(1 if quick else ROUNDS)]
    return {peer: min(found[peer] for found in rounds) for peer in peers}


def line(row):
    """A line of the table."""
    us = row["us"]
    over = ("inductor", "eager")
    ratios = [f"{us['tsfuser'] / us[p]:10.2f}" if {p, "tsfuser"} <= us.keys() else 10 * " " for p in over]
    cells = [f"{us[p]:10.0f}" if p in us else 10 * " " for p in PEERS]
    return f"{row['case']:16} {row['mode']:9}" + "".join([*cells, *ratios])


HEAD = f"{'us':16} {'':9}" + "".join(f"{name:>10}" for name in (*PEERS, "/inductor", "/eager"))


def summary(rows):
    """The geometric mean of the ratios to inductor."""
    compared = [row["us"] for row in rows if {"inductor", "tsfuser"} <= row["us"].keys()]
    ratios = [us["tsfuser"] / us["inductor"] for us in compared]
    if not ratios:
        return ""
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{len(ratios)} rows, geometric mean of tsfuser / inductor: {mean:.2f}"
