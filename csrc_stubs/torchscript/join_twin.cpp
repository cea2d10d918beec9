// The twin of ops that take lists of tensors, and of copies in a memory format. Autodiff passes no gradients
// through lists, and knows no copies.
//
//     aten::cat([%a, %b, %c], 0)     tsfuser::joined(%a, %b, %c, None, None, None, None, None, 0, False)
//     aten::stack([%a, %b], 0)       tsfuser::joined(%a, %b, None, ..., 0, True)
//     aten::clone(%a, 0)             tsfuser::joined(%a, None, ..., kCopied, False)
//     aten::clone(%a, tsfuser::memory_format(%channels_last))
//                                    tsfuser::joined(%a, None, ..., kCopied, %channels_last)
//
// These ops share one twin, because autodiff's table has few free entries.

#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/twin_rows.h"
#include "torchscript/constants.h"

#include <ATen/core/stack.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <limits>
#include <string>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Operator;
using torch::jit::Stack;
using torch::jit::Value;
using Sizes = std::vector<int64_t>;

// Stands for the dim where one tensor is copied.
constexpr int64_t kCopied = std::numeric_limits<int64_t>::min();
constexpr auto kRowMajor = static_cast<int64_t>(at::MemoryFormat::Contiguous);

// Tensors in a list: groups take no more.
size_t most_joined() { return op_facts().most_joined; }

std::vector<at::Tensor> pop_tensors(Stack& stack) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : torch::jit::last(stack, most_joined())) {
    if (!value.isNone()) {
      tensors.push_back(value.toTensor());
    }
  }
  torch::jit::drop(stack, most_joined());
  return tensors;
}

void run_joined(Stack& stack) {
  const bool stacked = torch::jit::pop(stack).toBool();
  const int64_t dim = torch::jit::pop(stack).toInt();
  const auto tensors = pop_tensors(stack);
  if (dim == kCopied) {
    torch::jit::push(
        stack, tensors.at(0).clone(stacked ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous));
    return;
  }
  torch::jit::push(stack, stacked ? at::stack(tensors, dim) : at::cat(tensors, dim));
}

bool is_asked_format(const Value* format) {
  static const auto kind = c10::Symbol::fromQualString("tsfuser::memory_format");
  return format->node()->kind() == kind;
}

// The tensors that the node joins, or copies; none where it stays.
std::vector<Value*> given_tensors(Node* node) {
  if (node->kind() == c10::aten::clone) {
    const bool row_major = known_int(node->input(1)) == kRowMajor;
    return (row_major || is_asked_format(node->input(1))) && is_never_written(node->output())
               ? std::vector<Value*>{node->input(0)}
               : std::vector<Value*>();
  }
  Node* list = node->input(0)->node();
  const bool known = list->kind() == c10::prim::ListConstruct && list->inputs().size() <= most_joined() &&
                     is_left_as_made(node->input(0));
  return known ? list->inputs().vec() : std::vector<Value*>();
}

void write_join(Node* node, c10::Symbol twin) {
  std::vector<Value*> inputs = given_tensors(node);
  if (inputs.empty()) {
    return;
  }
  Graph& graph = *node->owningGraph();
  const torch::jit::WithInsertPoint behind(node->next());
  if (inputs.size() < most_joined()) {
    inputs.resize(most_joined(), graph.insertConstant(c10::IValue()));
  }
  const bool copied = node->kind() == c10::aten::clone;
  inputs.push_back(copied ? graph.insertConstant(kCopied) : node->input(1));
  inputs.push_back(copied && is_asked_format(node->input(1))
                       ? node->input(1)->node()->input()
                       : graph.insertConstant(node->kind() == c10::aten::stack));
  Node* made = graph.insertNode(graph.create(twin, inputs, 1));
  made->copyMetadata(node);
  node->output()->replaceAllUsesWith(made->output());
}

bool is_there(const Value* value) { return value->type()->kind() != c10::TypeKind::NoneType; }

bool is_copied(const Value* dim) { return known_int(dim) == kCopied; }

void restore_joined(Node* node, Walk& walk) {
  if (is_copied(node->input(most_joined()))) {
    const torch::jit::WithInsertPoint before(node);
    static const auto asked = c10::Symbol::fromQualString("tsfuser::memory_format");
    Graph& graph = *node->owningGraph();
    Value* channels_last = node->input(most_joined() + 1);
    put(node, walk, c10::aten::clone,
        {node->input(0), known_bool(channels_last) == false ? graph.insertConstant(kRowMajor)
                                                            : graph.insert(asked, {channels_last})});
    return;
  }
  std::vector<Value*> tensors;
  for (size_t k = 0; k < most_joined(); ++k) {
    if (is_there(node->input(k))) {
      tensors.push_back(node->input(k));
    }
  }
  Node* list = node->owningGraph()->createList(c10::TensorType::get(), tensors)->insertBefore(node);
  put(node, walk, known_bool(node->input(most_joined() + 1)).value() ? c10::aten::stack : c10::aten::cat,
      {list->output(), node->input(most_joined())});
}

// How much of the result along `dim` a tensor of these sizes is. A tensor of the sizes [0] may stand in a
// cat beside others of any rank.
void joined_size(Stack& stack) {
  const bool stacked = torch::jit::pop(stack).toBool();
  int64_t dim = torch::jit::pop(stack).toInt();
  const Sizes sizes = torch::jit::pop(stack).toIntVector();
  const auto rank = static_cast<int64_t>(sizes.size());
  const bool nothing = (rank == 1 && sizes[0] == 0) || dim == kCopied;
  torch::jit::push(stack, stacked ? 1 : nothing ? 0 : sizes.at(dim < 0 ? dim + rank : dim));
}

