// Numbers that are written to parts of new zeros, one part after another, become one op without a write,
// which groups take. TorchScript makes of `mask = x.new_zeros([h, w]); mask[:2, 1:] = 3; mask[2:] = 5`
//
//     %mask = aten::new_zeros(%x, ...)
//     %a = aten::slice(%mask, ...);  %b = aten::slice(%a, ...);  %v = aten::copy_(%b, %three, False)
//     %c = aten::slice(%mask, ...);  %w = aten::copy_(%c, %five, False)
//
// which becomes
//
//     %all = tsfuser::filled(%mask, dims, counts, [0, 2, 1, end, 2, end], [3., 5.])
//
// `dims` and the ends are those of the slices, `counts` holds the number of slices of each part, and later
// readers of %mask read %all. A number becomes one of the tensor's dtype as in eager: TorchScript makes
// floats of it first. A Swin transformer makes the masks of its shifted windows so: nine parts, which take
// ten launches on a GPU, and 45 ops of the interpreter. It is a step of prepare.cpp.

#include "call/arguments.h"
#include "group/group.h"
#include "torchscript/nodes.h"
#include "torchscript/number_writes.h"
#include "torchscript/prepare.h"
#include "torchscript/constants.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Stack;
using torch::jit::Value;

constexpr const char* kFilled = "tsfuser::filled";
constexpr double kMostInt32 = 2147483648.0;        // 2^31
constexpr double kMostExact = 9007199254740992.0;  // 2^53: every integer up to it is a double

struct Slice {
  int64_t dim;
  Value *start, *end;  // an int, or None
};

// A write to a part of a tensor: its slices, the outermost first.
struct Part {
  Node* write;
  Value* whole;
  std::vector<Slice> slices;
  double number;
};

bool is_end(const Value* value) {
  return value->type()->kind() == c10::TypeKind::IntType || value->type()->kind() == c10::TypeKind::NoneType;
}

std::optional<double> known_number(const Value* value) {
  const auto integer = known_int(value);
  if (integer && std::abs(static_cast<double>(*integer)) < kMostExact) {
    return static_cast<double>(*integer);
  }
  const auto number = known_double(value);
  const bool is_exact = !number || !std::isfinite(*number) || std::abs(*number) < kMostInt32;
  return is_exact ? number : std::nullopt;  // beyond int32 an integer's last bits are up to the processor
}

// Whether nothing but the next slice, or the write, reads the part; or asks for its dtype and device.
bool is_only_written(const Value* part, const Node* reader) {
  return std::all_of(part->uses().begin(), part->uses().end(), [reader](const torch::jit::Use& use) {
    return use.user == reader || use.user->kind() == c10::prim::dtype ||
           use.user->kind() == c10::prim::device ||
           (is_profile(use.user) && is_only_written(use.user->output(), reader));
  });
}

// The part that the node writes a number to; none for other nodes. No dim is sliced twice.
std::optional<Part> part_written(Node* write) {
  if (!writes_number(write) || !write->output()->uses().empty()) {
    return std::nullopt;
  }
  const auto number = known_number(number_written(write));
  if (!number) {
    return std::nullopt;
  }
  Part part{write, nullptr, {}, *number};
  const Node* reader = write;
  auto* value = const_cast<Value*>(behind_profile(write->input(0)));
  while (value->node()->kind() == c10::aten::slice && value->node()->owningBlock() == write->owningBlock()) {
    Node* slice = value->node();
    const auto dim = known_int(slice->input(1)), step = known_int(slice->input(4));
    const bool is_plain =
        dim && *dim >= 0 && step == 1 && is_end(slice->input(2)) && is_end(slice->input(3));
    if (!is_plain || !is_only_written(value, reader) ||
        std::any_of(part.slices.begin(), part.slices.end(),
                    [&](const Slice& other) { return other.dim == *dim; })) {
      return std::nullopt;
    }
    part.slices.insert(part.slices.begin(), {*dim, slice->input(2), slice->input(3)});
    reader = slice;
    value = const_cast<Value*>(behind_profile(slice->input(0)));
  }
  part.whole = value;
  return part.slices.empty() ? std::nullopt : std::optional<Part>(part);
}

bool makes_zeros(const Node* node) {
  static const auto like = c10::Symbol::fromQualString("aten::new_zeros");
  return node->kind() == like || node->kind() == c10::aten::zeros;
}

// Whether nothing else reads the tensor before the last of the writes to its parts, which come in order.
bool are_first_readers(const std::vector<Part>& parts) {
  const Value* whole = parts.front().whole;
  const Node* last = parts.back().write;
  size_t readers = 0;
  for (const auto& use : whole->uses()) {
    const bool is_slice = use.user->kind() == c10::aten::slice && use.user->isBefore(last);
    if (!is_slice && !use.user->isAfter(last)) {
      return false;
    }
    readers += is_slice;
  }
  return readers == parts.size();
}

Value* list_of_ends(const std::vector<Part>& parts, Graph& graph) {
  std::vector<Value*> ends;
  const auto given = [&](Value* end, int64_t otherwise) {
    const bool is_there = end->type()->kind() == c10::TypeKind::IntType;
    ends.push_back(is_there ? end : graph.insertConstant(otherwise));
  };
  for (const Part& part : parts) {
    for (const Slice& slice : part.slices) {
      given(slice.start, 0);
      given(slice.end, std::numeric_limits<int64_t>::max());
    }
  }
  return graph.insertNode(graph.createList(c10::IntType::get(), ends))->output();
}

