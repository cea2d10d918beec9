// The entries that torch's profiling executor calls: the pre-pass, and the predicate that asks which nodes to profile.

#include "hooks.h"

#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/pass_manager.h>
#include <torch/csrc/jit/runtime/profiling_record.h>

#include <memory>
#include <shared_mutex>
#include <unordered_set>

namespace tsfuser {

std::atomic<bool> pass_enabled{false};

namespace {

using torch::jit::Graph;
using Kinds = std::unordered_set<c10::Symbol>;

struct ProfiledKinds {
  std::shared_mutex mutex;
  Kinds kinds;
};

ProfiledKinds& profiled() {
  static ProfiledKinds* p = new ProfiledKinds;
  return *p;
}

bool is_profiled(const torch::jit::Node* node) {
  const std::shared_lock<std::shared_mutex> lock(profiled().mutex);
  return profiled().kinds.count(node->kind()) != 0;
}

// The executor's compile lock is held. Python gets a copy, so that whatever it does half-way leaves the graph as it was.
void pre_pass(std::shared_ptr<Graph>& graph) {
  if (!pass_enabled.load(std::memory_order_relaxed)) {
    return;
  }
  std::shared_ptr<Graph> copy = graph->copy();
  const PythonCall python;
  if (!python) {
    return;
  }
  release_now();
  const py::object pass = pass_callback().get();
  if (!pass) {
    return;
  }
  try {
    const py::object result = pass(copy);
    if (!result.is_none()) {
      graph = result.cast<std::shared_ptr<Graph>>();
    }
  } catch (py::error_already_set& error) {
    dispose(error, "tsfuser graph pass");
  } catch (const py::cast_error&) {
    PyErr_SetString(PyExc_TypeError, "tsfuser's graph pass returned something else than a graph");
    PyErr_WriteUnraisable(pass.ptr());
  }
}

}  // namespace

// Leaked: they may be called as long as any thread runs.
Callback& pass_callback() {
  static Callback* c = new Callback;
  return *c;
}

Callback& planner_callback() {
  static Callback* c = new Callback;
  return *c;
}

Callback& reporter_callback() {
  static Callback* c = new Callback;
  return *c;
}

void profile_kinds(const std::vector<std::string>& kinds) {
  const std::unique_lock<std::shared_mutex> lock(profiled().mutex);
  for (const std::string& kind : kinds) {
    profiled().kinds.insert(c10::Symbol::fromQualString(kind));
  }
}

void register_pass_hooks() {
  static const auto pass = torch::jit::registerPrePass(pre_pass);
  static_cast<void>(pass);
  torch::jit::RegisterProfilingNode(is_profiled);
}

}  // namespace tsfuser
