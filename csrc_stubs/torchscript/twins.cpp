// The twins, and how their formulas get into autodiff's table.
//
// Autodiff has formulas for `aten::view` and others, but never puts these kinds into a differentiable
// graph: in the past, results of such graphs that were views were differentiated wrongly (here they are
// tensors of their own: differentiable.cpp). A twin, `tsfuser::view`, is another kind. It has the formula
// of ATen's op, which puts that op into the differentiated graph. So no twin is left there. A graph that is
// not differentiated runs the twin, which does the same.
//
// For other ops autodiff has no formula, or one whose gradients go through lists, which autodiff does not
// support. The twins of these have formulas of their own, as text (twin_rows.cpp).
//
// Torch looks a formula up by the text of an op's schema, and caches it by the schema's address. So while
// torch looks it up, the schema at the twin's address has the text of ATen's schema. A formula of our own
// replaces one of torch's whose text is the schema of no op any more. If a later torch works differently,
// `has_formula` is false, there are no twins, and the ops stay outside of differentiable graphs.

#include "torchscript/twins.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/twin_rows.h"

#include <ATen/core/stack.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/csrc/jit/ir/irparser.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/csrc/jit/runtime/symbolic_script.h>

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Node;
using torch::jit::Operator;

struct Known {
  const Twin* row;
  c10::Symbol kind;
  c10::Symbol original;
};

struct KnownTwins {
  std::unordered_map<const c10::FunctionSchema*, Known> by_original;  // by the schema of ATen's op
  std::unordered_map<c10::Symbol, Known> by_kind;
  std::unordered_map<c10::Symbol, void (*)(Node*, Walk&)> helpers;  // what formulas are made of, by kind
};

KnownTwins& known_twins() {
  static KnownTwins* k = new KnownTwins;  // leaked: threads may ask as long as they run
  return *k;
}

// ATen's op whose schema has that text.
std::shared_ptr<Operator> op_of(const c10::FunctionSchema& schema) {
  const std::string text = torch::jit::canonicalSchemaString(schema);
  for (const auto& candidate : torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(schema.name()))) {
    if (torch::jit::canonicalSchemaString(candidate->schema()) == text) {
      return candidate;
    }
  }
  return nullptr;
}

// Whether autodiff takes the op by the formula from now on.
bool has_formula(const Operator& op, const c10::FunctionSchema& formula) {
  auto& schema = const_cast<c10::FunctionSchema&>(op.schema());
  const c10::FunctionSchema own = schema;
  schema = formula;
  torch::jit::hasGradientInfoForSchema(schema);
  schema = own;
  return torch::jit::hasGradientInfoForSchema(schema);
}

// Has the graph be the one that the text says.
void rewrite_graph(torch::jit::Graph& graph, const std::string& text) {
  while (!graph.outputs().empty()) {
    graph.eraseOutput(graph.outputs().size() - 1);
  }
  std::vector<Node*> nodes(graph.nodes().begin(), graph.nodes().end());
  for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
    (*node)->destroy();
  }
  while (!graph.inputs().empty()) {
    graph.eraseInput(graph.inputs().size() - 1);
  }
  torch::jit::parseIR(text, &graph);
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) {
    text += (text.empty() ? "" : ", ") + word;
  }
  return text;
}

// The types, and the names, of the values that a formula saves.
std::pair<std::string, std::string> saved_text(const Formula& formula, bool typed) {
  std::vector<std::string> types, names;
  for (const auto& [type, name] : formula.saved) {
    types.push_back(type);
    names.push_back("%" + name + (typed ? " : " + type : ""));
  }
  return {"(" + joined(types) + ")", joined(names)};
}

// The graph that gives the result and, as a tuple, what is saved.
std::string forward_text(const Formula& formula, const c10::FunctionSchema& schema) {
  std::vector<std::string> arguments;
  for (const c10::Argument& argument : schema.arguments()) {
    arguments.push_back("%" + argument.name() + " : " + argument.type()->str());
  }
  const auto [types, names] = saved_text(formula, false);
  return "graph(" + joined(arguments) + "):\n  " + formula.forward + "\n  %saved : " + types +
         " = prim::TupleConstruct(" + names + ")\n  %both : (Tensor, " + types +
         ") = prim::TupleConstruct(%result, %saved)\n  return (%both)";
}

// The graph that gives a tuple of gradients, None for what has none.
std::string backward_text(const Formula& formula, const c10::FunctionSchema& schema) {
  std::vector<std::string> types, names;
  for (const c10::Argument& argument : schema.arguments()) {
    const bool moves = formula.backward.find("%of_" + argument.name() + " ") != std::string::npos;
    types.emplace_back(moves ? "Tensor" : "NoneType");
    names.push_back(moves ? "%of_" + argument.name() : "%nothing");
  }
  return "graph(%saved : " + saved_text(formula, false).first + ", %gradient : Tensor):\n  " +
         saved_text(formula, true).second + " = prim::TupleUnpack(%saved)\n  " + formula.backward +
         "\n  %nothing : NoneType = prim::Constant()\n  %all : (" + joined(types) +
         ") = prim::TupleConstruct(" + joined(names) + ")\n  return (%all)";
}