// The gradient of one of the tensors.
void run_joined_part(Stack& stack) {
  const bool stacked = torch::jit::pop(stack).toBool();
  const int64_t length = torch::jit::pop(stack).toInt(), start = torch::jit::pop(stack).toInt(),
                dim = torch::jit::pop(stack).toInt();
  const at::Tensor gradient = torch::jit::pop(stack).toTensor();
  if (dim == kCopied) {
    torch::jit::push(stack, gradient);
    return;
  }
  torch::jit::push(stack, stacked ? gradient.select(dim, start) : gradient.narrow(dim, start, length));
}

void restore_joined_part(Node* node, Walk& walk) {
  if (is_copied(node->input(1))) {
    node->output()->replaceAllUsesWith(node->input(0));
    walk.destroy(node);
    return;
  }
  static const auto narrow = c10::Symbol::fromQualString("aten::narrow");
  std::vector<Value*> operands = node->inputs().vec();
  const bool stacked = known_bool(operands.back()).value();
  operands.resize(stacked ? 3 : 4);
  put(node, walk, stacked ? c10::aten::select : narrow, operands);
}

// Of a tensor that may be None.
void sizes_of(Stack& stack) {
  const c10::IValue tensor = torch::jit::pop(stack);
  torch::jit::push(stack, tensor.isNone() ? Sizes() : tensor.toTensor().sizes().vec());
}

void dtype_of(Stack& stack) {
  const c10::IValue tensor = torch::jit::pop(stack);
  torch::jit::push(stack, tensor.isNone() ? 0 : static_cast<int64_t>(tensor.toTensor().scalar_type()));
}

Formula formula_of_joins() {
  Formula formula{"aten::to(Tensor self, Tensor other, bool non_blocking, bool copy) -> Tensor",
                  "",
                  {{"int", "dim"}, {"bool", "stacked"}},
                  R"(%off : bool = prim::Constant[value=0]()
  %none : NoneType = prim::Constant()
  %start0 : int = prim::Constant[value=0]()
)"};
  std::string operands;
  for (size_t k = 0; k < most_joined(); ++k) {
    const std::string n = std::to_string(k);
    operands += "%t" + n + ", ";
    formula.forward += "%sizes" + n + " : int[] = tsfuser::sizes_of(%t" + n + ")\n  %dtype" + n +
                       " : int = tsfuser::dtype_of(%t" + n + ")\n  ";
    formula.saved.emplace_back("int[]", "sizes" + n);
    formula.saved.emplace_back("int", "dtype" + n);
    formula.backward += "  %length" + n + " : int = tsfuser::joined_size(%sizes" + n +
                        ", %dim, %stacked)\n  %start" + std::to_string(k + 1) + " : int = aten::add(%start" +
                        n + ", %length" + n + ")\n  %part" + n +
                        " : Tensor = tsfuser::joined_part(%gradient, %dim, %start" + n + ", %length" + n +
                        ", %stacked)\n  %of_t" + n + " : Tensor = aten::to(%part" + n + ", %dtype" + n +
                        ", %off, %off, %none)\n";
  }
  formula.forward += "%result : Tensor = tsfuser::joined(" + operands + "%dim, %stacked)";
  return formula;
}

// tsfuser::sizes_of(%x)  ->  aten::size(%x), where there is %x
void restore_query(Node* node, Walk& walk) {
  static const auto sizes = c10::Symbol::fromQualString("tsfuser::sizes_of");
  if (is_tensor(node->input())) {
    put(node, walk, node->kind() == sizes ? c10::aten::size : c10::prim::dtype, node->inputs());
  }
}

}  // namespace

bool is_own_copy(const Value* value) {
  static const auto joined = c10::Symbol::fromQualString("tsfuser::joined");
  const Node* maker = value->node();
  return maker->kind() == joined && is_copied(maker->input(most_joined()));
}

Twin twin_of_joins() {
  std::string tensors = "Tensor t0";
  for (size_t k = 1; k < most_joined(); ++k) {
    tensors += ", Tensor? t" + std::to_string(k);
  }
  return {
      "tsfuser::joined(" + tensors + ", int dim, bool stacked) -> Tensor",
      {"aten::cat(Tensor[] tensors, int dim) -> Tensor", "aten::stack(Tensor[] tensors, int dim) -> Tensor",
       "aten::clone(Tensor self, *, int? memory_format) -> Tensor"},
      formula_of_joins(),
      run_joined,
      write_join,
      restore_joined};
}

std::vector<Helper> helpers_of_joins() {
  return {{"tsfuser::joined_part", restore_joined_part},
          {"tsfuser::sizes_of", restore_query},
          {"tsfuser::dtype_of", restore_query}};
}

void register_operators_of_joins() {
  constexpr auto kind = c10::AliasAnalysisKind::FROM_SCHEMA;
  static const torch::jit::RegisterOperators registered(
      {Operator("tsfuser::joined_size(int[] sizes, int dim, bool stacked) -> int", joined_size, kind),
       Operator("tsfuser::joined_part(Tensor(a) gradient, int dim, int start, int length, bool stacked)"
                " -> Tensor(a)",
                run_joined_part, kind),
       Operator("tsfuser::sizes_of(Tensor? tensor) -> int[]", sizes_of, kind),
       Operator("tsfuser::dtype_of(Tensor? tensor) -> int", dtype_of, kind)});
}

}  // namespace tsfuser
