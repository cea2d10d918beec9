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
#include "torchscript/prepare.h"
#include "torchscript/twin_rows.h"

#include <ATen/core/stack.h>
#include <ATen/ops/chunk.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/roll.h>
#include <ATen/ops/select_backward.h>
#include <ATen/ops/slice_backward.h>
#include <ATen/ops/split.h>
#include <ATen/ops/split_with_sizes.h>
#include <ATen/ops/unbind.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Operator;
using torch::jit::Stack;
using torch::jit::Value;
using Sizes = std::vector<int64_t>;

// How the op divides its operand: into parts of one size; into parts of given sizes; into parts without the
// dim; into a number of parts; not at all. Then the dims from `dim` to `count` become one, or `dim` becomes
// those given; or the elements are shifted as given along `dim`, `count` and `index`; or so many zeros as
// given lie around them. With `kPaddedOrSame` the result may be the operand (whole_parts.cpp).
enum How : int64_t { kEqual, kSizes, kUnbound, kChunks, kFlat, kUnflat, kRolled, kPadded, kPaddedOrSame };

// Where there are fewer dims to shift along than places for them.
constexpr int64_t kNoDim = std::numeric_limits<int64_t>::min();
constexpr size_t kMostRolled = 3;

bool is_whole(int64_t how) { return how >= kFlat; }

std::vector<at::Tensor> parted(const at::Tensor& self, at::IntArrayRef given, int64_t how, int64_t dim) {
  switch (how) {
    case kEqual: return at::split(self, given.at(0), dim);
    case kSizes: return at::split_with_sizes(self, given, dim);
    case kChunks: return at::chunk(self, given.at(0), dim);
    default: return at::unbind(self, dim);
  }
}

// As prim::ListUnpack does.
void check_count(size_t found, int64_t count) {
  TORCH_CHECK(static_cast<int64_t>(found) == count, "Expected ", count, " elements in a list but found ",
              found);
}

// A tensor of these sizes, of next to no memory.
at::Tensor of_sizes(at::IntArrayRef sizes) { return at::empty({}).expand(sizes); }

// What comes behind the tensor, or its sizes.
struct Numbers {
  Sizes given;
  int64_t how, dim, count, index;
};

Numbers pop_numbers(Stack& stack) {
  Numbers n;
  n.index = torch::jit::pop(stack).toInt();
  n.count = torch::jit::pop(stack).toInt();
  n.dim = torch::jit::pop(stack).toInt();
  n.how = torch::jit::pop(stack).toInt();
  n.given = torch::jit::pop(stack).toIntVector();
  return n;
}

// The ends of parts of the `given` sizes; none if these do not fill the `whole`.
Sizes ends_of_sizes(const Sizes& given, int64_t whole) {
  Sizes ends;
  for (const int64_t size : given) {
    const int64_t before = ends.empty() ? 0 : ends.back();
    if (size < 0 || size > whole - before) {
      return {};
    }
    ends.push_back(before + size);
  }
  return ends.empty() || ends.back() != whole ? Sizes() : ends;
}

// The ends of the parts; none if the numbers do not fit: then the op itself raises the error.
Sizes quick_ends(const Sizes& sizes, const Numbers& n) {
  const int64_t dim = n.dim + (n.dim < 0 ? static_cast<int64_t>(sizes.size()) : 0);
  if (dim < 0 || dim >= static_cast<int64_t>(sizes.size()) || n.count < 1) {
    return {};
  }
  const int64_t whole = sizes[dim];
  if (n.how == kSizes) {
    return n.count == static_cast<int64_t>(n.given.size()) ? ends_of_sizes(n.given, whole) : Sizes();
  }
  int64_t step = n.how == kUnbound ? 1 : n.given.at(0);
  if (n.how == kChunks) {  // `given` is the number of parts
    step = step > 0 ? (whole + step - 1) / step : 0;
  }
  if (step <= 0 || whole <= (n.count - 1) * step || whole > n.count * step) {
    return {};
  }
  Sizes ends(n.count);
  for (int64_t k = 0; k < n.count; ++k) {
    ends[k] = std::min((k + 1) * step, whole);
  }
  return ends;
}