void fill_at_once(const std::vector<Part>& parts) {
  static const auto kind = c10::Symbol::fromQualString(kFilled);
  Node* last = parts.back().write;
  Graph& graph = *last->owningGraph();
  const torch::jit::WithInsertPoint behind(last->next());
  std::vector<int64_t> dims, counts;
  std::vector<double> numbers;
  for (const Part& part : parts) {
    counts.push_back(static_cast<int64_t>(part.slices.size()));
    numbers.push_back(part.number);
    for (const Slice& slice : part.slices) {
      dims.push_back(slice.dim);
    }
  }
  Value* whole = parts.front().whole;
  Node* made =
      graph.insertNode(graph.create(kind,
                                    {whole, graph.insertConstant(dims), graph.insertConstant(counts),
                                     list_of_ends(parts, graph), graph.insertConstant(numbers)},
                                    1));
  made->copyMetadata(last);
  whole->replaceAllUsesAfterNodeWith(made, made->output());
  for (const Part& part : parts) {
    disarm(part.write);
  }
}

// The number as a tensor of that dtype. An integer has its last bits, as in TorchScript: 300 is 44 in bytes.
at::Tensor as_tensor(double number, at::ScalarType dtype) {
  const bool is_int = c10::isIntegralType(dtype, /*includeBool=*/false) && std::abs(number) <= kMostExact;
  const at::Tensor made = is_int ? at::scalar_tensor(static_cast<int64_t>(number), at::dtype(at::kLong))
                                 : at::scalar_tensor(number, at::dtype(at::kDouble));
  return made.to(dtype);
}

// One part after another, in a copy.
void fill_one_by_one(Stack& stack) {
  const auto numbers = torch::jit::pop(stack).toDoubleVector();
  const auto ends = torch::jit::pop(stack).toIntVector();
  const auto counts = torch::jit::pop(stack).toIntVector(), dims = torch::jit::pop(stack).toIntVector();
  const at::Tensor filled = torch::jit::pop(stack).toTensor().clone();
  size_t k = 0;
  for (size_t p = 0; p < numbers.size(); ++p) {
    at::Tensor part = filled;
    for (int64_t left = counts.at(p); left > 0; --left, ++k) {
      part = part.slice(dims.at(k), ends.at(2 * k), ends.at(2 * k + 1));
    }
    part.fill_(as_tensor(numbers[p], filled.scalar_type()));
  }
  torch::jit::push(stack, filled);
}

// What is the same in all calls of a node: dims, counts and numbers.
using Constants = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<double>>;

// The group of nothing but such a node, which is given the tensor and the ends.
Group& make_group_of_one(const Constants& constants) {
  const auto& [dims, counts, numbers] = constants;
  const auto graph = std::make_shared<Graph>();
  Value* whole = graph->addInput();
  Value* ends = graph->addInput()->setType(c10::ListType::ofInts());
  Node* node =
      graph->insertNode(graph->create(c10::Symbol::fromQualString(kFilled),
                                      {whole, graph->insertConstant(dims), graph->insertConstant(counts),
                                       ends, graph->insertConstant(numbers)},
                                      1));
  graph->registerOutput(node->output());
  return *group_by_text(graph, graph->toString(/*print_source_locations=*/false));
}

// Torch makes one operation for all nodes of a kind, so an operation cannot know its group.
Group& group_of_one(const Constants& constants) {
  static std::mutex mutex;
  static auto* groups = new std::map<Constants, Group*>;  // leaked: threads may ask as long as they run
  const std::lock_guard<std::mutex> lock(mutex);
  Group*& found = (*groups)[constants];
  if (!found) {
    found = &make_group_of_one(constants);
  }
  return *found;
}

thread_local bool inside = false;  // of a group of one, which runs unfused

// Outside of groups, as in training, where autodiff leaves it out, the op is a group of its own.
void run_filled(Stack& stack) {
  const auto given = torch::jit::last(stack, 5);
  const at::Tensor& whole = given[0].toTensor();
  const bool records = c10::GradMode::is_enabled() && whole.requires_grad();
  if (inside || records || refuse_mode() || refuse_tensor(whole)) {
    return fill_one_by_one(stack);
  }
  Group& group = group_of_one({given[1].toIntVector(), given[2].toIntVector(), given[4].toDoubleVector()});
  Stack call = {given[0], given[3]};
  torch::jit::drop(stack, 5);
  const at::NoGradGuard no_gradients;  // groups refuse what autograd would have to record
  const auto leave = c10::make_scope_exit([] { inside = false; });
  inside = true;
  group.run(call, 2);
  stack.push_back(std::move(call[0]));
}

}  // namespace

void fill_parts_at_once(Graph& graph, const Node* first) {
  std::unordered_map<const Value*, std::vector<Part>> by_whole;
  std::vector<const Value*> wholes;
  for (Node* node : all_nodes(graph)) {
    if (auto part = part_written(node)) {
      const Node* maker = part->whole->node();
      if (makes_zeros(maker) && maker->owningBlock() == node->owningBlock()) {
        auto& parts = by_whole[part->whole];
        if (parts.empty()) {
          wholes.push_back(part->whole);
        }
        parts.push_back(*part);
      }
    }
  }
  for (const Value* whole : wholes) {
    const auto& parts = by_whole[whole];
    if (parts.size() > 1 && is_passed_later(parts.front().write, first) && are_first_readers(parts)) {
      fill_at_once(parts);
    }
  }
}

void register_operators_of_fills() {
  static const torch::jit::RegisterOperators registered({torch::jit::Operator(
      std::string(kFilled) +
          "(Tensor self, int[] dims, int[] counts, int[] ends, float[] numbers) -> Tensor",
      run_filled, c10::AliasAnalysisKind::FROM_SCHEMA)});
}

}  // namespace tsfuser
