"""Loop IR to C++ source; `runtime/` holds the headers that the source includes."""