// Where the parts end; raises what taking so many parts raises.
Sizes ends_of(const Sizes& sizes, const Numbers& n) {
  Sizes ends = quick_ends(sizes, n);
  if (ends.empty()) {
    const auto parts = parted(of_sizes(sizes), n.given, n.how, n.dim);
    check_count(parts.size(), n.count);
    for (const at::Tensor& part : parts) {
      ends.push_back((ends.empty() ? 0 : ends.back()) + (n.how == kUnbound ? 1 : part.size(n.dim)));
    }
  }
  return ends;
}

// Where part `index` begins, and ends.
std::pair<int64_t, int64_t> bounds_of(const Sizes& sizes, const Numbers& n) {
  const Sizes ends = ends_of(sizes, n);
  return {n.index == 0 ? 0 : ends[n.index - 1], ends[n.index]};
}

Sizes rolled_dims(int64_t dim, int64_t count, int64_t index) {
  Sizes dims = {dim, count, index};
  dims.erase(std::remove(dims.begin(), dims.end(), kNoDim), dims.end());
  return dims;
}

Sizes negated(Sizes numbers) {
  std::transform(numbers.begin(), numbers.end(), numbers.begin(), std::negate<>());
  return numbers;
}

at::Tensor whole_of(const at::Tensor& self, const Numbers& n) {
  switch (n.how) {
    case kFlat: return self.flatten(n.dim, n.count);
    case kUnflat: return self.unflatten(n.dim, n.given);
    case kRolled: return at::roll(self, n.given, rolled_dims(n.dim, n.count, n.index));
    case kPadded: return at::constant_pad_nd(self, n.given);
    default: return padded_or_same(self, n.given);
  }
}

at::Tensor whole_backward(const at::Tensor& gradient, const Sizes& sizes, const Numbers& n) {
  switch (n.how) {
    case kRolled: return at::roll(gradient, negated(n.given), rolled_dims(n.dim, n.count, n.index));
    case kPadded:
    case kPaddedOrSame: return at::constant_pad_nd(gradient, negated(n.given));
    default: return gradient.reshape(sizes);
  }
}

void run_negated(Stack& stack) { torch::jit::push(stack, negated(torch::jit::pop(stack).toIntVector())); }

void run_part(Stack& stack) {
  const Numbers n = pop_numbers(stack);
  const at::Tensor self = torch::jit::pop(stack).toTensor();
  if (is_whole(n.how)) {
    torch::jit::push(stack, whole_of(self, n));
    return;
  }
  const auto [start, end] = bounds_of(self.sizes().vec(), n);
  torch::jit::push(stack, n.how == kUnbound ? self.select(n.dim, start) : self.slice(n.dim, start, end));
}

void part_start(Stack& stack) {
  const Numbers n = pop_numbers(stack);
  torch::jit::push(stack, bounds_of(torch::jit::pop(stack).toIntVector(), n).first);
}

void part_end(Stack& stack) {
  const Numbers n = pop_numbers(stack);
  torch::jit::push(stack, bounds_of(torch::jit::pop(stack).toIntVector(), n).second);
}

void run_part_backward(Stack& stack) {
  const Numbers n = pop_numbers(stack);
  const Sizes sizes = torch::jit::pop(stack).toIntVector();
  const at::Tensor gradient = torch::jit::pop(stack).toTensor();
  if (is_whole(n.how)) {
    torch::jit::push(stack, whole_backward(gradient, sizes, n));
  } else if (n.how == kUnbound) {
    torch::jit::push(stack, at::select_backward(gradient, sizes, n.dim, n.index));
  } else {
    const auto [start, end] = bounds_of(sizes, n);
    torch::jit::push(stack, at::slice_backward(gradient, sizes, n.dim, start, end, 1));
  }
}

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

// The kind of the op that gives parts in that way.
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
  const auto known = torch::jit::toIValue(node->input(2));
  Sizes dims = known ? known->toIntVector() : Sizes();
  if (!dims.empty() && dims.size() <= kMostRolled) {
    dims.resize(kMostRolled, kNoDim);
    return dims;
  }
  return {};
}

