// What runs in the place of a graph with settled branches. See settled_branches.h.

#include "torchscript/settled_branches.h"
#include "graph/memory.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"
#include "torchscript/constants.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/interpreter.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <new>
#include <utility>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::GraphFunction;
using torch::jit::Node;
using torch::jit::Stack;

constexpr const char* kName = "settled";
constexpr size_t kMostFacts = 512;   // of one graph: all are forgotten then
constexpr int64_t kMostChoices = 8;  // of branches, in training and elsewhere: others run the general one
constexpr size_t kPlainCalls = 8;    // with new facts, before the general function is made

// Where `tsfuser::taken` writes, on this thread; null: nowhere.
std::vector<int8_t>*& noted() {
  static thread_local std::vector<int8_t>* branches = nullptr;
  return branches;
}

class Noting {
 public:
  explicit Noting(std::vector<int8_t>* branches) : before_(std::exchange(noted(), branches)) {}
  ~Noting() { noted() = before_; }
  Noting(const Noting&) = delete;
  Noting& operator=(const Noting&) = delete;

 private:
  std::vector<int8_t>* before_;
};

void note(Stack& stack) {
  const auto number = static_cast<size_t>(torch::jit::pop(stack).toInt());
  if (noted() && number < noted()->size()) {
    (*noted())[number] = stack.back().toBool();
  }
}

std::vector<Node*> taken_nodes(Graph& graph) {
  std::vector<Node*> found;
  for (Node* node : all_nodes(graph)) {
    if (node->kind() == taken_kind()) {
      found.push_back(node);
    }
  }
  return found;
}

std::vector<const torch::jit::Value*> conditions(Graph& graph) {
  std::vector<const torch::jit::Value*> found;
  for (const Node* node : taken_nodes(graph)) {
    found.push_back(node->input(0));
  }
  return found;
}

size_t number_of(const Node* taken) { return known_int(taken->input(1)).value(); }

// Puts the nodes of one block in the place of the branch.
void inline_block(Node* branch, Block* block) {
  const std::vector<Node*> nodes(block->nodes().begin(), block->nodes().end());
  for (Node* node : nodes) {
    node->moveBefore(branch);
  }
  for (size_t i = 0; i < branch->outputs().size(); ++i) {
    branch->output(i)->replaceAllUsesWith(block->outputs()[i]);
  }
  branch->destroy();
}

std::unique_ptr<GraphFunction> function_of(std::shared_ptr<Graph> graph) {
  auto made = std::make_unique<GraphFunction>(c10::QualifiedName(kName), std::move(graph), nullptr);
  keep_casts(*made);
  return made;
}

// The states of the nodes in the process, by number, as long as code of such a node is there.
struct States {
  std::mutex mutex;
  std::unordered_map<int64_t, std::weak_ptr<SettledBranches>> by_number;
};

States& states() {
  static States* s = new States;
  return *s;
}

torch::jit::Operation make_settled(const Node* node) {
  return [state = SettledBranches::of(node)](Stack& stack) { state->run(stack); };
}

}  // namespace

bool requires_gradient(const c10::IValue& value) {
  if (value.isTensor()) {
    return value.toTensor().defined() && value.toTensor().requires_grad();
  }
  if (value.isList() || value.isTuple()) {
    const auto items = value.isList() ? value.toListRef() : value.toTupleRef().elements();
    return std::any_of(items.begin(), items.end(), requires_gradient);
  }
  return false;
}

c10::Symbol settled_kind() {
  static const auto kind = c10::Symbol::fromQualString("tsfuser::settled");
  return kind;
}

c10::Symbol taken_kind() {
  static const auto kind = c10::Symbol::fromQualString("tsfuser::taken");
  return kind;
}

SettledBranches::SettledBranches(const std::shared_ptr<Graph>& graph)
    : graph_(graph), facts_(*graph, conditions(*graph)) {
  for (const Node* node : taken_nodes(*graph_)) {
    branches_ = std::max(branches_, number_of(node) + 1);
  }
  for (const Node* node : all_nodes(*graph_)) {
    reads_tensors_ |= node->kind() == c10::prim::GetAttr && may_hold_tensors(node->output()->type());
  }
}

SettledBranches::~SettledBranches() = default;

std::shared_ptr<SettledBranches> SettledBranches::of(const Node* node) {
  static const auto state = c10::Symbol::attr("state");
  const std::lock_guard<std::mutex> lock(states().mutex);
  auto& by_number = states().by_number;
  auto& kept = by_number[node->i(state)];
  auto found = kept.lock();
  if (!found) {
    found = std::make_shared<SettledBranches>(node->g(c10::attr::Subgraph));
    kept = found;
    for (auto each = by_number.begin(); each != by_number.end();) {
      each = each->second.expired() ? by_number.erase(each) : std::next(each);
    }
  }
  return found;
}

size_t SettledBranches::Hash::operator()(const Words& words) const {
  uint64_t hash = words.size();
  for (const int64_t word : words) {
    hash = (hash ^ static_cast<uint64_t>(word)) * 0x9E3779B97F4A7C15ULL;
    hash ^= hash >> 29;
  }
  return hash;
}

