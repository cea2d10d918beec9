// The weights that autocast casts are cast together, at the beginning of the program. Before, for each
// weight:
//
//     %w : Tensor = prim::GetAttr[name="weight"](%conv)
//     %c : Tensor = aten::_autocast_to_reduced_precision(%w, 1, 0, 5, 15)
//     %y : Tensor = aten::conv2d(%x, %c, ...)
//
// After, at the beginning of the graph, where %w0 and so on are read again:
//
//     %all : Tensor[] = prim::ListConstruct(%w0, %w1, ...)
//     %cast : Tensor[] = tsfuser::cast_together(%all, [1, 1, ...], 1, 0, 5, 15, 0)
//     %c0 : Tensor, %c1 : Tensor, ... = prim::ListUnpack(%cast)
//
// So the casts of the 54 weights of a ResNet-50 are a few launches on a GPU instead of 54, and as few in the
// backward. All casts are in memory at once then, in inference, too: as in eager code, where autocast keeps
// each cast until its block ends. Only in inference mode eager keeps none. Two conditions:
//   - nothing in the graph writes to a weight;
//   - a matrix product or a convolution reads the cast: our kernels cast their operands themselves.
//
// A cast in branches is done at the front if the front knows that they will be taken (front.h): the second
// list says so. Where that is only sometimes known, the cast stays, and gives back what is cast already.
//
// Casts that the program makes itself, as a trace under autocast has them (`aten::to(%w, 15, 0, 0, None)`),
// are done `kPart` at a time, before the first of them: eager code does not keep these.
//
// It is a step of prepare.cpp.
//
// torch.compile has no such op: there each cast is a group, and one batched launch runs several
// (frontends/dynamo/groups/weight_casts.py). That needs the casts side by side in one graph. Here autodiff
// cuts a program into many differentiable graphs, with groups behind a guard each, and the casts lie in the
// graphs that read them, as their gradients do. So the op comes before all that, and has its own backward.

#include "torchscript/weight_casts.h"
#include "graph/memory.h"
#include "torchscript/front.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"
#include "torchscript/constants.h"

#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

constexpr size_t kLeast = 4;  // casts; fewer are not worth an op of their own
constexpr size_t kPart = 16;  // casts of the program that are made at once, at most

// What is cast alike: the last arguments of the op.
using CastNumbers = std::vector<int64_t>;

// Whether the node reads a parameter of a module, or else another tensor of it.
bool reads_parameter(const Node* node) {
  const auto type =
      node->kind() == c10::prim::GetAttr ? node->input()->type()->cast<c10::ClassType>() : nullptr;
  const auto slot = type ? type->findAttributeSlot(node->s(c10::attr::name)) : std::nullopt;
  return slot && type->is_parameter(*slot);
}

// Whether the value is a parameter of a module that is an argument of the graph, or inside of one.
bool is_parameter(const Value* value) {
  const Node* node = value->node();
  if (!reads_parameter(node)) {
    return false;
  }
  while (node->kind() == c10::prim::GetAttr) {
    node = node->input()->node();
  }
  return node == node->owningGraph()->param_node();
}

// Whether all that the node may write to are statistics of a batch norm, which are no parameters.
bool writes_to_statistics(const Node* node) {
  if (node->kind() != c10::aten::batch_norm && node->kind() != c10::aten::instance_norm) {
    return false;
  }
  return std::all_of(node->inputs().begin() + 3, node->inputs().begin() + 5, [](const Value* value) {
    const Node* read = behind_profile(value)->node();
    return read->kind() == c10::prim::GetAttr ? !reads_parameter(read) : read->mustBeNone();
  });
}

// Whether the value is read, and by nothing but matrix products and convolutions behind `first`.
bool has_heavy_readers(const Value* value, const Node* first) {
  return value->hasUses() &&
         std::all_of(value->uses().begin(), value->uses().end(), [first](const torch::jit::Use& use) {
           return use.user->isAfter(first) && op_facts().heavy.count(use.user->kind()) != 0;
         });
}

// Whether the graph may change a weight, or put another one in its place, before it is cast: what Python
// has defined may do anything. Nodes in branches are among `nodes`.
bool may_be_written(const std::vector<Value*>& weights, const std::vector<Node*>& nodes, Graph& graph) {
  const Memory memory(graph.shared_from_this(), op_facts().hidden_views);
  return std::any_of(nodes.begin(), nodes.end(), [&](Node* node) {
    return (node->kind() != c10::prim::GetAttr && !is_known(node)) ||
           (node->blocks().empty() && memory.writes_to(node, weights) && !writes_to_statistics(node));
  });
}