// Whether the op puts zeros around the elements, whatever its operands are.
bool pads_with_zeros(const Node* node) {
  const auto mode = torch::jit::toIValue(node->input(2)), fill = torch::jit::toIValue(node->input(3));
  return mode && mode->isString() && mode->toStringRef() == "constant" && fill &&
         (fill->isNone() || (fill->isDouble() && fill->toDouble() == 0.0));
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

bool are_same(const Value* value, const Value* other) {
  value = behind_profile(value), other = behind_profile(other);
  const auto constant = torch::jit::toIValue(value), given = torch::jit::toIValue(other);
  return value == other || (constant && given && *constant == *given);
}

// Whether both are parts of one tensor taken apart in one way. The last operand says which part it is.
bool are_siblings(const Node* node, const Node* other) {
  if (node->kind() != other->kind() || node->owningBlock() != other->owningBlock()) {
    return false;
  }
  for (size_t i = 0; i + 1 < node->inputs().size(); ++i) {
    if (!are_same(node->input(i), other->input(i))) {
      return false;
    }
  }
  return true;
}

// The parts beside the node, the node too, in the order of the program.
std::vector<Node*> siblings_of(Node* node) {
  std::vector<Node*> found;
  for (Node* other : node->owningBlock()->nodes()) {
    if (are_siblings(node, other)) {
      found.push_back(other);
    }
  }
  return found;
}

// Has the list that an op of that kind gives, taken apart, take the places of the parts.
void restore_parts(Node* node, c10::Symbol kind, const std::vector<Value*>& operands) {
  const std::vector<Node*> parts = siblings_of(node);
  Graph& graph = *node->owningGraph();
  const torch::jit::WithInsertPoint before(node);
  const auto count = torch::jit::toIValue(node->input(node->inputs().size() - 2))->toInt();
  Node* whole = graph.insertNode(graph.create(kind, operands, 1));
  whole->output()->setType(c10::ListType::ofTensors());
  Node* taker = graph.insertNode(graph.createListUnpack(whole->output(), count));
  whole->copyMetadata(node);
  taker->copyMetadata(node);
  for (Node* part : parts) {
    Value* taken = taker->output(torch::jit::toIValue(part->inputs().back())->toInt());
    taken->setType(part->output()->type());
    part->output()->replaceAllUsesWith(taken);
  }
}

int64_t given_number(const Value* value) { return torch::jit::toIValue(value)->toInt(); }

// Has the op of a whole take the place of `node`, whose operands from `first` on are the numbers.
void restore_whole(Node* node, Value* self, Value* given, size_t first) {
  const int64_t how = given_number(node->input(first + 1));
  Graph& graph = *node->owningGraph();
  const torch::jit::WithInsertPoint before(node);
  const auto number = [&](size_t k) { return node->input(first + 2 + k); };
  std::vector<Value*> operands = {self, given};
  if (how == kFlat) {
    operands = {self, number(0), number(1)};
  } else if (how == kUnflat) {
    operands = {self, number(0), given};
  } else if (how == kRolled) {
    operands.push_back(graph.insertConstant(
        rolled_dims(given_number(number(0)), given_number(number(1)), given_number(number(2)))));
  } else {
    operands.push_back(graph.insertConstant("constant"));
    operands.push_back(graph.insertConstant(c10::IValue()));
  }
  put(node, kind_of(how), operands);
}

// Of a list of numbers, which a graph may also get from outside.
Value* first_item(Graph& graph, Value* list) {
  if (const auto known = torch::jit::toIValue(list)) {
    return graph.insertConstant(known->toIntVector().at(0));
  }
  if (list->node()->kind() == c10::prim::ListConstruct) {
    return list->node()->input(0);
  }
  return graph.insert(c10::aten::__getitem__, {list, 0});
}

void restore_part(Node* node) {
  const int64_t how = given_number(node->input(2));
  if (is_whole(how)) {
    restore_whole(node, node->input(0), node->input(1), 1);
    return;
  }
  if (node->hasUses()) {  // else another part of it was restored
    std::vector<Value*> operands = {node->input(0), node->input(1), node->input(3)};
    if (how == kUnbound) {
      operands.erase(operands.begin() + 1);
    } else if (how != kSizes) {
      const torch::jit::WithInsertPoint before(node);
      operands[1] = first_item(*node->owningGraph(), operands[1]);
    }
    restore_parts(node, kind_of(how), operands);
  }
  node->destroy();
}

// The place of a part in a tensor of these sizes, before `node`, whose operands from `first` on are the
// numbers.
Value* placed(Node* node, const char* kind, Value* sizes, size_t first) {
  std::vector<Value*> operands = {sizes};
  operands.insert(operands.end(), node->inputs().begin() + first, node->inputs().end());
  Node* made = node->owningGraph()->create(c10::Symbol::fromQualString(kind), operands, 1);
  made->copyMetadata(node);
  made->output()->setType(c10::IntType::get());
  return made->insertBefore(node)->output();
}

// A part in a differentiable graph.
void restore_own_part(Node* node) {
  Value *self = node->input(0), *dim = node->input(3);
  const int64_t how = given_number(node->input(2));
  if (is_whole(how)) {
    restore_whole(node, self, node->input(1), 1);
    return;
  }
  if (how == kChunks && torch::jit::toIValue(node->input(1))) {  // no ends, which would part groups
    restore_part(node);
    return;
  }
  Graph& graph = *node->owningGraph();
  const torch::jit::WithInsertPoint before(node);
  Value* sizes = graph.insert(c10::aten::size, {self});
  Value* start = placed(node, "tsfuser::part_start", sizes, 1);
  if (how == kUnbound) {
    put(node, c10::aten::select, {self, dim, start});
  } else {
    Value* end = placed(node, "tsfuser::part_end", sizes, 1);
    put(node, c10::aten::slice, {self, dim, start, end, graph.insertConstant(static_cast<int64_t>(1))});
  }
}

// The list with the opposite numbers, before `node`.
Value* negated_before(Node* node, Value* list) {
  static const auto kind = c10::Symbol::fromQualString("tsfuser::negated");
  const torch::jit::WithInsertPoint before(node);
  Graph& graph = *node->owningGraph();
  if (const auto known = torch::jit::toIValue(list)) {
    return graph.insertConstant(negated(known->toIntVector()));
  }
  Node* made = graph.insertNode(graph.create(kind, {list}, 1));
  made->copyMetadata(node);
  made->output()->setType(c10::ListType::ofInts());
  return made->output();
}

void restore_part_backward(Node* node) {
  static const auto select = c10::Symbol::fromQualString("aten::select_backward");
  static const auto slice = c10::Symbol::fromQualString("aten::slice_backward");
  Value *gradient = node->input(0), *sizes = node->input(1), *dim = node->input(4);
  const int64_t how = given_number(node->input(3));
  if (how == kFlat || how == kUnflat) {
    put(node, c10::aten::reshape, {gradient, sizes});
  } else if (is_whole(how)) {
    restore_whole(node, gradient, negated_before(node, node->input(2)), 2);
  } else if (how == kUnbound) {
    put(node, select, {gradient, sizes, dim, node->input(6)});
  } else {
    const torch::jit::WithInsertPoint before(node);
    Value* start = placed(node, "tsfuser::part_start", sizes, 2);
    Value* end = placed(node, "tsfuser::part_end", sizes, 2);
    Value* one = node->owningGraph()->insertConstant(static_cast<int64_t>(1));
    put(node, slice, {gradient, sizes, dim, start, end, one});
  }
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

std::vector<Helper> helpers_of_parts() {
  return {{"tsfuser::own_part", restore_own_part}, {"tsfuser::part_backward", restore_part_backward}};
}

void register_operators_of_parts() {
  constexpr auto kind = c10::AliasAnalysisKind::FROM_SCHEMA;
  static const torch::jit::RegisterOperators registered(
      {Operator("tsfuser::own_part(Tensor(a) self, int[] given, int how, int dim, int count, int index)"
                " -> Tensor(a)",
                run_part, kind),
       Operator("tsfuser::part_backward(Tensor gradient, int[] sizes, int[] given, int how, int dim,"
                " int count, int index) -> Tensor",
                run_part_backward, kind),
       Operator(
           "tsfuser::part_start(int[] sizes, int[] given, int how, int dim, int count, int index) -> int",
           part_start, kind),
       Operator("tsfuser::part_end(int[] sizes, int[] given, int how, int dim, int count, int index) -> int",
                part_end, kind),
       Operator("tsfuser::negated(int[] numbers) -> int[]", run_negated, kind)});
}

}  // namespace tsfuser
