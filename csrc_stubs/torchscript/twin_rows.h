// The table of twins (twins.h): an op is one row.
#pragma once

#include "torchscript/nodes.h"

#include <ATen/core/interned_strings.h>
#include <ATen/core/stack.h>
#include <torch/csrc/jit/ir/ir.h>

#include <string>
#include <utility>
#include <vector>

namespace tsfuser {

// A formula of autodiff, as lines of TorchScript's IR. The forward gives %result of the op's arguments; the
// backward reads %gradient and what is saved, and gives %of_NAME for each argument NAME that has a gradient.
struct Formula {
  const char* place =
      nullptr;  // an entry of autodiff's table that is no op's; empty: its formula of the original
  std::string forward;
  std::vector<std::pair<std::string, std::string>> saved;  // type, name: of arguments or of forward's values
  std::string backward;
};

struct Twin {
  std::string schema;
  std::vector<const char*> originals;  // the ops of ATen that it stands for
  Formula formula = {};
  void (*run)(torch::jit::Stack& stack) = nullptr;  // null: the operation of the one original
  // Gives the node's readers the twin, or leaves the node; null: the twin has the operands of the original.
  void (*write)(torch::jit::Node* node, c10::Symbol twin) = nullptr;
  void (*restore)(torch::jit::Node* twin, Walk& walk) = nullptr;  // the inverse
  bool asks_readers = false;  // `write` does: the twins of readers are written before
};

const std::vector<Twin>& twin_rows();

// An op of a formula that becomes ops of ATen.
struct Helper {
  const char* kind;
  void (*restore)(torch::jit::Node* node, Walk& walk);
};

void write_chunks(torch::jit::Graph& graph);  // chunks.cpp: chunks as autodiff leaves them alone
void restore_chunks(torch::jit::Graph& graph);
void register_operators_of_chunks();

Twin twin_of_joins();  // join_twin.cpp
std::vector<Helper> helpers_of_joins();
bool is_own_copy(const torch::jit::Value* value);  // whether the twin of a copy makes it
void register_operators_of_joins();

Twin twin_of_parts();                    // part_twin.cpp
std::vector<Helper> helpers_of_parts();  // part_restore.cpp
void register_operators_of_parts();      // part_ops.cpp

Twin twin_with_operands();  // operand_twin.cpp
std::vector<Helper> helpers_with_operands();
void register_operators_with_operands();

std::vector<Helper> helpers_of_views();  // views_apart.cpp
void register_operators_of_views();

void slice_or_whole(torch::jit::Stack& stack);                               // whole_parts.cpp
at::Tensor padded_or_same(const at::Tensor& self, at::IntArrayRef amounts);  // the operand where it may be

// Has a node of that kind and these operands, before `node`, take its place in a walk over the graph.
void put(torch::jit::Node* node, Walk& walk, c10::Symbol kind, at::ArrayRef<torch::jit::Value*> operands);

// Whether the list, which the graph makes, is as it was made wherever it is read.
bool is_left_as_made(const torch::jit::Value* list);

// Whether nothing writes to the value, or to a view of it, and the graph does not return it.
bool is_never_written(const torch::jit::Value* value);

// Whether nothing in the graph may give the value, or a view of it, other sizes.
bool keeps_its_sizes(const torch::jit::Value* value);

// Whether an op of the graph has made the tensor, or what it is a view of, and nothing writes to that: what
// is read of it later is what is read of it now.
bool is_own_and_stays(const torch::jit::Value* value);

}  // namespace tsfuser
