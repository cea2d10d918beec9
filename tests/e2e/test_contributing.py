"""The examples of CONTRIBUTING.md work as they are written: each section's blocks are applied to a copy of
the package, and its program runs with that.

A block of Python opens with the name of its file: `# tsfuser/ops/pointwise.py`. It is added at the end of the
file, or makes a new one. `# try.py` is the program. A `diff` block opens with `--- FILE`; its lines stand in
the file as they do in the block, but for `+` and `-`.
"""

import re
import shutil

import pytest

from kit.support import ROOT, run_python

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = {
    part.partition("\n")[0]: re.findall(r"^```(python|diff)\n(.*?)^```", part, re.S | re.M)
    for part in PAGE.split("\n## ")[1:]
}
RAN_FUSED = 'tsfuser.stats()["launches"] > 0 and not tsfuser.stats()["fallbacks"]'
EXAMPLES = [name for name, blocks in SECTIONS.items() if blocks]


def patched(text, diff):
    """`text` with the diff applied. ValueError where its lines are not there, or more than once."""
    lines = diff.rstrip("\n").split("\n")
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    if text.count(f"\n{before}\n") != 1:
        raise ValueError(f"not there once:\n{before}")
    return text.replace(f"\n{before}\n", f"\n{after}\n")


def apply(blocks, folder):
    """Makes the changes in the copy of the repository; returns the program."""
    program = None
    for language, block in blocks:
        first, _, rest = block.partition("\n")
        if language == "diff":
            path = folder / first.removeprefix("--- ")
            path.write_text(patched(path.read_text(), rest))
        elif first == "# try.py":
            program = rest
        else:
            path = folder / first.removeprefix("# ")
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as file:
                file.write(f"\n\n{rest}")
    return program


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(ROOT / "tsfuser", tmp_path / "tsfuser", ignore=shutil.ignore_patterns("*.so"))
    for extension in (ROOT / "tsfuser").glob("*.so"):
        (tmp_path / "tsfuser" / extension.name).symlink_to(extension)
    return tmp_path


def test_there_is_an_example_of_each_kind():
    assert [name.split()[-1] for name in EXAMPLES] == [
        "op",
        "rewrite",
        "torch.compile",
        "scheduler",
        "option",
        "target",
        "end",
    ]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_asserts_that_it_ran_fused(name):
    [program] = [block for _, block in SECTIONS[name] if block.startswith("# try.py")]
    assert f"\nassert {RAN_FUSED}, tsfuser.stats()\n" in program


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_works(name, copy):
    program = apply(SECTIONS[name], copy)
    status, out, err = run_python(copy, program, PYTHONPATH=str(copy))
    assert status == 0, f"{out}\n{err}"
