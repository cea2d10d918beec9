// See unfused_functions.h. A graph does not know its function. The source text of a node that was not
// inlined begins with `def`, and the first input of a method's graph has the type of its module.

#include "torchscript/unfused_functions.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;

// Where a graph is from; what is not known is "" or 0. `type`: of the module; `function`: as in `def`.
struct Origin {
  std::string type, function, file;
  size_t line = 0;
};

struct Noted {
  std::weak_ptr<Graph> graph;  // torch forgets it, as when its compilation cache is flushed
  Origin origin;
};

struct Notes {
  std::mutex mutex;
  std::vector<Noted> noted;
  size_t most = 64;  // then those whose graphs are gone are dropped
  size_t total = 0;  // of all times
};

Notes& notes() {
  static Notes* n = new Notes;
  return *n;
}

// With those of differentiable graphs, which stand in a graph of their own.
size_t count_fusible(Graph& graph) {
  size_t count = 0;
  for (const Node* node : all_nodes(graph)) {
    if (node->kind() == c10::prim::DifferentiableGraph) {
      count += count_fusible(*node->g(c10::attr::Subgraph));
    } else if (op_facts().computed.count(node->kind()) != 0) {
      count += !node->outputs().empty() && is_tensor(node->output(0));
    }
  }
  return count;
}

std::string name_in_def(const std::string& text) {
  const size_t begin = text.find("def ");
  const size_t end = text.find('(', begin);
  return begin == std::string::npos || end == std::string::npos ? ""
                                                                : text.substr(begin + 4, end - begin - 4);
}

Origin origin_of(Graph& graph) {
  Origin origin;
  if (!graph.inputs().empty()) {
    const auto type = graph.inputs()[0]->type()->cast<c10::ClassType>();
    origin.type = type && type->name() ? type->name()->name() : "";
  }
  for (const Node* node : all_nodes(graph)) {
    const auto& calls = node->callstack();
    const auto own = calls ? std::get<1>((*calls)->vec().front()) : node->sourceRange();
    const auto range = own.findSourceRangeThatGenerated().value_or(own);
    if (const auto place = range.file_line_col()) {
      origin.file = std::get<0>(*place);
      origin.line = std::get<1>(*place);
      origin.function = range.source() ? name_in_def(range.source()->text_str().str()) : "";
      if (origin.function.rfind("AD_", 0) == 0) {  // of torch's formulas of gradients, which are one source
        return {};
      }
      break;
    }
  }
  return origin;
}

void drop_gone(std::vector<Noted>& noted) {
  noted.erase(std::remove_if(noted.begin(), noted.end(), [](const Noted& n) { return n.graph.expired(); }),
              noted.end());
}

std::vector<std::tuple<std::string, std::string, std::string, size_t>> unfused_functions() {
  std::vector<std::tuple<std::string, std::string, std::string, size_t>> found;
  const std::lock_guard<std::mutex> lock(notes().mutex);
  drop_gone(notes().noted);
  for (const Noted& noted : notes().noted) {
    const Origin& origin = noted.origin;
    found.emplace_back(origin.type, origin.function, origin.file, origin.line);
  }
  return found;
}

}  // namespace

void note_unfused(const std::shared_ptr<Graph>& graph) {
  if (count_fusible(*graph) < 2) {
    return;  // an op alone is no group
  }
  Origin origin = origin_of(*graph);
  if (origin.type.empty() && origin.file.empty()) {
    return;  // a backward
  }
  const std::lock_guard<std::mutex> lock(notes().mutex);
  std::vector<Noted>& noted = notes().noted;
  if (noted.size() >= notes().most) {
    drop_gone(noted);
    notes().most = 2 * noted.size() + 64;
  }
  noted.push_back({graph, std::move(origin)});
  ++notes().total;
}

void bind_unfused_functions(py::module_& m) {
  m.def("unfused_functions", &unfused_functions,
        "(type of the module or '', name in its def or '', file or '', line or 0) of each graph that torch "
        "has optimised while fusion was off, and still has.");
  m.def(
      "unfused_total",
      [] {
        const std::lock_guard<std::mutex> lock(notes().mutex);
        return notes().total;
      },
      "How many such graphs there were so far.");
}

}  // namespace tsfuser
