// Which values of a graph may share memory: what passes ask before they move or hide a write.
//
// It is torch's alias analysis, and what that does not know:
//
//   - A loop that runs zero times returns what entered it, and a body gets what the last iteration handed
//     on: behind `%v = prim::Loop(%n, %true, %a)` whose body returns new tensors, %v may be %a.
//   - Some ops may give their operand, or views of it, though no schema says so (OpFacts::hidden_views).
//
// In: a graph. Out: answers about its values as long as it does not change; but `is_written` and
// `is_changed` may be asked later, too, and say yes of values that were made since. Example: behind the loop
// above `may_share(%v, %a)`, and where `aten::add_(%v, ...)` follows, `is_written(%a)`.
#pragma once

#include <torch/csrc/jit/ir/alias_analysis.h>
#include <torch/csrc/jit/ir/ir.h>

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace tsfuser {

// The places of the operands that the node itself writes to.
std::vector<size_t> written_operands(const torch::jit::Node* node);

class Memory {
 public:
  using Values = std::vector<torch::jit::Value*>;

  // `hidden_views`: the kinds of ops whose results may be views though no schema says so. `also_written`:
  // what the graph writes to though no schema says so.
  Memory(std::shared_ptr<torch::jit::Graph> graph, const std::unordered_set<c10::Symbol>& hidden_views,
         const Values& also_written = {});

  // Whether both may be, or hold, one tensor or list.
  bool may_share(torch::jit::Value* a, torch::jit::Value* b) const;

  // Whether any node of the graph may write to what the value is; of a list that the graph puts together,
  // also to one of its items.
  bool is_written(const torch::jit::Value* value) const;

  // Whether any node may change which items a list has, or which values a module holds. What writes to
  // these does not.
  bool is_changed(const torch::jit::Value* holder) const;

  // Whether the node, or one inside, may write to one of the values.
  bool writes_to(torch::jit::Node* node, const Values& values) const;

  // An operand that a node writes to, and values that it may thereby write to unknown to torch's analysis.
  // Each such value that is there before the node shares memory with one of `values`, or it is in one of the
  // `earlier` writes, by their places: what those write to, or with one of their values, and so on. So each
  // value stands in few of them.
  struct HiddenWrite {
    torch::jit::Node* writer;
    size_t operand;
    Values values;
    std::vector<size_t> earlier;
  };
  std::vector<HiddenWrite> hidden_writes() const;

 private:
  using Sets = std::vector<size_t>;

  // A value that shares memory unknown to torch. The ends that may be one tensor are in one set: `set` is
  // the place of another one of the set, or its own.
  struct End {
    torch::jit::Value* value = nullptr;
    const torch::jit::Node* loop = nullptr;  // whose result it is, or null
    size_t set = 0;
    bool written = false;  // of the first of a set: whether something writes to any of the set
  };

  // The values of a set that are there before a node, and how many of them the last hidden write has.
  struct Visible {
    Values values;
    size_t covered = 0, write = 0;
  };
  using VisibleOfSets = std::unordered_map<size_t, Visible>;

  size_t end_of(torch::jit::Value* value);
  void connect(torch::jit::Value* a, torch::jit::Value* b);
  void connect_around(torch::jit::Node* loop);
  void collect(torch::jit::Block* block, const std::unordered_set<c10::Symbol>& hidden_views);
  void join_sets();
  static bool is_outside(const End& end, const torch::jit::Value* value);
  size_t set_of(size_t end) const;                      // the place of the first of the set
  const Sets& sets_of(torch::jit::Value* value) const;  // those that it may share memory with
  void note_writes(torch::jit::Block* block);
  void note_written(torch::jit::Block* block);
  void note_written(torch::jit::Value* value);
  void find_hidden(torch::jit::Block* block, VisibleOfSets& visible, std::vector<HiddenWrite>& found) const;
  void find_hidden(torch::jit::Node* writer, size_t operand, VisibleOfSets& visible,
                   std::vector<HiddenWrite>& found) const;

  std::shared_ptr<torch::jit::Graph> graph_;
  torch::jit::AliasDb aliases_;
  Values also_written_;
  std::vector<End> ends_;
  std::unordered_map<const torch::jit::Value*, size_t> places_;  // of the ends
  mutable std::unordered_map<size_t, Sets> sets_;  // by the numbers of values that were asked for
  // By the numbers of values, since passes replace values: those that are written, those that are changed,
  // and how many there were.
  std::unordered_set<size_t> written_, changed_;
  size_t known_ = 0;
};

// Tells torch's analysis of the hidden writes of a graph: a writer of %v, which may be %a, gets
// `tsfuser::shared(%v, %a)` instead. That is %v, and by its schema may be %a. New nodes stand right before
// writers.
void show_hidden_writes(const std::shared_ptr<torch::jit::Graph>& graph,
                        const std::unordered_set<c10::Symbol>& hidden_views);

void register_shared_memory();  // the operator of show_hidden_writes (hidden_writes.cpp)

}  // namespace tsfuser
