// The graphs that a pass was given, as the graph that it made is written by: what cannot be written is the
// same object as in one of them, so its number is.
//
// Such are lines of source with their call stacks, by which errors name the program, scopes, classes of
// modules, functions that are called, and tensors that are constants. Names of values belong here as well:
// layers that are equal but for these are one graph. Example: a node of the result that
// stands for the line of the third node that was given is written as (2, -1, -1).
#pragma once

#include "graph/written_types.h"

#include <torch/csrc/jit/ir/ir.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace tsfuser {

using Graphs = std::vector<std::shared_ptr<torch::jit::Graph>>;

class Origins {
 public:
  explicit Origins(const Graphs& graphs);

  // All of these throw std::invalid_argument for what none of the graphs has.
  IValue write_place(const torch::jit::Node& node) const;
  void read_place(torch::jit::Node& node, const IValue& written) const;
  // The name of a value: that of another one, or begins with it.
  IValue write_name(const torch::jit::Value& value) const;
  void read_name(torch::jit::Value& value, const IValue& written) const;
  IValue write_type(const c10::TypePtr& type) const;
  c10::TypePtr read_type(const IValue& written) const;
  // Constants; and what a call owns (torchscript/owned_call.h).
  IValue write_tensor(const at::Tensor& tensor) const;
  const at::Tensor& read_tensor(const IValue& written) const;

  // What tells graphs apart, besides what is written: schemas of ops, the classes, the constants. Throws
  // for what could differ unseen, such as code of Python.
  IValue facts() const;

 private:
  void add(const torch::jit::Graph& graph);
  void add(const torch::jit::Block& block);
  void add(const torch::jit::Node& node);
  void add(const torch::jit::Value& value);
  void add(const c10::TypePtr& type);
  void add(const at::Tensor& tensor);

  std::vector<const torch::jit::Node*> nodes_;  // with those of blocks and subgraphs
  std::map<std::tuple<const void*, size_t, size_t>, int64_t> ranges_;
  std::unordered_map<const void*, int64_t> stacks_, scopes_, types_by_place_, tensors_by_place_;
  std::unordered_map<std::string, int64_t> numbers_of_names_;
  std::vector<std::string> names_;
  std::vector<c10::TypePtr> types_;
  std::vector<at::Tensor> tensors_;
};

}  // namespace tsfuser
