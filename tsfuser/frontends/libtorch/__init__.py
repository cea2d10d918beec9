"""C++ programs: what a program needs that links libtorch and runs scripted modules fused.

In: an environment with torch and tsfuser, and a program that calls `tsfuser::start()` of cpp/tsfuser.h. Out:
compiler flags for the program (`config`), and an interpreter inside of it that plans (`embedded`). Example:
`c++ main.cpp $(python -m tsfuser config --cflags --libs)`.
"""
