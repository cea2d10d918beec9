// The table of twins. If a row names an entry of autodiff's table, the formula is ours, and replaces that
// entry.

#include "torchscript/twin_rows.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"

#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>

namespace tsfuser {
namespace {

using torch::jit::Node;

// Parts that something may write to stay as they are.
void write_piece(Node* node, c10::Symbol twin) {
  if (!is_never_written(node->output())) {
    return;
  }
  Node* made = node->owningGraph()->create(twin, node->inputs(), 1)->insertAfter(node);
  made->copyMetadata(node);
  node->output()->replaceAllUsesWith(made->output());
}

// Whether a differentiable graph that the node is in may have to return its result.
bool may_be_returned(const Node* node) {
  const auto& uses = node->output()->uses();
  return uses.size() > 1 || !may_be_inside(uses[0].user);
}

// Torch lets no differentiable graph return what may be its operand, as a cast, and takes all that reads the
// cast out of the graph. Where nobody can tell, the twin counts as new: torch's alias analysis knows no
// operand of it, so nothing may write to that.
void write_shared_cast(Node* node, c10::Symbol twin) {
  if (may_be_returned(node) && is_own_and_stays(node->input(0))) {
    write_piece(node, twin);
  }
}

// The same for a cast that the program makes.
void write_shared_to(Node* node, c10::Symbol twin) {
  if (may_be_returned(node) && is_read_cast(node) && is_own_and_stays(node->input(0))) {
    replace_cast(node, twin);
  }
}

// The view of a copy stays outside of differentiable graphs if its sizes are computed. They may be those of
// what the copy is made of, which would have to be in another graph then. A copy is stored anyway.
void write_view(Node* node, c10::Symbol twin) {
  if (is_own_copy(node->input(0)) && !torch::jit::toIValue(node->input(1))) {
    return;
  }
  Node* made = node->owningGraph()->create(twin, node->inputs(), 1)->insertAfter(node);
  made->copyMetadata(node);
  node->output()->replaceAllUsesWith(made->output());
}

// The reshape of repeated elements, as of an attention's keys for each of its heads, copies them, unless
// they are repeated once. If the program only reads the copy, the twin counts as new, so that a
// differentiable graph may return it, and with it be one of all the views that are copied. Other reshapes
// may be views of the program's own tensors.
void write_reshape(Node* node, c10::Symbol repeated) {
  static const auto reshape = c10::Symbol::fromQualString("tsfuser::reshape");
  static const Kinds expands = {c10::aten::expand, c10::Symbol::fromQualString("tsfuser::expand")};
  const bool copies = expands.count(behind_profile(node->input(0))->node()->kind()) != 0 &&
                      is_only_read(node->output()) && is_never_written(node->input(0));
  Node* made =
      node->owningGraph()->create(copies ? repeated : reshape, node->inputs(), 1)->insertAfter(node);
  made->copyMetadata(node);
  node->output()->replaceAllUsesWith(made->output());
}

std::vector<Twin> rows() {
  return {
      {"tsfuser::view(Tensor(a) self, int[] size) -> Tensor(a)",
       {"aten::view(Tensor self, int[] size) -> Tensor"},
       {},
       nullptr,
       write_view},
      {"tsfuser::repeated(Tensor self, int[] shape) -> Tensor",  // before the row that it may choose
       {"aten::reshape(Tensor self, int[] shape) -> Tensor"},
       {},
       nullptr,
       write_reshape},
      {"tsfuser::reshape(Tensor(a) self, int[] shape) -> Tensor(a)",
       {"aten::reshape(Tensor self, int[] shape) -> Tensor"}},
      {"tsfuser::transpose(Tensor(a) self, int dim0, int dim1) -> Tensor(a)",
       {"aten::transpose(Tensor self, int dim0, int dim1) -> Tensor"}},
      {"tsfuser::expand(Tensor(a) self, int[] size, *, bool implicit) -> Tensor(a)",
       {"aten::expand(Tensor self, int[] size, *, bool implicit) -> Tensor"}},
      {"tsfuser::expand_as(Tensor(a) self, Tensor other) -> Tensor(a)",
       {"aten::expand_as(Tensor self, Tensor other) -> Tensor"}},
      {"tsfuser::select(Tensor(a) self, int dim, int index) -> Tensor(a)",
       {"aten::select(Tensor self, int dim, int index) -> Tensor"},
       {"aten::ones_like(Tensor self) -> Tensor",
        R"(%sizes : int[] = aten::size(%self)
  %result : Tensor = aten::select(%self, %dim, %index))",
        {{"int[]", "sizes"}, {"int", "dim"}, {"int", "index"}},
        "%of_self : Tensor = aten::select_backward(%gradient, %sizes, %dim, %index)"},
       nullptr,
       write_piece},
      {"tsfuser::slice(Tensor(a) self, int dim, int? start, int? end, int step) -> Tensor(a)",
       {"aten::slice(Tensor self, int dim, int? start, int? end, int step) -> Tensor"},
       {"aten::full_like(Tensor self, float fill_value) -> Tensor",
        R"(%zero : int = prim::Constant[value=0]()
  %last : int = prim::Constant[value=9223372036854775807]()
  %sizes : int[] = aten::size(%self)
  %from : int = tsfuser::value_or(%start, %zero)
  %to : int = tsfuser::value_or(%end, %last)
  %result : Tensor = aten::slice(%self, %dim, %start, %end, %step))",
        {{"int[]", "sizes"}, {"int", "dim"}, {"int", "from"}, {"int", "to"}, {"int", "step"}},
        "%of_self : Tensor = aten::slice_backward(%gradient, %sizes, %dim, %from, %to, %step)"},
       slice_or_whole,
       write_piece},
      {"tsfuser::full_precision(Tensor self, bool cuda_enabled, bool cpu_enabled) -> Tensor",
       {"aten::_autocast_to_full_precision(Tensor self, bool cuda_enabled, bool cpu_enabled) -> Tensor"},
       {},
       nullptr,
       write_shared_cast},
      {"tsfuser::reduced_precision(Tensor self, bool cuda_enabled, bool cpu_enabled, int cuda_dtype, int "
       "cpu_dtype) -> Tensor",
       {"aten::_autocast_to_reduced_precision(Tensor self, bool cuda_enabled, bool cpu_enabled, int "
        "cuda_dtype, int cpu_dtype) -> Tensor"},
       {},
       nullptr,
       write_shared_cast},
      {"tsfuser::cast(Tensor self, Device? device, int? dtype, bool non_blocking, bool copy) -> Tensor",
       {"aten::to(Tensor self, Device? device, int? dtype, bool non_blocking, bool copy) -> Tensor",
        "aten::to(Tensor self, int dtype, bool non_blocking, bool copy, int? memory_format) -> Tensor"},
       {},
       nullptr,
       write_shared_to},
      twin_of_joins(),
      twin_of_parts(),
      twin_with_operands(),
  };
}

}  // namespace

const std::vector<Twin>& twin_rows() {
  static const auto* table = new std::vector<Twin>(rows());
  return *table;
}

}  // namespace tsfuser
