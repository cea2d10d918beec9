// What tells the Python files whether this extension is built from the sources that they go with.
#pragma once

namespace tsfuser {

// The digest that tsfuser/interface.py has of the sources; setup.py writes the definition.
const char* interface_digest();

}  // namespace tsfuser
