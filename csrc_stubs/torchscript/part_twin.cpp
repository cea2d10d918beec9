// The twin of ops that return the parts of a tensor as a list, and of others that have the elements of one
// tensor elsewhere: flatten, unflatten, roll, constant paddings. Autodiff passes no gradients through lists,
// and does not know the others.
//
//     %p, %q = prim::ListUnpack(     %p = tsfuser::part(%x, [3], 0, 1, 2, 0)
//         aten::split(%x, 3, 1))     %q = tsfuser::part(%x, [3], 0, 1, 2, 1)
//     %p, %q = prim::ListUnpack(     %p = tsfuser::part(%x, [], 2, 0, 2, 0)
//         aten::unbind(%x, 0))       %q = tsfuser::part(%x, [], 2, 0, 2, 1)
//     %p, %q = prim::ListUnpack(     %p = tsfuser::part(%x, [2], 3, 1, 2, 0)
//         tsfuser::chunks(%x, 2, 1)) %q = tsfuser::part(%x, [2], 3, 1, 2, 1)
//     aten::flatten(%x, 0, 1)        tsfuser::part(%x, [], 4, 0, 1, 0)
//     aten::unflatten(%x, 0, [3, 4]) tsfuser::part(%x, [3, 4], 5, 0, 0, 0)
//     aten::roll(%x, [2, 1], [0, 2]) tsfuser::part(%x, [2, 1], 6, 0, 2, kNoDim)
//     aten::pad(%x, [0, 3])          tsfuser::part(%x, [0, 3], 7, 0, 0, 0)
//
// The last two numbers of a part are the number of parts that the program takes, and the index of this one.
// These ops share one twin, because autodiff's table has few free entries. In a differentiable graph
// `tsfuser::own_part` becomes a slice, or the op (known chunks do); the ops that compute the ends of a slice
// raise the errors of the op that gives a list, and the error if there is another number of parts.

#include "torchscript/nodes.h"
#include "torchscript/parts.h"
#include "torchscript/prepare.h"
#include "torchscript/twin_rows.h"
#include "torchscript/constants.h"

#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace tsfuser {

c10::Symbol kind_of(int64_t how) {
  static const c10::Symbol kinds[] = {
      c10::Symbol::fromQualString("aten::split"),
      c10::Symbol::fromQualString("aten::split_with_sizes"),
      c10::Symbol::fromQualString("aten::unbind"),
      c10::Symbol::fromQualString("tsfuser::chunks"),
      c10::aten::flatten,
      c10::Symbol::fromQualString("aten::unflatten"),
      c10::aten::roll,
      c10::aten::pad,
      c10::Symbol::fromQualString("tsfuser::pad"),
  };
  return kinds[how];
}

namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

// Whether an op that autodiff takes computes with the value, or with a view or a cast of it.
bool is_computed_with(const Value* value) {
  return std::any_of(value->uses().begin(), value->uses().end(), [](const torch::jit::Use& use) {
    const Node* user = use.user;
    const auto* schema = user->maybeSchema();
    const bool is_view =
        is_profile(user) || (schema && use.offset == 0 && !schema->is_mutable() &&
                             !schema->arguments().empty() && schema->arguments()[0].alias_info());
    if (user->outputs().size() != 1 || !is_tensor(user->output())) {
      return false;
    }
    return is_view ? is_computed_with(user->output()) : may_be_inside(user);
  });
}

// Whether an op writes to the value by that name; not by that of a view of it.
bool is_written_by_name(const Value* value) {
  return std::any_of(value->uses().begin(), value->uses().end(), [](const torch::jit::Use& use) {
    const auto* schema = use.user->maybeSchema();
    const bool known = schema && use.offset < schema->arguments().size();
    const auto* shared = known ? schema->arguments()[use.offset].alias_info() : nullptr;
    return (shared && shared->isWrite()) || (is_profile(use.user) && is_written_by_name(use.user->output()));
  });
}

// The node that takes apart the list that `node` gives; null where something else sees the list, where the
// operand is written to (then torch refuses what reads the parts), where a part may be written to, or is
// returned, and where no differentiable graph would read the parts: the gradient of the list is one join,
// and those of parts are a tensor each, and their sum.
Node* taker_of(Node* node) {
  const auto& uses = node->output()->uses();
  Node* taker = uses.size() == 1 ? uses[0].user : nullptr;
  if (!taker || taker->kind() != c10::prim::ListUnpack || taker->owningBlock() != node->owningBlock()) {
    return nullptr;
  }
  const auto parts = taker->outputs();
  return !is_written_by_name(behind_profile(node->input(0))) &&
                 std::all_of(parts.begin(), parts.end(), is_never_written) &&
                 std::any_of(parts.begin(), parts.end(), is_computed_with)
             ? taker
             : nullptr;
}

// Inserts twins of these operands, and of a count and an index, that take the places of the parts.
void write_parts(Node* taker, c10::Symbol twin, const std::vector<Value*>& operands) {
  Graph& graph = *taker->owningGraph();
  Value* count = graph.insertConstant(static_cast<int64_t>(taker->outputs().size()));
  for (size_t k = 0; k < taker->outputs().size(); ++k) {
    if (taker->output(k)->uses().empty()) {
      continue;
    }
    std::vector<Value*> inputs = operands;
    inputs.push_back(count);
    inputs.push_back(graph.insertConstant(static_cast<int64_t>(k)));
    Node* made = graph.insertNode(graph.create(twin, inputs, 1));
    made->copyMetadata(taker);
    taker->output(k)->replaceAllUsesWith(made->output());
  }
}

