// What runs in the place of a graph with settled branches. See settled_branches.h.

#include "torchscript/settled_branches.h"
#include "graph/memory.h"
#include "group/failures.h"
#include "torchscript/joint_program.h"
#include "torchscript/kept_writes.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/owned_call.h"
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
#include <string>
#include <unordered_set>
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

// What a call with new facts carries along, and `tsfuser::taken` writes to: which branches it takes.
struct Note : torch::CustomClassHolder {
  SettledBranches* settled = nullptr;  // whoever runs it holds on to it
  CallFacts::Words facts;
  bool training = false;
  std::vector<int8_t> branches;
};

Note* note_of(const c10::IValue& value) {
  return value.isCapsule() ? static_cast<Note*>(value.toCapsule().get()) : nullptr;
}

void run_taken(Stack& stack) {
  const c10::IValue given = torch::jit::pop(stack);
  const auto number = static_cast<size_t>(torch::jit::pop(stack).toInt());
  if (Note* note = note_of(given); note && number < note->branches.size()) {
    note->branches[number] = stack.back().toBool();
  }
}

// The end of a call whose branches are noted.
void run_noted(Stack& stack) {
  const c10::IValue given = torch::jit::pop(stack);
  if (Note* note = note_of(given)) {
    note->settled->remember(note->facts, note->training, std::move(note->branches));
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

// All that there are, for `after_fork`.
struct Registry {
  std::mutex mutex;
  std::unordered_set<SettledBranches*> all;
};

Registry& registry() {
  static Registry* r = new Registry;
  return *r;
}

// The attribute of a node that calls one, which owns it.
c10::Symbol held_name() {
  static const auto name = c10::Symbol::attr("settled");
  return name;
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
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().all.insert(this);
}

SettledBranches::~SettledBranches() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  registry().all.erase(this);
}

SettledBranches* SettledBranches::of(const Node* node) {
  return owned_by<SettledBranches>(node, held_name());
}

Node* SettledBranches::call_of(const std::shared_ptr<Graph>& settled, Graph& graph) {
  return owned_call(graph, std::make_unique<SettledBranches>(settled), kName, held_name(), graph.inputs());
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

bool SettledBranches::describe(at::ArrayRef<c10::IValue> arguments, Words& words) const {
  const bool described = facts_.read(arguments, words);
  words.push_back(may_record_gradients(arguments));
  return described;
}

GraphFunction* SettledBranches::function_for(at::ArrayRef<c10::IValue> arguments) const {
  Words words;
  return describe(arguments, words) ? known(words) : nullptr;
}

bool SettledBranches::call(Stack& stack, std::optional<size_t>, Run run) {
  static thread_local Words words;  // kept for its memory
  const bool described = !gave_up_ && describe(torch::jit::last(stack, num_inputs()), words);
  if (GraphFunction* function = described ? known(words) : nullptr) {
    if (last() != function) {  // other threads read it, too
      last_ = function;
    }
    return function->call(stack, std::nullopt, run);
  }
  c10::intrusive_ptr<Note> note;
  if (described) {
    note = c10::make_intrusive<Note>();
    note->settled = this;
    note->facts = words;
    note->training = words.back() != 0;
    note->branches.assign(branches_, -1);
  }
  stack.push_back(note ? c10::IValue::make_capsule(std::move(note)) : c10::IValue());
  run_noting(stack, run);
  return true;
}

void SettledBranches::run(Stack& stack) {
  call(stack, std::nullopt,
       [&stack](const torch::jit::Code& code) { torch::jit::InterpreterState(code).run(stack); });
}

size_t SettledBranches::num_inputs() const { return graph_->inputs().size(); }

const c10::QualifiedName& SettledBranches::qualname() const {
  static const c10::QualifiedName name(kName);
  return name;
}

const c10::FunctionSchema& SettledBranches::getSchema() const {
  static const c10::FunctionSchema schema(kName, "", {}, {}, /*is_vararg=*/true, /*is_varret=*/true);
  return schema;
}

// Runs the graph as it is, in the first calls without profiling or optimising it.
void SettledBranches::run_noting(Stack& stack, Run run) {
  note_name();
  if (++new_facts_ > kPlainCalls) {
    GraphFunction* general = made_once(general_, [this] { return function_of(noting_graph()); });
    last_ = general;
    general->call(stack, std::nullopt, run);
    return;
  }
  const auto* code = made_once(plain_, [this] {
    auto graph = noting_graph();
    const bool ended = attempt("end_loops", *graph_, [&graph] {
      end_loops(*graph);
      end_of_pass("end_loops");
    });
    return std::make_unique<torch::jit::Code>(ended ? std::move(graph) : noting_graph(), name_);
  });
  last_ = nullptr;
  run(*code);
}

// The graph with a note as a last argument, which knows all branches at the end.
std::shared_ptr<Graph> SettledBranches::noting_graph() const {
  static const auto noted = c10::Symbol::fromQualString("tsfuser::noted");
  auto graph = graph_->copy();
  torch::jit::Value* note = graph->addInput()->setType(c10::CapsuleType::get());
  for (Node* node : taken_nodes(*graph)) {
    node->replaceInput(2, note);
  }
  graph->create(noted, {note}, 0)->insertBefore(graph->return_node());
  return graph;
}

std::unique_ptr<GraphFunction> SettledBranches::function_of(std::shared_ptr<Graph> graph) const {
  auto made = std::make_unique<GraphFunction>(c10::QualifiedName(name_), std::move(graph), nullptr);
  keep_casts(*made);
  return made;
}

void SettledBranches::note_name() {
  if (const std::shared_lock<std::shared_mutex> lock(mutex_); !name_.empty()) {
    return;
  }
  std::string name = running_function(kName);
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  if (name_.empty()) {  // else other threads read it by now
    name_ = std::move(name);
  }
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

void SettledBranches::remember(const Words& facts, bool training, Branches branches) {
  const bool made = attempt("settled_copies", *graph_, [&] {
    make_known(facts, {training, std::move(branches)});
    end_of_pass("settled_copies");
  });
  if (!made) {
    gave_up_ = true;
  }
}

void SettledBranches::make_known(const Words& words, Choice choice) {
  bool is_new = false;
  {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    is_new = specialised_.count(choice) == 0;
    const auto alike = [&](const auto& made) { return made.first.training == choice.training; };
    if (is_new && std::count_if(specialised_.begin(), specialised_.end(), alike) >= kMostChoices) {
      return;
    }
  }
  MadeFunction made = is_new ? without_branches(choice.branches) : nullptr;
  if (made && choice.training) {
    record_joins(*made->graph());
    if (auto program = as_joint_program(*made->graph())) {
      made = function_of(std::move(program));
    }
  }
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  if (known_.size() >= kMostFacts) {
    known_.clear();
  }
  known_[words] = specialised_.emplace(std::move(choice), std::move(made)).first->second.get();
}

// Of the branches that were not noted (torch's dead code elimination may drop one) both blocks stay.
SettledBranches::MadeFunction SettledBranches::without_branches(const Branches& branches) const {
  auto graph = graph_->copy();
  for (;;) {
    const auto nodes = taken_nodes(*graph);  // anew, as a block that is left out may hold some
    if (nodes.empty()) {
      // torch drops what it takes for dead before it profiles the graph
      show_hidden_writes(graph, op_facts().hidden_views);
      keep_writes(*graph);
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
  new (&registry().mutex) std::mutex;
  for (SettledBranches* settled : registry().all) {
    new (&settled->mutex_) std::shared_mutex;
  }
}

std::vector<SettledFunction> SettledBranches::functions() const {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  std::vector<SettledFunction> found;
  found.reserve(specialised_.size() + 2);
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

SettledBranches* settled_branches_of(Graph& graph) {
  for (const Node* node : graph.nodes()) {
    if (SettledBranches* found = SettledBranches::of(node)) {
      return found;
    }
  }
  return nullptr;
}

std::optional<std::vector<SettledFunction>> settled_functions(Graph& graph) {
  const SettledBranches* settled = settled_branches_of(graph);
  return settled ? std::make_optional(settled->functions()) : std::nullopt;
}

void register_settled_branches() {
  register_unmerged();
  register_kept_writes();
  static const torch::jit::RegisterOperators registered(
      {torch::jit::Operator("tsfuser::taken(bool condition, int number, Capsule? note) -> bool", run_taken,
                            c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator("tsfuser::noted(Capsule? note) -> ()", run_noted,
                            c10::AliasAnalysisKind::CONSERVATIVE)});
}

}  // namespace tsfuser
