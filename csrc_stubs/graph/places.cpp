#include "graph/places.h"

#include <torch/csrc/jit/frontend/source_range.h>

#include <memory>

namespace tsfuser {

std::vector<Frame> frames(const torch::jit::Node& node) {
  std::vector<Frame> result;
  const auto add = [&](const torch::jit::SourceRange& own) {
    const auto range = own.findSourceRangeThatGenerated().value_or(own);
    if (const auto place = range.file_line_col()) {
      const auto& source = range.source();
      const auto& [file, line, column] = *place;
      result.emplace_back(file, line, column,
                          source->get_line(source->lineno_for_offset(range.start())).str());
    }
  };
  add(node.sourceRange());
  if (const auto& calls = node.callstack()) {
    auto stack = (*calls)->vec();  // outermost first
    for (auto call = stack.rbegin(); call != stack.rend(); ++call) {
      add(std::get<1>(*call));
    }
  }
  return result;
}

void set_place(torch::jit::Node& node, const std::string& file, size_t line, const std::string& text) {
  // of a range that is all of its source, messages do not tell the file
  const auto source = std::make_shared<torch::jit::Source>(text + "\n", file, line);
  node.setSourceRange({source, 0, text.size()});
}

}  // namespace tsfuser
