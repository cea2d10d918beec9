# %% [markdown]
# # A server in C++
#
# `examples/libtorch` is a server in small: [a program](../libtorch/README.md) that links libtorch, loads
# a scripted module, and answers requests of changing shape from eight threads. It serves them first
# without tsfuser, then with it, and compares the results. This page builds it and runs it.

# %%
import os
import subprocess
import sys
import tempfile
from pathlib import Path

example = Path("../libtorch").resolve()  # this script runs in its own folder
folder = Path(tempfile.mkdtemp())
source = (example / "main.cpp").read_text()

# %% [markdown]
# All that it has to do for tsfuser is this:

# %%
print(next(line for line in source.splitlines() if "#include <tsfuser.h>" in line))
print(next(line.strip() for line in source.splitlines() if "tsfuser::start()" in line))
print(next(line.strip() for line in source.splitlines() if "tsfuser::stop()" in line))

# %% [markdown]
# `build` runs CMake, which finds tsfuser by `python -m tsfuser config --cmake`, and saves the model. The
# program is linked neither to Python nor to tsfuser, and calls of a plan that is there do not enter
# Python.

# %%
done = subprocess.run(
    [example / "build", folder], env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True
)
assert done.returncode == 0, done.stdout + done.stderr
print(sorted(path.name for path in folder.iterdir() if path.name in ("server", "model.pt")))

# %%
done = subprocess.run([folder / "server", folder / "model.pt"], capture_output=True, text=True)
print(done.stdout)
assert done.returncode == 0, done.stderr

# %%
counts = dict(line.split(": ") for line in done.stdout.splitlines() if line.count(": ") == 1)
assert int(counts["launches"]) > 0
assert not any(name.startswith("fallbacks") and int(count) for name, count in counts.items())
