// Typed graphs as bytes. torch's own text of a graph cannot be read back where a node has a subgraph (each
// group) or no result (each write in place).
//
// In: a graph. Out: bytes from which another process makes the same graph: nodes with attributes, blocks and
// subgraphs, types, names, the lines of source that they stand for, and the groups' texts, by which that
// process numbers its groups. Call stacks and scopes are left out. Example:
//
//   const std::string bytes = write_graph(graph);
//   const auto same = read_graph(bytes);
//
// The bytes are a zip file of IValues, as `torch.save` writes them, and are no safer than any other pickle
// of torch: who reads them has to know who has written them.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace torch::jit {
struct Graph;
}

namespace tsfuser {

// Throws where the graph holds something that would not come back as it was.
std::string write_graph(const std::shared_ptr<torch::jit::Graph>& graph);
// Throws where the bytes are not those of a graph.
std::shared_ptr<torch::jit::Graph> read_graph(const std::string& bytes);

// The same for what a pass makes of graphs: what is an object of this process, as a line of source, is
// written as that of a node of theirs (origins.h). The bytes are a pickle without tensors.
using Graphs = std::vector<std::shared_ptr<torch::jit::Graph>>;

// All that tells the graphs from others, but for the contents of source files. Throws where that cannot be
// written.
std::string graphs_text(const Graphs& graphs);
// Throws where `made` would not come back, or holds an object of its own.
std::string write_made(const Graphs& made, const Graphs& origins);
// `origins` have the text of those that `bytes` were written with.
Graphs read_made(const std::string& bytes, const Graphs& origins);

}  // namespace tsfuser
