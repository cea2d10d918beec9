// See memory.h. Torch's analysis gives each value the tensors that it may be. Two such values are connected
// here where they may be one tensor unknown to it; all connected values that torch knows to share memory,
// too, are one set. So two values may share memory if torch says so, or if both do so with one set.

#include "graph/memory.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

constexpr size_t kBeforeCarried = 2;  // operands of a loop before those that enter its body

// Whether values of the type are, or hold, tensors, lists or objects; numbers and the like share nothing.
bool may_share_memory(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
    case c10::TypeKind::ListType:
    case c10::TypeKind::DictType:
    case c10::TypeKind::ClassType:
    case c10::TypeKind::InterfaceType:
    case c10::TypeKind::FutureType:
    case c10::TypeKind::AnyType:
    case c10::TypeKind::PyObjectType: return true;
    default:
      const auto held = type.containedTypes();  // of a tuple or an optional
      return std::any_of(held.begin(), held.end(),
                         [](const c10::TypePtr& item) { return may_share_memory(*item); });
  }
}

bool may_share_memory(const Value* value) { return may_share_memory(*value->type()); }

bool is_inside(const Value* value, const Node* loop) {
  for (const Node* node = value->node(); node; node = node->owningBlock()->owningNode()) {
    if (node == loop && value->node() != loop) {
      return true;
    }
  }
  return false;
}

// The values of lists and tensors that the blocks of a loop read from outside.
void append_captured(Node* loop, Block* block, std::vector<Value*>& captured) {
  const auto append = [&](const auto& values) {
    std::copy_if(values.begin(), values.end(), std::back_inserter(captured),
                 [loop](Value* value) { return may_share_memory(value) && !is_inside(value, loop); });
  };
  for (Node* node : block->nodes()) {
    append(node->inputs());
    for (Block* inner : node->blocks()) {
      append_captured(loop, inner, captured);
    }
  }
  append(block->outputs());
}

// Whether the value is surely the tensor or list that entered the body: it was changed in place at most.
bool stays(const Value* value, const Value* entered) {
  const Node* maker = value->node();
  if (value == entered) {
    return true;
  }
  if (maker->kind() == c10::prim::If) {
    return std::all_of(maker->blocks().begin(), maker->blocks().end(), [&](const Block* block) {
      return stays(block->outputs()[value->offset()], entered);
    });
  }
  const auto* schema = maker->maybeSchema();
  const bool in_place = schema && schema->returns().size() == 1 && !schema->arguments().empty() &&
                        schema->arguments()[0].alias_info() && schema->returns()[0].alias_info() &&
                        schema->arguments()[0].alias_info()->isWrite() &&
                        *schema->arguments()[0].alias_info() == *schema->returns()[0].alias_info();
  return (in_place || maker->kind() == c10::prim::profile) && stays(maker->input(0), entered);
}

// Whether the node may write to any memory, as far as is known.
bool may_write_anywhere(const Node* node) {
  return node->kind() == c10::prim::PythonOp || node->kind() == c10::prim::CallFunction ||
         node->kind() == c10::prim::CallMethod || node->kind() == c10::prim::fork;
}

}  // namespace

std::vector<size_t> written_operands(const Node* node) {
  std::vector<size_t> places;
  const auto* schema = node->maybeSchema();
  for (size_t i = 0; i < node->inputs().size(); ++i) {
    const auto* alias =
        schema && i < schema->arguments().size() ? schema->arguments()[i].alias_info() : nullptr;
    if ((alias && alias->isWrite()) || may_write_anywhere(node)) {
      places.push_back(i);
    }
  }
  return places;
}

Memory::Memory(std::shared_ptr<Graph> graph, const std::unordered_set<c10::Symbol>& hidden_views,
               const Values& also_written)
    : graph_(std::move(graph)), aliases_(graph_), also_written_(also_written) {
  collect(graph_->block(), hidden_views);
  join_sets();
  note_writes(graph_->block());
  for (Value* value : also_written_) {
    for (const size_t set : sets_of(value)) {
      ends_[set].written = true;
    }
  }
  note_written(graph_->block());
}

size_t Memory::end_of(Value* value) {
  const auto [found, is_new] = places_.emplace(value, ends_.size());
  if (is_new) {
    const bool is_result = value->node()->kind() == c10::prim::Loop;
    ends_.push_back({value, is_result ? value->node() : nullptr, found->second});
  }
  return found->second;
}

void Memory::connect(Value* a, Value* b) {
  if (a != b && may_share_memory(a) && may_share_memory(b)) {
    const size_t first = set_of(end_of(a));
    ends_[set_of(end_of(b))].set = first;
  }
}

// What a loop returns may be what entered it. What enters its body may be what the last iteration handed on:
// what another operand of the body is, or comes from outside; no tensor that an iteration makes is older
// than it.
void Memory::connect_around(Node* loop) {
  Block* body = loop->blocks()[0];
  const auto handed_on = body->outputs().slice(1);
  const auto entering = body->inputs().slice(1);
  Values others;
  append_captured(loop, body, others);
  for (size_t i = 0; i < entering.size(); ++i) {
    if (!may_share_memory(entering[i]) || stays(handed_on[i], entering[i])) {
      continue;
    }
    connect(loop->output(i), loop->input(i + kBeforeCarried));
    for (size_t j = 0; j < entering.size(); ++j) {
      if (i != j && may_share_memory(entering[j]) &&
          (aliases_.mayContainAlias(handed_on[i], entering[j]) ||
           aliases_.mayContainAlias(handed_on[i], handed_on[j]))) {
        connect(entering[i], entering[j]);
      }
    }
    for (Value* other : others) {
      if (aliases_.mayContainAlias(handed_on[i], other)) {
        connect(entering[i], other);
      }
    }
  }
}

