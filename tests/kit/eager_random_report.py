"""Prints whether fused random numbers are eager's on this GPU: one line an op and dtype. Run as a script; the
exit status is 0 where all are equal. `OPS`, `SHAPES` and `INPUTS` are also those of
gpu/test_eager_random_cuda.py.

    PYTHONPATH=.:tests python -m kit.eager_random_report
"""

import os
import sys

if __name__ == "__main__":  # tests import this, too
    os.environ.setdefault("PYTORCH_NVFUSER_ENABLE", "eager_random")

import torch
import torch.nn.functional as F


def dropout(x):
    return F.dropout(x, 0.3, True) * 1.0


def native_dropout(x):
    y, mask = torch.native_dropout(x, 0.7, True)
    return y * 1.0, mask


def rand_like(x):
    return torch.rand_like(x) * 1.0


def randn_like(x):
    return torch.randn_like(x) * 1.0


OPS = {function.__name__: function for function in (dropout, native_dropout, rand_like, randn_like)}
_THREADS = 132 * 2048  # that an H200 runs at the same time; other devices have other rounds
SHAPES = [
    *((n,) for n in (1, 2, 3, 255, 256, 257, 1023, 1024, 4098, 100_003, 9_999_999)),
    *(
        (_THREADS * rounds + more,)
        for rounds, more in ((1, -1), (1, 0), (1, 1), (2, 2), (4, 0), (4, 4), (8, 3), (17, 8))
    ),
    *((33, 65), (128, 1024), (3, 5, 7, 11), (0, 4), ()),
]


def _dense(*sizes):
    return lambda dtype: torch.rand(sizes, device="cuda").to(dtype)


def _of(make, view):
    return lambda dtype: view(make(dtype))


INPUTS = {
    "dense": _dense(64, 100),
    "by one element": _of(_dense(6401), lambda x: x[1:].view(64, 100)),
    "by two elements": _of(_dense(6402), lambda x: x[2:].view(64, 100)),
    "by four elements": _of(_dense(6404), lambda x: x[4:].view(64, 100)),
    "transposed": _of(_dense(64, 100), torch.t),
    "transposed, odd": _of(_dense(63, 101), torch.t),
    "transposed, by one": _of(_dense(6401), lambda x: x[1:].view(64, 100).t()),
    "gaps": _of(_dense(64, 100), lambda x: x[:, ::2]),
    "cut": _of(_dense(64, 100), lambda x: x[3:, 5:]),
    "expanded": _of(_dense(64, 1), lambda x: x.expand(64, 100)),
    "expanded rows": _of(_dense(100), lambda x: x.expand(64, 100)),
    "channels last": _of(_dense(4, 6, 10, 10), lambda x: x.contiguous(memory_format=torch.channels_last)),
    "channels last, odd": _of(_dense(3, 5, 7, 9), lambda x: x.contiguous(memory_format=torch.channels_last)),
    "permuted": _of(_dense(8, 10, 12), lambda x: x.permute(2, 0, 1)),
    "dims of 1": _of(_dense(40, 1, 6), lambda x: x.transpose(0, 2)),
    "large and transposed": _of(_dense(3000, 1001), torch.t),
}


def _state(function, x, seed):
    torch.cuda.manual_seed(seed)
    out = function(x)
    return (out if isinstance(out, tuple) else (out,)), torch.cuda.default_generators[0].get_offset()


def _is_equal(scripted, function, x):
    import tsfuser

    for _ in range(3):
        with tsfuser.fuser():
            scripted(x)
    (found, after), (wanted, expected) = _state(scripted, x, 5), _state(function, x, 5)
    return after == expected and all(
        a.stride() == b.stride() and torch.equal(a, b) for a, b in zip(found, wanted)
    )


def main():
    import tsfuser
    from kit.support import fresh
    from tsfuser.planning import eager_random

    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {eager_random.grid_of('cuda:0')}")
    failed = 0
    for op, function in OPS.items():
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            tsfuser.reset()
            cases = {str(shape): torch.rand(shape, device="cuda").to(dtype) for shape in SHAPES}
            cases |= {name: make(dtype) for name, make in INPUTS.items()}
            scripted = fresh(function)
            wrong = [name for name, x in cases.items() if not _is_equal(scripted, function, x)]
            unfused = tsfuser.stats()["fallbacks"]
            failed += bool(wrong or unfused)
            verdict = f"differs: {', '.join(wrong)}" if wrong else "equal"
            print(f"{op:15} {str(dtype)[6:]:9} {len(cases)} inputs  {verdict}  {unfused or ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