How how_of(const Node* node) {
  for (const How how : {kUnbound, kChunks, kFlat, kUnflat, kRolled, kPadded, kPaddedOrSame}) {
    if (node->kind() == kind_of(how)) {
      return how;
    }
  }
  return node->input(1)->type()->kind() == c10::TypeKind::IntType ? kEqual : kSizes;
}

// The dims that a roll shifts along, with kNoDim for those that are not there; none where that is unknown,
// or where it shifts along too many, or along all as one.
Sizes dims_of_roll(const Node* node) {
  Sizes dims = known_ints(node->input(2)).value_or(Sizes());
  if (!dims.empty() && dims.size() <= kMostRolled) {
    dims.resize(kMostRolled, kNoDim);
    return dims;
  }
  return {};
}

// Whether the op puts zeros around the elements, whatever its operands are.
bool pads_with_zeros(const Node* node) {
  const auto fill = torch::jit::toIValue(node->input(3));
  const bool is_zero = fill && fill->isDouble() && fill->toDouble() == 0 && !std::signbit(fill->toDouble());
  return known_string(node->input(2)) == "constant" && fill && (fill->isNone() || is_zero);
}

// The operands of the twin, behind the tensor, of an op that gives no list; none where it has no twin.
std::vector<Value*> operands_of_whole(Node* node, How how) {
  Graph& graph = *node->owningGraph();
  const auto operands = [&](Value* given, Value* dim, Value* count, Value* index) {
    return std::vector<Value*>{given, graph.insertConstant(static_cast<int64_t>(how)), dim, count, index};
  };
  if (how == kRolled) {
    const Sizes dims = is_never_written(node->output()) ? dims_of_roll(node) : Sizes();
    return dims.empty() ? std::vector<Value*>()
                        : operands(node->input(1), graph.insertConstant(dims[0]),
                                   graph.insertConstant(dims[1]), graph.insertConstant(dims[2]));
  }
  Value* zero = graph.insertConstant(static_cast<int64_t>(0));
  if (how == kFlat) {
    return operands(graph.insertConstant(Sizes()), node->input(1), node->input(2), zero);
  }
  if (how == kUnflat) {
    return operands(node->input(2), node->input(1), zero, zero);
  }
  return pads_with_zeros(node) && is_never_written(node->output())
             ? operands(node->input(1), zero, zero, zero)
             : std::vector<Value*>();
}

void write_whole(Node* node, c10::Symbol twin, How how) {
  std::vector<Value*> operands = operands_of_whole(node, how);
  if (operands.empty()) {
    return;
  }
  operands.insert(operands.begin(), node->input(0));
  Graph& graph = *node->owningGraph();
  Node* made = graph.insertNode(graph.create(twin, operands, 1));
  made->copyMetadata(node);
  node->output()->replaceAllUsesWith(made->output());
}

void write_part(Node* node, c10::Symbol twin) {
  const How how = how_of(node);
  Graph& graph = *node->owningGraph();
  if (is_whole(how)) {
    const torch::jit::WithInsertPoint behind(node->next());
    write_whole(node, twin, how);
    return;
  }
  Node* taker = taker_of(node);
  if (!taker) {
    return;
  }
  const torch::jit::WithInsertPoint behind(taker->next());
  Value *named = graph.insertConstant(static_cast<int64_t>(how)), *given = node->input(1);
  if (how == kUnbound) {
    given = graph.insertConstant(Sizes());
  } else if (how != kSizes) {
    given = graph.insertNode(graph.createList(c10::IntType::get(), {node->input(1)}))->output();
  }
  write_parts(taker, twin, {node->input(0), given, named, node->inputs().back()});
}

}  // namespace

Twin twin_of_parts() {
  return {
      "tsfuser::part(Tensor(a) self, int[] given, int how, int dim, int count, int index) -> Tensor(a)",
      {"aten::split(Tensor self, int split_size, int dim) -> Tensor[]",
       "aten::split(Tensor self, int[] split_size, int dim) -> Tensor[]",
       "aten::split(Tensor self, int[] split_sizes, int dim) -> Tensor[]",
       "aten::split_with_sizes(Tensor self, int[] split_sizes, int dim) -> Tensor[]",
       "aten::unbind(Tensor self, int dim) -> Tensor[]",
       "tsfuser::chunks(Tensor self, int chunks, int dim) -> Tensor[]",
       "aten::flatten(Tensor self, int start_dim, int end_dim) -> Tensor",
       "aten::unflatten(Tensor self, int dim, int[] sizes) -> Tensor",
       "aten::roll(Tensor self, int[] shifts, int[] dims) -> Tensor",
       "aten::pad(Tensor self, int[] pad, str mode, float? value) -> Tensor",
       "tsfuser::pad(Tensor self, int[] pad, str mode, float? value) -> Tensor"},
      {"aten::to(Tensor self, int dtype, bool non_blocking, bool copy) -> Tensor",
       R"(%sizes : int[] = aten::size(%self)
  %result : Tensor = tsfuser::own_part(%self, %given, %how, %dim, %count, %index))",
       {{"int[]", "sizes"},
        {"int[]", "given"},
        {"int", "how"},
        {"int", "dim"},
        {"int", "count"},
        {"int", "index"}},
       "%of_self : Tensor = tsfuser::part_backward(%gradient, %sizes, %given, %how, %dim, %count, %index)"},
      run_part,
      write_part,
      restore_part,
      /*asks_readers=*/true};
}

}  // namespace tsfuser
