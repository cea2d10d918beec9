// The twins of views, parts and pairs of tensors, and how autodiff comes to know them.
//
// Autodiff has formulas for `aten::view` and others, but never puts these kinds into a differentiable graph:
// results of such graphs that were views were differentiated wrongly once (here they are tensors of their
// own: differentiable.cpp). A twin, `tsfuser::view`, is another kind. Its formula is the one of ATen's op:
// it puts that op into the differentiated graph. So no twin is left there, and a graph that was not
// differentiated runs the twin, which does the same.
//
// Of parts of tensors, and of two tensors side by side, autodiff has no formula: these twins bring their
// own, as text (kFormulas). `tsfuser::cat(%a, %b, 0)` stands for `aten::cat` of a list of two: autodiff
// hands no gradients through lists.
//
// Torch looks formulas up by the text of an op's schema, and remembers what it has found by the schema's
// place in memory. So the twin's schema, in its place, reads like ATen's for the moment in which torch looks
// it up. A formula of our own takes the place of one of torch's that is for no op any more: its text is no
// op's. Where a later torch does that in another way, `has_formula` is false, there are no twins, and the
// ops stay outside of differentiable graphs.

#include "torchscript/twins.h"
#include "torchscript/nodes.h"

#include <ATen/core/stack.h>
#include <ATen/ops/cat.h>
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

struct Twin {
  const char* schema;
  const char* formula;  // as autodiff's table has it: of the op that the twin does
};

// A twin whose formula is ours.
struct OwnFormula {
  const char* schema;
  const char* original;  // what the twin does
  const char* place;     // an entry of autodiff's table that no op has
  const char* forward;   // gives the result and, as a tuple, what is saved
  const char* backward;
};

constexpr Twin kTwins[] = {
    {"tsfuser::view(Tensor(a) self, int[] size) -> Tensor(a)",
     "aten::view(Tensor self, int[] size) -> Tensor"},
    {"tsfuser::reshape(Tensor(a) self, int[] shape) -> Tensor(a)",
     "aten::reshape(Tensor self, int[] shape) -> Tensor"},
    {"tsfuser::transpose(Tensor(a) self, int dim0, int dim1) -> Tensor(a)",
     "aten::transpose(Tensor self, int dim0, int dim1) -> Tensor"},
};

