"""The element types and their promotion.

In: dtype names as torch prints them without the prefix. Out: `DType` rows.  Example: `promote(INT32, HALF) is
HALF`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, eq=False)
class DType:
    """One element type: there is one object of each.

    `name` is torch's (`float32`), `itemsize` is in bytes, `ctype` is the type in generated source and in
    memory, `kind` is one of `b` bool, `i` integer, `f` floating, `c` complex. `register` names the dtype that
    arithmetic uses: float for the 16-bit floats, itself otherwise.
    """

    name: str
    itemsize: int
    ctype: str
    kind: str
    register: DType = field(default=None, repr=False)

    def __post_init__(self):
        if self.register is None:
            object.__setattr__(self, "register", self)

    def __repr__(self) -> str:
        return self.name

    @property
    def is_floating(self) -> bool:
        return self.kind == "f"

    @property
    def is_complex(self) -> bool:
        return self.kind == "c"

    @property
    def is_integral(self) -> bool:
        """Integer, bool excluded."""
        return self.kind == "i"


BOOL = DType("bool", 1, "bool", "b")
UINT8 = DType("uint8", 1, "uint8_t", "i")
INT8 = DType("int8", 1, "int8_t", "i")
INT16 = DType("int16", 2, "int16_t", "i")
INT32 = DType("int32", 4, "int32_t", "i")
INT64 = DType("int64", 8, "int64_t", "i")
FLOAT = DType("float32", 4, "float", "f")
DOUBLE = DType("float64", 8, "double", "f")
HALF = DType("float16", 2, "half_t", "f", FLOAT)
BFLOAT16 = DType("bfloat16", 2, "bfloat16_t", "f", FLOAT)
COMPLEX64 = DType("complex64", 8, "complex_t<float>", "c")
COMPLEX128 = DType("complex128", 16, "complex_t<double>", "c")

DTYPES = {
    d.name: d
    for d in (BOOL, UINT8, INT8, INT16, INT32, INT64, HALF, BFLOAT16, FLOAT, DOUBLE, COMPLEX64, COMPLEX128)
}

_RANK = {"b": 0, "i": 1, "f": 2, "c": 3}


def promote(a: DType, b: DType) -> DType:
    """The smallest dtype that torch gives two operands of equal standing (`torch.promote_types`)."""
    if a is b:
        return a
    if _RANK[a.kind] < _RANK[b.kind]:
        a, b = b, a
    if a.kind != b.kind:  # the higher kind wins, but a complex keeps the precision of a floating partner
        return COMPLEX128 if a is COMPLEX64 and b is DOUBLE else a
    if a.kind == "i":
        if UINT8 in (a, b):  # unsigned with signed needs the next signed size
            other = b if a is UINT8 else a
            return INT16 if other is INT8 else other
        return a if a.itemsize > b.itemsize else b
    if a.kind == "f" and a.itemsize == b.itemsize:
        return FLOAT  # half with bfloat16
    return a if a.itemsize > b.itemsize else b
