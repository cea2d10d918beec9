// Types as IValues that torch can write to a file, for written_graph.cpp. Example: `int[]` is
// ("list", ("int",)); a tensor's type is ("tensor", dtype, device, sizes, strides, requires_grad,
// undefined).
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type_base.h>

#include <vector>

namespace tsfuser {

using c10::IValue;

// All is written as tuples, of which torch keeps neither more nor less than the elements.
using Items = std::vector<IValue>;

IValue tuple(Items items);
c10::ArrayRef<IValue> elements(const IValue& written);  // of a tuple, which has to live on

// Throws std::invalid_argument for a type of another kind than graphs of torch.compile have.
IValue write_type(const c10::TypePtr& type);
c10::TypePtr read_type(const IValue& written);

}  // namespace tsfuser
