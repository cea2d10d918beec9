// Whether torch has optimised a scripted function yet, and whether the result has groups.
#pragma once

#include "group/python.h"

namespace tsfuser {

// Binds `optimised`, which says whether torch has optimised a function already, with groups or without.
void bind_optimised(py::module_& m);

}  // namespace tsfuser
