"""The commands of `python -m tsfuser`, a file each: `run`, `explain`, `kernel`, `doctor`, `cache`, `config`
and `completion`.

A command is a module with `SUMMARY`, a line for the list of commands; `add_arguments(parser)`; and
`command(chosen)`, which gets what argparse made of the arguments, and returns the exit status. `script.py`
runs a script for those that take one.
"""
