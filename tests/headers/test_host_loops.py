"""What the host's loops are built from gives what the plain form of it gives."""

import pytest
import torch

from kit import harness

SOURCE = """#include "tsfuser.h"
struct Args_drawn { float* y; float* one; random_state state; int64_t first; int64_t count; };
KERNEL(drawn, Args_drawn, 1) {
  float room[264];
  const random_start start = start_of(args.state);
  const float* const numbers = draw(room, start, 3, args.first, args.count);
  for (int64_t i = 0; i < args.count; ++i) {
    args.y[i] = numbers[i];
    args.one[i] = uniform<float>(start, 3, args.first + i);
  }
}
""" + "\n".join(
    f"""struct Args_tile_{t} {{ const {t}* x; {t}* y; int64_t stride; int64_t rows; int64_t columns; }};
KERNEL(tile_{t}, Args_tile_{t}, 1) {{
  fill_tile<80>(args.y, args.x, args.stride, args.rows, args.columns);
}}
struct Args_fold_{t} {{ const {t}* x; {t}* y; }};
KERNEL(fold_{t}, Args_fold_{t}, 1) {{
  {t} sum[32], most[32], least[8];
  for (int i = 0; i < 32; ++i) sum[i] = most[i] = args.x[i];
  for (int i = 0; i < 8; ++i) least[i] = args.x[i];
  fold_lanes<Sum, 1>(sum);
  fold_lanes<Largest, 1>(most);
  fold_lanes<Smallest, 1>(least);
  args.y[0] = sum[0], args.y[1] = most[0], args.y[2] = least[0];
}}"""
    for t in ("uint8_t", "int16_t", "float", "double")
)
DTYPES = {"uint8_t": torch.uint8, "int16_t": torch.int16, "float": torch.float32, "double": torch.float64}


@pytest.mark.parametrize(
    "first, count", [(0, 256), (1, 256), (4098, 7), (4099, 1), (5, 0), ((1 << 34) - 3, 255)]
)
def test_numbers_drawn_together_are_those_drawn_one_by_one(first, count):
    y, one = torch.full((2, 257), -1.0)
    harness.Kernel(SOURCE, "drawn", "host")(y, one, 5, 8, 0, 0, first, count, grid=1)
    assert torch.equal(y, one)
    assert (y[:count] >= 0).all() and (y[count:] == -1).all()


@pytest.mark.parametrize("ctype", DTYPES)
@pytest.mark.parametrize("rows, columns", [(64, 64), (63, 64), (16, 5), (1, 1), (33, 47), (0, 3)])
def test_a_tile_is_the_transpose_and_nothing_else(rows, columns, ctype):
    x = torch.arange(70 * 70).reshape(70, 70).to(DTYPES[ctype])
    y = torch.full((64, 80), 77).to(DTYPES[ctype])
    expected = y.clone()
    expected[:rows, :columns] = x[:columns, :rows].t()
    harness.Kernel(SOURCE, f"tile_{ctype}", "host")(x, y, 70, rows, columns, grid=1)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("ctype", ["float", "double"])
@pytest.mark.parametrize("special", [None, float("nan"), float("inf"), -float("inf")])
def test_accumulators_are_all_combined(special, ctype):
    for at in range(32):
        x, y = torch.randperm(32).to(DTYPES[ctype]), torch.zeros(3, dtype=DTYPES[ctype])
        if special is not None:
            x[at] = special
        harness.Kernel(SOURCE, f"fold_{ctype}", "host")(x, y, grid=1)
        expected = torch.stack([x.sum(), x.amax(), x[:8].amin()])
        assert torch.equal(y, expected) or torch.equal(y.nan_to_num(7), expected.nan_to_num(7))