bool is_of_program(const Node* cast) { return cast->kind() == c10::aten::to; }

// Of a cast of a module's parameter, that may be done earlier; else none.
CastNumbers numbers_of_weight_cast(const Node* node, const Node* first) {
  const bool known = is_of_program(node)
                         ? is_read_cast(node) && node->owningBlock() == node->owningGraph()->block()
                         : node->kind() == c10::aten::_autocast_to_reduced_precision;
  if (!known || !is_parameter(behind_profile(node->input(0))) || !has_heavy_readers(node->output(), first)) {
    return {};
  }
  if (is_of_program(node)) {
    const int64_t dtype = known_int(node->input(1)).value_or(-1);
    const bool narrow =
        dtype == static_cast<int64_t>(at::kHalf) || dtype == static_cast<int64_t>(at::kBFloat16);
    return narrow ? CastNumbers{true, true, dtype, dtype, true} : CastNumbers{};
  }
  CastNumbers numbers;
  for (size_t i = 1; i < node->inputs().size(); ++i) {
    const auto flag = known_bool(node->input(i));
    const auto number = flag ? std::optional<int64_t>(*flag) : known_int(node->input(i));
    if (!number) {
      return {};
    }
    numbers.push_back(*number);
  }
  numbers.push_back(false);
  return numbers;
}

// Has the cast read `made` where it may not have been cast yet, else has the cast's readers do so.
void read_instead(Node* cast, Value* made, bool exact) {
  if (exact) {
    cast->output()->replaceAllUsesWith(made);
    return;
  }
  Node* profile = cast->input(0)->node();
  (is_profile(profile) ? profile : cast)->replaceInput(0, made);
}

// Casts together, before `place`.
void cast_together_before(Node* place, const std::vector<Node*>& casts, const CastNumbers& numbers) {
  Graph& graph = *place->owningGraph();
  const torch::jit::WithInsertPoint before(place);
  Front front(graph);
  std::vector<Value*> weights, on;
  std::vector<std::pair<Node*, bool>> replaced;
  for (Node* cast : casts) {
    const Front::Running running = front.running(cast);
    if (running.on) {
      weights.push_back(front.attribute(const_cast<Value*>(behind_profile(cast->input(0)))));
      on.push_back(running.on);
      replaced.emplace_back(cast, running.exact);
    }
  }
  if (weights.size() < kLeast) {
    return;
  }
  std::vector<Value*> inputs = {
      graph.insertNode(graph.createList(c10::TensorType::get(), weights))->output(),
      graph.insertNode(graph.createList(c10::BoolType::get(), on))->output()};
  for (size_t i = 0; i < numbers.size(); ++i) {
    const bool is_flag = i != 2 && i != 3;
    inputs.push_back(graph.insertConstant(is_flag ? c10::IValue(numbers[i] != 0) : c10::IValue(numbers[i])));
  }
  static const auto kind = c10::Symbol::fromQualString("tsfuser::cast_together");
  Node* together = graph.insertNode(graph.create(kind, inputs, 1));
  together->output()->setType(c10::ListType::ofTensors());
  Node* unpacked = graph.insertNode(graph.createListUnpack(together->output(), weights.size()));
  for (size_t i = 0; i < replaced.size(); ++i) {
    read_instead(replaced[i].first, unpacked->output(i), replaced[i].second);
  }
}

}  // namespace

void cast_weights_together(Graph& graph, const Node* first) {
  const auto nodes = all_nodes(graph);
  std::map<CastNumbers, std::vector<Node*>> casts;
  std::vector<Value*> weights;
  for (Node* node : nodes) {
    const CastNumbers numbers = numbers_of_weight_cast(node, first);
    if (!numbers.empty()) {
      casts[numbers].push_back(node);
      weights.push_back(node->input(0));
    }
  }
  if (weights.size() < kLeast || may_be_written(weights, nodes, graph)) {
    return;
  }
  for (const auto& [numbers, alike] : casts) {
    const bool in_parts = is_of_program(alike.front());
    for (auto next = alike.begin(); next != alike.end();) {
      const auto left = static_cast<size_t>(alike.end() - next);
      const auto end = next + static_cast<std::ptrdiff_t>(in_parts ? std::min(kPart, left) : left);
      const std::vector<Node*> part(next, end);
      if (part.size() >= kLeast) {
        cast_together_before(in_parts ? part.front() : *graph.nodes().begin(), part, numbers);
      }
      next = end;
    }
  }
}

}  // namespace tsfuser
