"""What of torch's casts differs from version to version, as kernels are told.

In: the source of a kernel. Out: the same, with the facts that its casts depend on defined. torch 2.13 makes
448 of 1000 as float8_e4m3fn, earlier versions make NaN of it; the extension is built with the casts of the
torch that is installed. Example: with torch 2.13

    #define TSFUSER_E4M3FN_MOST 0x7e
    #include "tsfuser.h"
"""

from __future__ import annotations

from .. import _C
from ..ir.dtypes import FLOAT8_E4M3FN

_INCLUDE = '#include "tsfuser.h"\n'


def with_torchs_casts(source: str) -> str:
    """`source`, whose casts give what those of this torch give."""
    if FLOAT8_E4M3FN.ctype not in source:
        return source
    return source.replace(_INCLUDE, f"#define TSFUSER_E4M3FN_MOST {_C.e4m3fn_of_1000:#x}\n{_INCLUDE}", 1)
