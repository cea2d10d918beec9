// The groups of the process, by number and by text.

#include "call/counters.h"
#include "group/group.h"
#include "group/guard_widening.h"

#include <torch/csrc/jit/ir/ir.h>

#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace tsfuser {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<Group*> groups;  // by id
  std::map<std::string, Group*> by_text;
};

// Leaked, like the groups: other threads may run groups while the process exits.
Registry& registry() {
  static Registry* r = new Registry;
  return *r;
}

}  // namespace

Group* group_by_text(const std::shared_ptr<torch::jit::Graph>& graph, const std::string& text) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  Group*& group = registry().by_text[text];
  if (!group) {
    group = new Group(static_cast<int64_t>(registry().groups.size()), graph->copy(), text);
    registry().groups.push_back(group);
  }
  return group;
}

Group* group_by_id(int64_t id) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  return id >= 0 && id < static_cast<int64_t>(registry().groups.size()) ? registry().groups[id] : nullptr;
}

// The graph pass stores the group's id; a graph that comes from elsewhere (a file, a test) has only the
// subgraph.
Group* group_of(const torch::jit::Node* node) {
  static const auto cache_id = c10::Symbol::attr("cache_id");
  if (node->hasAttribute(cache_id)) {
    Group* group = group_by_id(node->i(cache_id));
    TORCH_CHECK(group, "tsfuser knows no group ", node->i(cache_id));
    return group;
  }
  const auto& subgraph = node->g(c10::attr::Subgraph);
  return group_by_text(subgraph, subgraph->toString(/*print_source_locations=*/false));
}

Group& known_group(int64_t id) {
  Group* group = group_by_id(id);
  if (!group) {
    throw std::out_of_range("tsfuser knows no group " + std::to_string(id));  // IndexError in Python
  }
  return *group;
}

size_t group_count() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().groups.size();
}

void reset_groups() {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  for (Group* group : registry().groups) {
    group->reset();
  }
  ExactTable::next_epoch();
  ExactTable::mine().clear();
  last_admission() = {};
}

void groups_after_fork() {
  new (&registry().mutex) std::mutex;
  counters().after_fork();
  for (Group* group : registry().groups) {
    group->after_fork();
  }
}

}  // namespace tsfuser
