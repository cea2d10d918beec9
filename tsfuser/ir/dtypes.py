"""The element types and their promotion: a dtype is one row.

In: dtype names as torch prints them without the prefix. Out: `DType` rows.  Example: `promote(INT32, HALF) is
HALF`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import Refusal


@dataclass(frozen=True, eq=False)
class DType:
    """One element type: there is one object of each.

    `name` is torch's (`float32`), `code` its number in c10::ScalarType. `itemsize` is in bytes, `ctype` is
    the type in generated source and in memory. `kind` is one of `b` bool, `i` integer, `f` floating, `c`
    complex, `p` packed elements of less than a byte. `register` names the dtype that arithmetic uses: float
    for the 16-bit floats, itself otherwise. `largest` is the largest finite number of a floating dtype, or of
    the parts of a complex one, `lowest` its lowest one (default: `-largest`). `computes`: torch has
    arithmetic in it on each device; of others it has copies, casts and comparisons for equality, and
    registers hold what memory holds. `converts`: it has these. `has_infinity`: it has infinities, if it is
    floating.
    """

    name: str
    code: int
    itemsize: int
    ctype: str
    kind: str
    register: DType = field(default=None, repr=False)
    largest: float = 0.0
    lowest: float | None = None
    computes: bool = True
    converts: bool = True
    has_infinity: bool = True

    def __post_init__(self):
        if self.register is None:
            object.__setattr__(self, "register", self)
        if self.lowest is None:
            object.__setattr__(self, "lowest", -self.largest)

    def __repr__(self) -> str:
        return self.name

    @property
    def is_floating(self) -> bool:
        return self.kind == "f"

    @property
    def is_complex(self) -> bool:
        return self.kind == "c"

    @property
    def is_unsigned(self) -> bool:
        """Integer without negative numbers."""
        return self.kind == "i" and self.name.startswith("uint")


_FLOAT_MAX, _DOUBLE_MAX = 3.4028234663852886e38, 1.7976931348623157e308

BOOL = DType("bool", 11, 1, "bool", "b")
UINT8 = DType("uint8", 0, 1, "uint8_t", "i")
INT8 = DType("int8", 1, 1, "int8_t", "i")
INT16 = DType("int16", 2, 2, "int16_t", "i")
INT32 = DType("int32", 3, 4, "int32_t", "i")
INT64 = DType("int64", 4, 8, "int64_t", "i")
FLOAT = DType("float32", 6, 4, "float", "f", largest=_FLOAT_MAX)
DOUBLE = DType("float64", 7, 8, "double", "f", largest=_DOUBLE_MAX)
HALF = DType("float16", 5, 2, "half_t", "f", FLOAT, 65504.0)
BFLOAT16 = DType("bfloat16", 15, 2, "bfloat16_t", "f", FLOAT, 3.3895313892515355e38)
COMPLEX64 = DType("complex64", 9, 8, "complex_t<float>", "c", largest=_FLOAT_MAX)
COMPLEX128 = DType("complex128", 10, 16, "complex_t<double>", "c", largest=_DOUBLE_MAX)
UINT16 = DType("uint16", 27, 2, "uint16_t", "i", computes=False)
UINT32 = DType("uint32", 28, 4, "uint32_t", "i", computes=False)
UINT64 = DType("uint64", 29, 8, "uint64_t", "i", computes=False)


def _float8(name: str, code: int, largest: float, **facts) -> DType:
    return DType(name, code, 1, f"{name}_t", "f", largest=largest, computes=False, **facts)


FLOAT8_E5M2 = _float8("float8_e5m2", 23, 57344.0)
FLOAT8_E4M3FN = _float8("float8_e4m3fn", 24, 448.0, has_infinity=False)
FLOAT8_E5M2FNUZ = _float8("float8_e5m2fnuz", 25, 57344.0, has_infinity=False)
FLOAT8_E4M3FNUZ = _float8("float8_e4m3fnuz", 26, 240.0, has_infinity=False)
FLOAT8_E8M0FNU = _float8("float8_e8m0fnu", 44, 2.0**127, lowest=2.0**-127, has_infinity=False)
FLOAT4 = DType("float4_e2m1fn_x2", 45, 1, "uint8_t", "p", computes=False, converts=False)

DTYPES = {
    d.name: d
    for d in (
        BOOL, UINT8, INT8, INT16, INT32, INT64, HALF, BFLOAT16, FLOAT, DOUBLE, COMPLEX64, COMPLEX128,
        UINT16, UINT32, UINT64, FLOAT8_E5M2, FLOAT8_E4M3FN, FLOAT8_E5M2FNUZ, FLOAT8_E4M3FNUZ, FLOAT8_E8M0FNU,
        FLOAT4,
    )
}  # fmt: skip

#: Those that registers hold in a wider dtype.
NARROW = tuple([d for d in DTYPES.values() if d.register is not d])

_RANK = {"b": 0, "i": 1, "f": 2, "c": 3}


def promote(a: DType, b: DType) -> DType:
    """The smallest dtype that torch gives two operands of equal standing (`torch.promote_types`). Raises
    Refusal where torch raises an error."""
    if a is b:
        return a
    if not (a.computes and b.computes):
        return _promote_stored(a, b)
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


def _promote_stored(a: DType, b: DType) -> DType:
    """`promote` where torch has no arithmetic in one of the dtypes: it promotes unsigned integers to floating
    dtypes, and nothing else."""
    for stored, other in ((a, b), (b, a)):
        if stored.is_unsigned and other.computes and other.is_floating:
            return other
    raise Refusal(f"{a} and {b} have no common dtype: an error in eager")
