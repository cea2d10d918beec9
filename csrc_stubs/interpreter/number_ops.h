// Ops for numbers, checks and bit casts in graphs of torch.compile, which TorchScript has in no form, or in
// none that it would find for these arguments (frontends/dynamo/translation/).
#pragma once

namespace tsfuser {

void register_number_ops();

}  // namespace tsfuser