constexpr OwnFormula kFormulas[] = {
    {"tsfuser::select(Tensor(a) self, int dim, int index) -> Tensor(a)",
     "aten::select(Tensor self, int dim, int index) -> Tensor", "aten::ones_like(Tensor self) -> Tensor",
     R"(graph(%self : Tensor, %dim : int, %index : int):
  %sizes : int[] = aten::size(%self)
  %part : Tensor = aten::select(%self, %dim, %index)
  %saved : (int[], int, int) = prim::TupleConstruct(%sizes, %dim, %index)
  %both : (Tensor, (int[], int, int)) = prim::TupleConstruct(%part, %saved)
  return (%both))",
     R"(graph(%saved : (int[], int, int), %gradient : Tensor):
  %sizes : int[], %dim : int, %index : int = prim::TupleUnpack(%saved)
  %whole : Tensor = aten::select_backward(%gradient, %sizes, %dim, %index)
  %none : NoneType = prim::Constant()
  %all : (Tensor, NoneType, NoneType) = prim::TupleConstruct(%whole, %none, %none)
  return (%all))"},
    {"tsfuser::slice(Tensor(a) self, int dim, int? start, int? end, int step) -> Tensor(a)",
     "aten::slice(Tensor self, int dim, int? start, int? end, int step) -> Tensor",
     "aten::full_like(Tensor self, float fill_value) -> Tensor",
     R"(graph(%self : Tensor, %dim : int, %start : int?, %end : int?, %step : int):
  %zero : int = prim::Constant[value=0]()
  %last : int = prim::Constant[value=9223372036854775807]()
  %sizes : int[] = aten::size(%self)
  %from : int = tsfuser::value_or(%start, %zero)
  %to : int = tsfuser::value_or(%end, %last)
  %part : Tensor = aten::slice(%self, %dim, %start, %end, %step)
  %saved : (int[], int, int, int, int) = prim::TupleConstruct(%sizes, %dim, %from, %to, %step)
  %both : (Tensor, (int[], int, int, int, int)) = prim::TupleConstruct(%part, %saved)
  return (%both))",
     R"(graph(%saved : (int[], int, int, int, int), %gradient : Tensor):
  %sizes : int[], %dim : int, %from : int, %to : int, %step : int = prim::TupleUnpack(%saved)
  %whole : Tensor = aten::slice_backward(%gradient, %sizes, %dim, %from, %to, %step)
  %none : NoneType = prim::Constant()
  %all : (Tensor, NoneType, NoneType, NoneType, NoneType) = )"
     R"(prim::TupleConstruct(%whole, %none, %none, %none, %none)
  return (%all))"},
    {"tsfuser::cat(Tensor first, Tensor second, int dim) -> Tensor",
     "aten::cat(Tensor[] tensors, int dim) -> Tensor",
     "aten::to(Tensor self, Tensor other, bool non_blocking, bool copy) -> Tensor",
     R"(graph(%first : Tensor, %second : Tensor, %dim : int):
  %tensors : Tensor[] = prim::ListConstruct(%first, %second)
  %result : Tensor = aten::cat(%tensors, %dim)
  %first_sizes : int[] = aten::size(%first)
  %second_sizes : int[] = aten::size(%second)
  %first_dtype : int = prim::dtype(%first)
  %second_dtype : int = prim::dtype(%second)
  %saved : (int[], int[], int, int, int) = )"
     R"(prim::TupleConstruct(%first_sizes, %second_sizes, %first_dtype, %second_dtype, %dim)
  %both : (Tensor, (int[], int[], int, int, int)) = prim::TupleConstruct(%result, %saved)
  return (%both))",
     R"(graph(%saved : (int[], int[], int, int, int), %gradient : Tensor):
  %first_sizes : int[], %second_sizes : int[], %first_dtype : int, %second_dtype : int, )"
     R"(%dim : int = prim::TupleUnpack(%saved)
  %zero : int = prim::Constant[value=0]()
  %off : bool = prim::Constant[value=0]()
  %none : NoneType = prim::Constant()
  %middle : int = tsfuser::joined_size(%first_sizes, %dim)
  %rest : int = tsfuser::joined_size(%second_sizes, %dim)
  %of_first : Tensor = aten::narrow(%gradient, %dim, %zero, %middle)
  %of_second : Tensor = aten::narrow(%gradient, %dim, %middle, %rest)
  %first : Tensor = aten::to(%of_first, %first_dtype, %off, %off, %none)
  %second : Tensor = aten::to(%of_second, %second_dtype, %off, %off, %none)
  %all : (Tensor, Tensor, NoneType) = prim::TupleConstruct(%first, %second, %none)
  return (%all))"},
};

struct TwinKinds {
  std::unordered_map<const c10::FunctionSchema*, c10::Symbol> twins;  // by the schema of ATen's op
  std::unordered_map<c10::Symbol, c10::Symbol> originals;
};

c10::Symbol join_kind() {
  static const auto kind = c10::Symbol::fromQualString("tsfuser::cat");
  return kind;
}

TwinKinds& twin_kinds() {
  static TwinKinds* k = new TwinKinds;  // leaked: threads may ask as long as they run
  return *k;
}

