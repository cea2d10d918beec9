// The twins of views, and how autodiff comes to know them.
//
// Autodiff has formulas for `aten::view` and others, but never puts these kinds into a differentiable graph:
// results of such graphs that were views were differentiated wrongly once (here they are tensors of their
// own: differentiable.cpp). A twin, `tsfuser::view`, is another kind. Its formula is the one of ATen's op:
// it puts that op into the differentiated graph. So no twin is left there, and a graph that was not
// differentiated runs the twin, which does the same.
//
// Torch looks formulas up by the text of an op's schema, and remembers what it has found by the schema's
// place in memory. So the twin's schema, in its place, reads like ATen's for the moment in which torch looks
// it up. Where a later torch does that in another way, `has_formula` is false, there are no twins, and the
// views stay outside of differentiable graphs.

#include "torchscript/twins.h"
#include "torchscript/nodes.h"

#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <torch/csrc/jit/runtime/symbolic_script.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

namespace tsfuser {
namespace {

using torch::jit::Node;
using torch::jit::Operator;

struct Twin {
  const char* schema;
  const char* formula;  // as autodiff's table has it: of the op that the twin does
};

constexpr Twin kTwins[] = {
    {"tsfuser::view(Tensor(a) self, int[] size) -> Tensor(a)",
     "aten::view(Tensor self, int[] size) -> Tensor"},
    {"tsfuser::reshape(Tensor(a) self, int[] shape) -> Tensor(a)",
     "aten::reshape(Tensor self, int[] shape) -> Tensor"},
    {"tsfuser::transpose(Tensor(a) self, int dim0, int dim1) -> Tensor(a)",
     "aten::transpose(Tensor self, int dim0, int dim1) -> Tensor"},
};

struct TwinKinds {
  std::unordered_map<const c10::FunctionSchema*, c10::Symbol> twins;  // by the schema of ATen's op
  std::unordered_map<c10::Symbol, c10::Symbol> originals;
};

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
bool has_formula(Operator& op, const c10::FunctionSchema& formula) {
  auto& schema = const_cast<c10::FunctionSchema&>(op.schema());
  const c10::FunctionSchema own = schema;
  schema = formula;
  torch::jit::hasGradientInfoForSchema(schema);
  schema = own;
  return torch::jit::hasGradientInfoForSchema(schema);
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

}  // namespace

void register_twins() {
  for (const Twin& twin : kTwins) {
    add_twin(twin);
  }
}

c10::Symbol twin_of(const Node& node) {
  const auto* schema = node.maybeSchema();
  const auto found = schema ? twin_kinds().twins.find(schema) : twin_kinds().twins.end();
  return found == twin_kinds().twins.end() ? c10::Symbol() : found->second;
}

void restore_twins(torch::jit::Graph& graph) {
  for (Node* node : all_nodes(graph)) {
    const auto found = twin_kinds().originals.find(node->kind());
    if (found != twin_kinds().originals.end()) {
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