// Whether autodiff takes the twin, registered as `op`, from now on.
bool teach(const Twin& twin, const Operator& op) {
  if (!twin.formula.place) {
    return has_formula(op, torch::jit::parseSchema(twin.originals.front()));
  }
  const c10::FunctionSchema place = torch::jit::parseSchema(twin.formula.place);
  if (op_of(place) || !has_formula(op, place)) {  // an op would lose its formula
    return false;
  }
  const auto formula = torch::jit::gradientInfoForSchema(op.schema());
  rewrite_graph(*formula->forward, forward_text(twin.formula, op.schema()));
  rewrite_graph(*formula->backward, backward_text(twin.formula, op.schema()));
  return true;
}

void add_twin(const Twin& twin) {
  std::vector<std::shared_ptr<Operator>> originals;
  for (const char* schema : twin.originals) {
    if (const auto found = op_of(torch::jit::parseSchema(schema))) {
      originals.push_back(found);
    }
  }
  if (originals.empty()) {
    return;
  }
  const auto kind = c10::Symbol::fromQualString(torch::jit::parseSchema(twin.schema).name());
  torch::jit::registerOperator(
      Operator(twin.schema, twin.run ? torch::jit::Operation(twin.run) : originals.front()->getOperation(),
               c10::AliasAnalysisKind::FROM_SCHEMA));
  const auto registered = torch::jit::getAllOperatorsFor(kind);
  if (registered.size() != 1 || !teach(twin, *registered.front())) {
    return;
  }
  for (const auto& original : originals) {
    const Known known{&twin, kind, c10::Symbol::fromQualString(original->schema().name())};
    known_twins().by_original.emplace(&original->schema(), known);
    known_twins().by_kind.emplace(kind, known);
  }
}

void value_or(torch::jit::Stack& stack) {
  const int64_t other = torch::jit::pop(stack).toInt();
  const c10::IValue value = torch::jit::pop(stack);
  torch::jit::push(stack, value.isNone() ? other : value.toInt());
}

// What of a tensor a write may change.
enum class Writes { kAny, kSizes };

// Whether an op that writes to its operand may change that.
bool may_change(c10::Symbol kind, Writes writes) {
  const std::string name = kind.toQualString();
  const auto plain = c10::Symbol::fromQualString(name.substr(0, name.size() - 1));
  const bool keeps_sizes =  // an `out` may be resized
      name.back() == '_' && (op_facts().sized.count(kind) != 0 || op_facts().computed.count(plain) != 0);
  return writes == Writes::kAny || !keeps_sizes;
}

// Whether something writes to memory of the value where torch's alias analysis does not see it: to the
// result of an op that may hand its operand on, though its schema does not say so, as `type_as`. Autodiff
// would move the write with what it puts into a graph.
bool is_written_unseen(const torch::jit::Value* value, Writes writes = Writes::kAny, bool unseen = false) {
  return std::any_of(value->uses().begin(), value->uses().end(), [=](const torch::jit::Use& use) {
    const Node* user = use.user;
    const auto any_written = [=](bool further) {
      const auto outputs = user->outputs();
      return std::any_of(outputs.begin(), outputs.end(), [=](const torch::jit::Value* output) {
        return is_written_unseen(output, writes, further);
      });
    };
    if (is_profile(user) || user->kind() == c10::prim::ListUnpack ||
        user->kind() == c10::prim::ConstantChunk) {
      return any_written(unseen);
    }
    const auto* schema = user->maybeSchema();
    if (!schema || schema->is_vararg() || use.offset >= schema->arguments().size()) {
      return false;
    }
    if (const auto* shared = schema->arguments()[use.offset].alias_info()) {
      return (unseen && shared->isWrite() && may_change(user->kind(), writes)) || any_written(unseen);
    }
    return use.offset == 0 && op_facts().handed_on.count(user->kind()) != 0 && any_written(true);
  });
}

// Whether nothing writes to the value or a view of it, as far as schemas say.
bool is_left_by_schemas(const torch::jit::Value* value, Writes writes) {
  static const Kinds readers = {c10::Symbol::fromQualString("tsfuser::asked_item"),
                                c10::Symbol::fromQualString("tsfuser::joined_before"),
                                c10::Symbol::fromQualString("tsfuser::counts")};
  return std::all_of(value->uses().begin(), value->uses().end(), [writes](const torch::jit::Use& use) {
    const Node* user = use.user;
    const auto are_left = [writes](at::ArrayRef<const torch::jit::Value*> values) {
      return std::all_of(values.begin(), values.end(), [writes](const torch::jit::Value* other) {
        return is_left_by_schemas(other, writes);
      });
    };
    if (user->kind() == c10::prim::Return) {
      const Node* around = user->owningBlock()->owningNode();
      // behind the call nobody reads the sizes in it
      return around ? around->kind() == c10::prim::If && are_left({around->outputs()[use.offset]})
                    : writes == Writes::kSizes;
    }
    if (user->kind() == c10::prim::ListConstruct) {
      return is_left_as_made(user->output());
    }
    if (is_profile(user) || user->kind() == c10::prim::ListUnpack ||
        user->kind() == c10::prim::ConstantChunk) {
      return are_left(user->outputs());
    }
    if (readers.count(user->kind()) != 0) {  // their schemas do not say so
      return true;
    }
    const auto* schema = user->maybeSchema();
    if (!schema || schema->is_vararg() || use.offset >= schema->arguments().size()) {
      return false;
    }
    const auto* written = schema->arguments()[use.offset].alias_info();
    return !written ||
           ((!written->isWrite() || !may_change(user->kind(), writes)) && are_left(user->outputs()));
  });
}

}  // namespace