// ATen's op that the formula is of: the one whose schema has that text.
std::shared_ptr<Operator> original_of(const c10::FunctionSchema& formula) {
  const std::string text = torch::jit::canonicalSchemaString(formula);
  for (const auto& candidate : torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(formula.name()))) {
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
void rewrite_graph(torch::jit::Graph& graph, const char* text) {
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

void join_two(torch::jit::Stack& stack) {
  const int64_t dim = torch::jit::pop(stack).toInt();
  const at::Tensor second = torch::jit::pop(stack).toTensor(), first = torch::jit::pop(stack).toTensor();
  torch::jit::push(stack, at::cat({first, second}, dim));
}

void value_or(torch::jit::Stack& stack) {
  const int64_t other = torch::jit::pop(stack).toInt();
  const c10::IValue value = torch::jit::pop(stack);
  torch::jit::push(stack, value.isNone() ? other : value.toInt());
}

// How much of a cat's result along `dim` a tensor of these sizes is. A tensor of the sizes [0] may stand
// beside others of any rank.
void joined_size(torch::jit::Stack& stack) {
  int64_t dim = torch::jit::pop(stack).toInt();
  const std::vector<int64_t> sizes = torch::jit::pop(stack).toIntVector();
  const auto rank = static_cast<int64_t>(sizes.size());
  const bool nothing = rank == 1 && sizes[0] == 0;
  torch::jit::push(stack, nothing ? 0 : sizes.at(dim < 0 ? dim + rank : dim));
}

void add_twin(const Twin& twin) {
  const c10::FunctionSchema formula = torch::jit::parseSchema(twin.formula);
  const auto aten = original_of(formula);
  if (!aten) {
    return;
  }
  torch::jit::registerOperator(
      Operator(twin.schema, aten->getOperation(), c10::AliasAnalysisKind::FROM_SCHEMA));
  const auto kind = c10::Symbol::fromQualString(torch::jit::parseSchema(twin.schema).name());
  const auto registered = torch::jit::getAllOperatorsFor(kind);
  if (registered.size() == 1 && has_formula(*registered.front(), formula)) {
    twin_kinds().twins.emplace(&aten->schema(), kind);
    twin_kinds().originals.emplace(kind, c10::Symbol::fromQualString(formula.name()));
  }
}

void add_own(const OwnFormula& twin) {
  const c10::FunctionSchema place = torch::jit::parseSchema(twin.place);
  const c10::FunctionSchema text = torch::jit::parseSchema(twin.original);
  const auto aten = original_of(text);
  if (!aten || original_of(place)) {  // else an op would lose its formula
    return;
  }
  const auto kind = c10::Symbol::fromQualString(torch::jit::parseSchema(twin.schema).name());
  const auto operation = kind == join_kind() ? torch::jit::Operation(join_two) : aten->getOperation();
  torch::jit::registerOperator(Operator(twin.schema, operation, c10::AliasAnalysisKind::FROM_SCHEMA));
  const auto registered = torch::jit::getAllOperatorsFor(kind);
  if (registered.size() != 1 || !has_formula(*registered.front(), place)) {
    return;
  }
  const auto formula = torch::jit::gradientInfoForSchema(registered.front()->schema());
  rewrite_graph(*formula->forward, twin.forward);
  rewrite_graph(*formula->backward, twin.backward);
  twin_kinds().twins.emplace(&aten->schema(), kind);
  twin_kinds().originals.emplace(kind, c10::Symbol::fromQualString(text.name()));
}

// tsfuser::cat(%a, %b, %dim)  ->  aten::cat([%a, %b], %dim)
void restore_join(Node* node) {
  torch::jit::Graph& graph = *node->owningGraph();
  Node* list = graph.createList(c10::TensorType::get(), node->inputs().slice(0, 2))->insertBefore(node);
  Node* made = graph.create(c10::aten::cat, {list->output(), node->input(2)}, 1)->insertBefore(node);
  made->copyMetadata(node);
  made->output()->setType(node->output()->type());
  node->output()->replaceAllUsesWith(made->output());
  node->destroy();
}

// Whether the list, which the graph makes, is as it was made wherever it is read.
bool is_joined_only(const torch::jit::Value* list) {
  return std::all_of(list->uses().begin(), list->uses().end(), [](const torch::jit::Use& use) {
    return use.user->kind() == c10::aten::cat || use.user->kind() == c10::aten::stack;
  });
}

// Whether nothing writes to the value, or to a view of it, and the graph does not return it.
bool is_never_written(const torch::jit::Value* value) {
  return std::all_of(value->uses().begin(), value->uses().end(), [](const torch::jit::Use& use) {
    if (is_profile(use.user)) {
      return is_never_written(use.user->output());
    }
    if (use.user->kind() == c10::prim::ListConstruct) {
      return is_joined_only(use.user->output());
    }
    const auto* schema = use.user->maybeSchema();
    if (!schema || schema->is_vararg() || use.offset >= schema->arguments().size()) {
      return false;
    }
    const auto* written = schema->arguments()[use.offset].alias_info();
    if (!written) {
      return true;
    }
    const auto outputs = use.user->outputs();
    return !written->isWrite() && std::all_of(outputs.begin(), outputs.end(), is_never_written);
  });
}

bool gives_part(c10::Symbol kind) {
  static const auto select = c10::Symbol::fromQualString("tsfuser::select");
  static const auto slice = c10::Symbol::fromQualString("tsfuser::slice");
  return kind == select || kind == slice;
}

// Whether a part of a tensor that is cut into chunks may get no gradient: nothing reads it, or the graph
// returns it. Autodiff's formula of chunks raises then, so they had better stay apart from what is
// differentiated.
bool has_idle_chunk(const std::vector<Node*>& nodes) {
  return std::any_of(nodes.begin(), nodes.end(), [](const Node* node) {
    const bool of_list =
        node->kind() == c10::prim::ListUnpack && node->input()->node()->kind() == c10::aten::chunk;
    const auto parts = node->outputs();
    return (of_list || node->kind() == c10::prim::ConstantChunk) &&
           std::any_of(parts.begin(), parts.end(), [](const torch::jit::Value* part) {
             return part->uses().empty() ||
                    std::any_of(part->uses().begin(), part->uses().end(), [](const torch::jit::Use& use) {
                      return use.user->kind() == c10::prim::Return ||
                             use.user->kind() == c10::prim::TupleConstruct;
                    });
           });
  });
}

}  // namespace

void register_twins() {
  static const torch::jit::RegisterOperators registered(
      {Operator("tsfuser::value_or(int? value, int other) -> int", value_or,
                c10::AliasAnalysisKind::FROM_SCHEMA),
       Operator("tsfuser::joined_size(int[] sizes, int dim) -> int", joined_size,
                c10::AliasAnalysisKind::FROM_SCHEMA)});
  for (const Twin& twin : kTwins) {
    add_twin(twin);
  }
  for (const OwnFormula& twin : kFormulas) {
    add_own(twin);
  }
}

void write_twins(torch::jit::Graph& graph) {
  const std::vector<Node*> nodes = all_nodes(graph);
  if (has_idle_chunk(nodes)) {
    return;
  }
  for (Node* node : nodes) {
    const auto* schema = node->hasUses() ? node->maybeSchema() : nullptr;
    const auto found = schema ? twin_kinds().twins.find(schema) : twin_kinds().twins.end();
    if (found == twin_kinds().twins.end()) {
      continue;
    }
    std::vector<torch::jit::Value*> inputs = node->inputs().vec();
    if (found->second == join_kind()) {
      const Node* list = inputs[0]->node();
      if (list->kind() != c10::prim::ListConstruct || list->inputs().size() != 2 ||
          !is_joined_only(inputs[0])) {
        continue;
      }
      inputs = {list->input(0), list->input(1), inputs[1]};
    } else if (gives_part(found->second) && !is_never_written(node->output())) {
      continue;
    }
    Node* twin = graph.create(found->second, inputs, 1);
    twin->copyMetadata(node);
    twin->insertAfter(node);
    node->output()->replaceAllUsesWith(twin->output());
  }
}

void restore_twins(torch::jit::Graph& graph) {
  for (Node* node : all_nodes(graph)) {
    const auto found = twin_kinds().originals.find(node->kind());
    if (found == twin_kinds().originals.end()) {
      continue;
    }
    if (node->kind() == join_kind()) {
      restore_join(node);
    } else {
      node->replaceWithNewSymbol(found->second);
      node->destroy();
    }
  }
}

std::vector<std::pair<std::string, std::string>> twins() {
  std::vector<std::pair<std::string, std::string>> names;
  for (const auto& [kind, original] : twin_kinds().originals) {
    names.emplace_back(kind.toQualString(), original.toQualString());
  }
  return names;
}

}  // namespace tsfuser
