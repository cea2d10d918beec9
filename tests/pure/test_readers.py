"""What is not the text of a Fusion, segment, schedule, kernel or plan is refused with a sentence, and runs no
code; the full hunt is scripts/fuzz."""

import random

import pytest

from kit.programs import add, build, relu, tensor
from tsfuser.ir import text
from tsfuser.ir.verify import verify


def printed():
    _, fusion = build(lambda b, x, y: add(b, relu(b, x), y), tensor(64, 40), tensor(40))
    return str(fusion)


def refusal(damaged):
    with pytest.raises(SyntaxError) as raised:
        text.read(damaged)
    return raised.value.msg


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("leaf(0, 'size0_0')", "leaf('size0_0', 0)", "has a position that is 'size0_0'"),
        ("leaf(0, 'size0_0')", "leaf(0)", "missing a required argument: 'name'"),
        ("leaf(0, 'size0_0')", "leaf(0, 'a b')", "'a b' is not a name"),
        ("leaf(0, 'size0_0')", "leaf(0, 'tensor')", "'tensor' means something else in such code"),
        ("axis('a0'", "axis('float32'", "'float32' means something else in such code"),
        ("leaf(0, 'size0_0')", "().__class__.__base__", "is not part of the printed form"),
        ("leaf(0, 'size0_0')", "[leaf(0, 'size0_0')]", "is not part of the printed form"),
        ("leaf(0, 'size0_0')", "leaf(*(0, 'size0_0'))", "is not part of the printed form"),
        ("leaf(0, 'size0_0')", "9**9**9**9", "is not part of the printed form"),
        ("leaf(0, 'size0_0')", "'a' * 10**9", "is neither a number nor a size"),
        ("leaf(0, 'size0_0')", "1 // 0", "does not work: integer division or modulo by zero"),
        ("size0_0 = leaf(0, 'size0_0')", "while True: pass", "is not an assignment to a name"),
        ("float32", "float", "float is not defined"),
        ("fusion = ", "another = ", "it assigns no Fusion to fusion"),
        ("(size0_0, size0_1)", "size0_0", "has a sizes that is size0_0"),
    ],
)
def test_an_error_names_what_does_not_fit(old, new, said):
    assert old in printed() and said in refusal(printed().replace(old, new, 1))


@pytest.mark.parametrize(
    "deep", ["(" * 10_000, "-" * 100_000 + "1", "x = " + "(" * 80 + ")" * 80, "x = '\0'"]
)
def test_text_that_python_itself_does_not_take(deep):
    assert refusal(deep)


def test_a_value_with_the_name_of_a_size_is_found():
    fusion = text.read(printed().replace("relu_0", "size0_0_")).ops[0]
    assert fusion.output.name == "size0_0_"
    shared = text.read(printed().replace("'relu_0'", "'size0_0'"))
    assert verify(shared) == "size0_0 is the name of two things"


@pytest.mark.parametrize("level", ["fusion", "segment", "schedule", "kernel", "plan", "cache"])
def test_damaged_texts_and_files_are_refused_or_read(level):
    pytest.importorskip("torch")
    from kit import fuzz

    target = fuzz.TARGETS[level]()
    findings = [target.finding(random.Random(seed)) for seed in range(60)]
    assert [x for x in findings if x] == []
