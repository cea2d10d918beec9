// The example (examples/libtorch/main.cpp, here as server.cpp) and the checks of program.cpp as one program:
// to read torch's headers takes most of the time that either takes to compile. They come first, outside of
// the namespace.
#include <ATen/Parallel.h>
#include <torch/script.h>
#include <tsfuser.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <string>
#include <thread>
#include <vector>

namespace server {
#include "server.cpp"
}

#include "program.cpp"
