// Ops for numbers, checks and bit casts in graphs of torch.compile, which TorchScript has in no form, or in
// none that it would find for these arguments (frontends/dynamo/translation/).
#pragma once

#include <stdexcept>

namespace tsfuser {

// Python's ZeroDivisionError.
class ZeroDivision : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

void register_number_ops();

}  // namespace tsfuser
