"""A C++ compiler that keeps the object files it makes: a program with torch's headers takes it ten seconds, a
test run builds several, and the next run the same ones.

In: a folder, the command of a compiler, and its arguments. Out: what it writes. Where one object file is
asked for, the source is preprocessed, in an eighth of the time; the object of an equal text and equal options
is copied. Example:

    CXX="$(python -c 'from kit import cached_cxx, quick; print(cached_cxx.of(quick.compiler()))')" cmake .
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile

#: They name files, which the text stands for.
_FILES = ("-o", "-MF", "-MT", "-MQ", "-I", "-isystem", "-iquote")


def of(compiler):
    """The path of a program that is `compiler`, with a memory."""
    from kit.quick import HEADERS, script
    from tsfuser.target import cxx

    folder = hashlib.sha256(cxx.identity(cxx.find_compiler()).encode()).hexdigest()[:16]
    store = HEADERS.absolute() / f"objects-{folder}"
    store.mkdir(mode=0o700, parents=True, exist_ok=True)
    return script([sys.executable, "-IS", __file__, str(store), compiler])


def _main(store, compiler, *arguments):
    if "-c" not in arguments or "-o" not in arguments:
        os.execvp(compiler, [compiler, *arguments])
    at = arguments.index("-o") + 1
    with tempfile.TemporaryDirectory(dir=store) as folder:
        text, made = os.path.join(folder, "text.ii"), os.path.join(folder, "made.o")
        reading = ["-E" if word == "-c" else word for word in (*arguments[:at], text, *arguments[at + 1 :])]
        if subprocess.run([compiler, *reading, "-P"]).returncode:
            return 1
        kept = os.path.join(store, _key(text, compiler, arguments))
        if not os.path.exists(kept):
            status = subprocess.run([compiler, *arguments[:at], made, *arguments[at + 1 :]]).returncode
            if status:
                return status
            os.replace(made, kept)
    shutil.copy(kept, arguments[at])
    return 0


def _key(text, compiler, arguments):
    """Of a preprocessed text and the options that are no files."""
    found, words = hashlib.sha256(compiler.encode()), iter(arguments)
    for word in words:
        if word in _FILES:
            next(words)
        elif not word.startswith(_FILES[4]) and not os.path.isfile(word):
            found.update(word.encode() + b"\0")
    with open(text, "rb") as file:
        found.update(file.read())
    return found.hexdigest()


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
