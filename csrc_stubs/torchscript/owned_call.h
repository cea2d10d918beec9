// Calls of a function of ours that the calling node owns, and its copies with it.
//
//     %f : Function = prim::Constant[name="..."]();  %out = prim::CallFunction[<attribute>=...](%f, %x)
//
// What owns it is an attribute: the memory of a tensor without elements. torch can print a graph with such
// an attribute, but not one with a capsule.
#pragma once

#include <ATen/core/function.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/qualified_name.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace tsfuser {

// The name of the function that the interpreter of this thread runs; where it has none that users would
// know, `otherwise`. What is called in its place has it, so that exceptions tell of the program's functions
// only.
inline std::string running_function(const char* otherwise) {
  const auto calls = torch::jit::currentCallstack();
  const std::string name = calls.empty() ? "" : calls.back().filename;
  const bool is_plain = !name.empty() && name.find('.') == std::string::npos;
  return is_plain ? name : otherwise;
}

// Such a function: it runs some code in the frame of the interpreter that calls it.
class OwnedFunction : public torch::jit::Function {
 public:
  using Run = c10::function_ref<void(const torch::jit::Code&)>;
  OwnedFunction(const std::string& name, size_t inputs) : name_(name), inputs_(inputs) {}

  bool call(torch::jit::Stack& stack, std::optional<size_t> bail_out, Run run) override = 0;
  using Function::call;
  void run(torch::jit::Stack& stack) override {
    call(stack, std::nullopt,
         [&stack](const torch::jit::Code& code) { torch::jit::InterpreterState(code).run(stack); });
  }
  size_t num_inputs() const override { return inputs_; }
  const c10::QualifiedName& qualname() const override { return name_; }
  const c10::FunctionSchema& getSchema() const override {
    static const c10::FunctionSchema schema("owned", "", {}, {}, /*is_vararg=*/true, /*is_varret=*/true);
    return schema;
  }
  void ensure_defined() override {}
  Function& setSchema(c10::FunctionSchema) override { return *this; }

 private:
  const c10::QualifiedName name_;
  const size_t inputs_;
};

// A node that calls `function`. It stands nowhere yet.
template <class Function>
torch::jit::Node* owned_call(torch::jit::Graph& graph, std::unique_ptr<Function> function, const char* name,
                             c10::Symbol attribute, at::ArrayRef<torch::jit::Value*> operands) {
  Function* held = function.release();
  const auto owner =
      at::from_blob(held, {0}, [](void* owned) { delete static_cast<Function*>(owned); }, at::kByte);
  torch::jit::Node* constant = graph.create(c10::prim::Constant);
  constant->s_(c10::attr::name, name);
  constant->output()->setType(c10::FunctionType::create(held));
  torch::jit::Node* call = graph.create(c10::prim::CallFunction, {constant->output()}, 1);
  for (torch::jit::Value* operand : operands) {
    call->addInput(operand);
  }
  call->t_(attribute, owner);
  return call;
}

// The function that the node owns by that attribute; null for other nodes.
template <class Function>
Function* owned_by(const torch::jit::Node* node, c10::Symbol attribute) {
  const bool owns = node->kind() == c10::prim::CallFunction && node->hasAttribute(attribute);
  return owns ? static_cast<Function*>(node->t(attribute).storage().mutable_data()) : nullptr;
}

}  // namespace tsfuser