void Memory::collect(Block* block, const std::unordered_set<c10::Symbol>& hidden_views) {
  const auto count = [this](const auto& values) {
    for (const Value* value : values) {
      known_ = std::max(known_, value->unique() + 1);
    }
  };
  count(block->inputs());
  for (Node* node : block->nodes()) {
    count(node->outputs());
    for (Block* inner : node->blocks()) {
      collect(inner, hidden_views);
    }
    if (node->kind() == c10::prim::Loop) {
      connect_around(node);
    } else if (hidden_views.count(node->kind()) != 0) {
      for (Value* operand : node->inputs()) {
        for (Value* result : node->outputs()) {
          connect(operand, result);
        }
      }
    }
  }
}

// Each end is compared with those that are not in its set by then.
void Memory::join_sets() {
  for (size_t i = 0; i < ends_.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const End &a = ends_[i], &b = ends_[j];
      ends_[j].set = set_of(j);  // so that all ways to the first of a set are short
      if (set_of(i) != b.set && is_outside(a, b.value) && is_outside(b, a.value) &&
          aliases_.mayContainAlias(a.value, b.value)) {
        ends_[set_of(i)].set = b.set;
      }
    }
  }
  for (size_t i = 0; i < ends_.size(); ++i) {
    ends_[i].set = set_of(i);
  }
}

size_t Memory::set_of(size_t end) const {
  while (ends_[end].set != end) {
    end = ends_[end].set;
  }
  return end;
}

// A value in a loop does not depend on the loop's results, though a result may be that value.
bool Memory::is_outside(const End& end, const Value* value) {
  return !end.loop || !is_inside(value, end.loop);
}

const Memory::Sets& Memory::sets_of(Value* value) const {
  const auto [found, is_new] = sets_.try_emplace(value->unique());
  Sets& sets = found->second;
  for (size_t i = 0; is_new && i < ends_.size() && may_share_memory(value); ++i) {
    const size_t set = set_of(i);
    if (std::find(sets.begin(), sets.end(), set) == sets.end() && is_outside(ends_[i], value) &&
        (ends_[i].value == value || aliases_.mayContainAlias(ends_[i].value, value))) {
      sets.push_back(set);
    }
  }
  return sets;
}

void Memory::note_writes(Block* block) {
  for (Node* node : block->nodes()) {
    for (const size_t place : ends_.empty() ? Sets() : written_operands(node)) {
      for (const size_t set : sets_of(node->input(place))) {
        ends_[set].written = true;
      }
    }
    for (Block* inner : node->blocks()) {
      note_writes(inner);
    }
  }
}

void Memory::note_written(Block* block) {
  const auto note = [this](const auto& values) {
    for (Value* value : values) {
      if (may_share_memory(value)) {
        note_written(value);
      }
    }
  };
  note(block->inputs());
  for (Node* node : block->nodes()) {
    note(node->outputs());
    for (Block* inner : node->blocks()) {
      note_written(inner);
    }
  }
}

void Memory::note_written(Value* value) {
  bool changed = aliases_.hasWriters(value), of_items = false;
  for (size_t i = 0; i < ends_.size() && !changed; ++i) {
    if (ends_[set_of(i)].written && is_outside(ends_[i], value)) {
      changed = ends_[i].value == value || aliases_.mayAlias(ends_[i].value, value);
      of_items |= aliases_.mayContainAlias(ends_[i].value, value);
    }
  }
  if (value->node()->kind() == c10::prim::ListConstruct) {
    const auto items = value->node()->inputs();
    of_items |= std::any_of(items.begin(), items.end(),
                            [this](const Value* item) { return written_.count(item->unique()) != 0; });
  }
  for (Value* other : also_written_) {
    of_items |= aliases_.mayContainAlias(value, other);
  }
  if (changed) {
    changed_.insert(value->unique());
  }
  if (changed || of_items) {
    written_.insert(value->unique());
  }
}

bool Memory::may_share(Value* a, Value* b) const {
  if (a == b || aliases_.mayContainAlias(a, b)) {
    return true;
  }
  const auto &first = sets_of(a), &second = sets_of(b);
  return std::any_of(first.begin(), first.end(), [&second](size_t set) {
    return std::find(second.begin(), second.end(), set) != second.end();
  });
}

bool Memory::is_written(const Value* value) const {
  return value->unique() >= known_ || written_.count(value->unique()) != 0;
}

bool Memory::is_changed(const Value* holder) const {
  return holder->unique() >= known_ || changed_.count(holder->unique()) != 0;
}

bool Memory::writes_to(Node* node, const Values& values) const {
  if (aliases_.writesToAlias(node, {values.begin(), values.end()})) {
    return true;
  }
  if (ends_.empty()) {
    return false;
  }
  for (const size_t place : written_operands(node)) {
    if (std::any_of(values.begin(), values.end(),
                    [&](Value* value) { return may_share(node->input(place), value); })) {
      return true;
    }
  }
  return std::any_of(node->blocks().begin(), node->blocks().end(), [&](Block* block) {
    return std::any_of(block->nodes().begin(), block->nodes().end(),
                       [&](Node* inner) { return writes_to(inner, values); });
  });
}

}  // namespace tsfuser
