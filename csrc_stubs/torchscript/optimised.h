// What torch has made of a scripted function so far.
#pragma once

#include "group/python.h"

namespace tsfuser {

// Binds `optimised`, which says whether torch has optimised a function already, with groups or without.
void bind_optimised(py::module_& m);

}  // namespace tsfuser