bool is_left_as_made(const torch::jit::Value* list) {
  return std::all_of(list->uses().begin(), list->uses().end(), [](const torch::jit::Use& use) {
    return use.user->kind() == c10::aten::cat || use.user->kind() == c10::aten::stack ||
           use.user->kind() == c10::aten::index;
  });
}

bool is_never_written(const torch::jit::Value* value) {
  return !is_written_unseen(value) && is_left_by_schemas(value, Writes::kAny);
}

bool keeps_its_sizes(const torch::jit::Value* value) {
  return !is_written_unseen(value, Writes::kSizes) && is_left_by_schemas(value, Writes::kSizes);
}

bool is_own_and_stays(const torch::jit::Value* value) {
  const torch::jit::Value* given = behind_profile(value);
  const Node* maker = given->node();
  if (!is_never_written(given)) {
    return false;
  }
  return op_facts().fresh.count(maker->kind()) != 0 ||
         (op_facts().handed_on.count(maker->kind()) != 0 && is_own_and_stays(maker->input(0)));
}

void put(Node* node, Walk& walk, c10::Symbol kind, at::ArrayRef<torch::jit::Value*> operands) {
  Node* made = node->owningGraph()->create(kind, operands, 1)->insertBefore(node);
  made->copyMetadata(node);
  made->output()->setType(node->output()->type());
  node->output()->replaceAllUsesWith(made->output());
  walk.destroy(node);
}

void register_twins() {
  static const torch::jit::RegisterOperators registered({Operator(
      "tsfuser::value_or(int? value, int other) -> int", value_or, c10::AliasAnalysisKind::FROM_SCHEMA)});
  register_operators_of_joins();
  register_operators_of_chunks();
  register_operators_of_parts();
  register_operators_with_operands();
  register_operators_of_views();
  for (const Twin& twin : twin_rows()) {
    add_twin(twin);
  }
  for (const auto& table :
       {helpers_of_joins(), helpers_of_parts(), helpers_with_operands(), helpers_of_views()}) {
    for (const Helper& helper : table) {
      known_twins().helpers.emplace(c10::Symbol::fromQualString(helper.kind), helper.restore);
    }
  }
}

void write_twins(torch::jit::Graph& graph) {
  write_chunks(graph);
  std::vector<std::pair<Node*, const Known*>> late;
  for (Node* node : all_nodes(graph)) {
    const auto* schema = node->hasUses() ? node->maybeSchema() : nullptr;
    const auto found = schema ? known_twins().by_original.find(schema) : known_twins().by_original.end();
    if (found == known_twins().by_original.end() || is_written_unseen(node->output()) ||
        is_written_unseen(node->input(0))) {
      continue;
    }
    const auto& [row, kind, original] = found->second;
    if (row->asks_readers) {
      late.emplace_back(node, &found->second);
    } else if (row->write) {
      row->write(node, kind);
    } else {
      Node* twin = graph.create(kind, node->inputs(), 1);
      twin->copyMetadata(node);
      twin->insertAfter(node);
      node->output()->replaceAllUsesWith(twin->output());
    }
  }
  for (auto pair = late.rbegin(); pair != late.rend(); ++pair) {
    pair->second->row->write(pair->first, pair->second->kind);
  }
}

void restore_twins(torch::jit::Graph& graph) {
  Walk walk(graph);
  for (Node* node : walk) {
    const auto found = known_twins().by_kind.find(node->kind());
    if (found == known_twins().by_kind.end()) {
      continue;
    }
    if (found->second.row->restore) {
      found->second.row->restore(node, walk);
    } else {
      node->replaceWithNewSymbol(found->second.original);
      walk.destroy(node);
    }
  }
  Walk behind(graph);
  for (Node* node : behind) {
    const auto found = known_twins().helpers.find(node->kind());
    if (found != known_twins().helpers.end()) {
      found->second(node, behind);
    }
  }
  restore_chunks(graph);
}

std::vector<std::pair<std::string, std::string>> twins() {
  std::vector<std::pair<std::string, std::string>> names;
  for (const auto& [kind, known] : known_twins().by_kind) {
    names.emplace_back(kind.toQualString(), known.original.toQualString());
  }
  return names;
}

}  // namespace tsfuser