GraphFunction* SettledBranches::known(const Words& words) const {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  const auto found = known_.find(words);
  return found == known_.end() ? nullptr : found->second;
}

// What modules hold is not looked at: it is many tensors.
bool SettledBranches::may_record_gradients(at::ArrayRef<c10::IValue> arguments) const {
  return c10::GradMode::is_enabled() &&
         (reads_tensors_ || std::any_of(arguments.begin(), arguments.end(), requires_gradient));
}

void SettledBranches::run(Stack& stack) {
  const auto arguments = torch::jit::last(stack, graph_->inputs().size());
  const bool training = may_record_gradients(arguments);
  static thread_local Words words;  // kept for its memory
  const bool described = facts_.read(arguments, words);
  words.push_back(training);
  if (GraphFunction* function = described ? known(words) : nullptr) {
    const Noting nothing(nullptr);
    return function->run(stack);
  }
  const Words facts = words;  // what runs may be such a node itself
  Branches branches(branches_, -1);
  {
    const Noting all(&branches);
    run_noting(stack);
  }
  if (described) {
    remember(facts, {training, std::move(branches)});
  }
}

// Runs the graph as it is, in the first calls without profiling or optimising it.
void SettledBranches::run_noting(Stack& stack) {
  if (++new_facts_ > kPlainCalls) {
    return made_once(general_, [this] { return function_of(graph_->copy()); })->run(stack);
  }
  const auto* code = made_once(plain_, [this] {
    auto graph = graph_->copy();
    end_loops(*graph);
    return std::make_unique<torch::jit::Code>(std::move(graph), kName);
  });
  torch::jit::InterpreterState(*code).run(stack);
}

// What `kept` holds, which `make` gives where there is nothing yet. No other call waits for that.
template <class Made, class Make>
Made* SettledBranches::made_once(std::unique_ptr<Made>& kept, const Make& make) {
  {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    if (kept) {
      return kept.get();
    }
  }
  auto made = make();
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  if (!kept) {
    kept = std::move(made);
  }
  return kept.get();
}

void SettledBranches::remember(const Words& words, Choice choice) {
  bool is_new = false;
  {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    is_new = specialised_.count(choice) == 0;
    const auto alike = [&](const auto& made) { return made.first.training == choice.training; };
    if (is_new && std::count_if(specialised_.begin(), specialised_.end(), alike) >= kMostChoices) {
      return;
    }
  }
  Function made = is_new ? without_branches(choice.branches) : nullptr;
  if (made && choice.training) {
    record_joins(*made->graph());
  }
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  if (known_.size() >= kMostFacts) {
    known_.clear();
  }
  known_[words] = specialised_.emplace(std::move(choice), std::move(made)).first->second.get();
}

// Of the branches that were not noted (torch's dead code elimination may drop one) both blocks stay.
SettledBranches::Function SettledBranches::without_branches(const Branches& branches) const {
  auto graph = graph_->copy();
  for (;;) {
    const auto nodes = taken_nodes(*graph);  // anew, as a block that is left out may hold some
    if (nodes.empty()) {
      // torch drops what it takes for dead before it profiles the graph
      show_hidden_writes(graph, op_facts().hidden_views);
      keep_results_apart(*graph);
      return function_of(std::move(graph));
    }
    Node* node = nodes.front();
    const int8_t way = branches[number_of(node)];
    Node* branch = node->output()->uses().at(0).user;
    if (way < 0) {
      node->output()->replaceAllUsesWith(node->input(0));
    } else {
      inline_block(branch, branch->blocks()[way ? 0 : 1]);
    }
    node->destroy();
  }
}

void SettledBranches::after_fork() {
  new (&states().mutex) std::mutex;
  for (const auto& [number, kept] : states().by_number) {
    if (const auto state = kept.lock()) {
      new (&state->mutex_) std::shared_mutex;
    }
  }
}

std::vector<SettledFunction> SettledBranches::functions() const {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  std::vector<SettledFunction> found;
  for (const auto& [choice, function] : specialised_) {
    found.push_back({function.get(), choice.training});
  }
  for (const bool training : {false, true}) {
    if (general_) {
      found.push_back({general_.get(), training});
    }
  }
  return found;
}

torch::jit::Value* before_note(torch::jit::Value* condition) {
  return condition->node()->kind() == taken_kind() ? condition->node()->input(0) : condition;
}

std::optional<std::vector<SettledFunction>> settled_functions(Graph& graph) {
  for (const Node* node : graph.nodes()) {
    if (node->kind() == settled_kind()) {
      return SettledBranches::of(node)->functions();
    }
  }
  return std::nullopt;
}

void register_settled_branches() {
  register_unmerged();
  static const torch::jit::RegisterOperators registered(
      {torch::jit::Operator(settled_kind(), make_settled, c10::AliasAnalysisKind::CONSERVATIVE),
       torch::jit::Operator("tsfuser::taken(bool condition, int number) -> bool", note,
                            c10::AliasAnalysisKind::FROM_SCHEMA)});
}

}  // namespace tsfuser
