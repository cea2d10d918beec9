"""Size expressions: interned, folded, evaluated."""

import random

from tsfuser.ir import size as sz
from tsfuser.ir.call import Call, ListArg, OtherArg, ScalarArg, TensorArg
from tsfuser.ir.text import vocabulary


def test_equal_trees_are_one_object():
    n, m = sz.leaf(0, "n"), sz.leaf(1, "m")
    assert n * m is m * n
    assert (n + 4) * m is m * (n + 4)
    assert sz.ceildiv(n, 4) is not sz.ceildiv(n, 8)


def test_constants_and_neutral_elements_fold():
    n = sz.leaf(0, "n")
    assert n * 1 is n and n + 0 is n and n // 1 is n
    assert (n * 0) is sz.const(0)
    assert sz.const(7) // 2 is sz.const(3)
    assert sz.eq(n, n) is sz.const(1) and sz.lt(n, n) is sz.const(0)
    assert sz.pow2(24) is sz.const(8) and sz.nextpow2(24) is sz.const(32)


def test_what_prints_is_python():
    """Numbers stand on either side of an operator."""
    n, m = sz.leaf(0, "n"), sz.leaf(1, "m")
    names = {"n": n, "m": m, **vocabulary()}
    for op in sorted({*sz.OPERATIONS} - {"pow2", "nextpow2"}):
        for a, b in ((n, m), (n, sz.const(12)), (sz.const(12), n), (sz.const(12), n // 5)):
            tree = sz.binary(op, a, b)
            assert eval(tree.text(), names) is tree, tree.text()


def test_evaluation_equals_python():
    generator = random.Random(0)
    meaning = {"add": int.__add__, "sub": int.__sub__, "mul": int.__mul__, "min": min, "max": max,
               "div": lambda a, b: a // b if b else 0,
               "ceildiv": lambda a, b: -(-a // b) if b else 0}  # fmt: skip
    for _ in range(300):
        leaves = [generator.randrange(1, 50) for _ in range(3)]
        trees = [(sz.leaf(i, f"n{i}"), v) for i, v in enumerate(leaves)] + [
            (sz.const(c), c) for c in (0, 1, 4)
        ]
        for _ in range(8):
            op = generator.choice(sorted(meaning))
            (a, x), (b, y) = generator.choice(trees), generator.choice(trees)
            if x >= 0 and y >= 0:
                trees.append((sz.binary(op, a, b), meaning[op](x, y)))
        for tree, value in trees:
            assert sz.evaluate(tree, leaves) == value, tree.text()


def test_a_deep_expression_evaluates_without_recursion():
    size = sz.leaf(0, "n")
    for k in range(5000):
        size = size + (k % 7 + 1) if k % 2 else sz.maximum(size, k)
    assert sz.evaluate(size, [1]) > 5000


def test_quotient_strips_a_visible_factor():
    n, m = sz.leaf(0, "n"), sz.leaf(1, "m")
    assert sz.quotient(n * m * 4, m * 4) is n
    assert sz.quotient(n * 4, 4) is n
    assert sz.quotient(n, m) is None and sz.quotient(n + 1, n) is None


def test_leaves_follow_the_order_of_arguments():
    call = Call(
        (
            TensorArg("float32", "cpu", (3, 5), (5, 1), 64),
            ScalarArg("float"),
            ScalarArg("int", 7),
            ListArg("int", (8, 9)),
            OtherArg(None),
        )
    )
    assert call.leaves == [3, 5, 5, 1, 64, 7, 8, 9]
    asked = [call.size(0, 1), call.stride(0, 0), call.alignment(0), call.item(2), call.item(3, 1)]
    assert [call.value(s) for s in asked] == [5, 5, 64, 7, 9]


def test_only_decisions_make_the_class():
    call = Call((TensorArg("float32", "cpu", (3, 5), (5, 1)),))
    call.value(call.size(0, 0))
    assert not call.decisions
    assert call.decide(sz.lt(call.size(0, 0), 4)) == 1
    assert list(call.decisions.values()) == [1]
