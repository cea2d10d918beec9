#include "interpreter/graph_program.h"

#include "call/arguments.h"
#include "call/counters.h"
#include "call/in_order.h"
#include "group/runnable_graph.h"
#include "interpreter/number_ops.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_copy.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/python/pybind.h>  // graphs and tensors as arguments
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/torch_dispatch_mode.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using Order = std::vector<int64_t>;  // dims, from the outermost in memory to the innermost

c10::IValue argument(PyObject* object) {
  if (THPVariable_Check(object)) {
    return THPVariable_Unpack(object);
  }
  if (PyBool_Check(object)) {
    return object == Py_True;
  }
  if (PyLong_Check(object)) {
    const long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) {
      throw py::error_already_set();
    }
    return static_cast<int64_t>(value);
  }
  if (PyFloat_Check(object)) {
    return PyFloat_AsDouble(object);
  }
  if (object == Py_None) {
    return {};
  }
  throw py::type_error(std::string("a graph takes tensors and numbers, not a ") + Py_TYPE(object)->tp_name);
}

// Another tensor in the same memory. Python's tensor keeps an object of Python, which counts as one more who
// holds it; without it, the memory is held by the stack alone once the list of arguments is empty.
at::Tensor without_object(const at::Tensor& tensor) {
  if (refuse_tensor(tensor) || tensor.requires_grad()) {
    return tensor;
  }
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(
      impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

py::object result(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)) : py::none();
  }
  if (value.isInt()) {
    return py::int_(value.toInt());
  }
  if (value.isBool()) {
    return py::bool_(value.toBool());
  }
  if (value.isDouble()) {
    return py::float_(value.toDouble());
  }
  if (value.isNone()) {
    return py::none();
  }
  throw py::type_error("a graph returns tensors and numbers, not a " + value.tagKind());
}

// Whether some tensor of `sources` may lie in the memory of one of `targets`: then their order matters.
bool share_memory(const std::vector<at::Tensor>& targets, const std::vector<at::Tensor>& sources) {
  std::vector<const void*> written;
  written.reserve(targets.size());
  for (const at::Tensor& target : targets) {
    if (!target.has_storage()) {
      return true;
    }
    written.push_back(target.storage().unsafeGetStorageImpl());
  }
  std::sort(written.begin(), written.end());
  return std::any_of(sources.begin(), sources.end(), [&](const at::Tensor& source) {
    return !source.has_storage() ||
           std::binary_search(written.begin(), written.end(), source.storage().unsafeGetStorageImpl());
  });
}

// By storage, the version counters of the tensors on the stack.
using Versions = std::vector<std::pair<const c10::StorageImpl*, c10::VariableVersion>>;

Versions versions_of(const torch::jit::Stack& stack) {
  Versions found;
  for (const c10::IValue& value : stack) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().has_storage() &&
        !value.toTensor().is_inference()) {
      const at::Tensor& tensor = value.toTensor();
      found.emplace_back(tensor.storage().unsafeGetStorageImpl(),
                         tensor.unsafeGetTensorImpl()->version_counter());
    }
  }
  return found;
}

// A view of an input shares its version, as views of autograd do: who saves it for the backward is told that
// the input has changed since.
void share_version(const at::Tensor& result, const Versions& versions) {
  if (!result.defined() || !result.has_storage() || result.is_inference()) {
    return;
  }
  for (const auto& [storage, version] : versions) {
    if (storage == result.storage().unsafeGetStorageImpl()) {
      result.unsafeGetTensorImpl()->set_version_counter(version);
      return;
    }
  }
}

class GraphProgram {
 public:
  GraphProgram(std::shared_ptr<torch::jit::Graph> graph, std::vector<at::Tensor> constants,
               std::vector<std::pair<size_t, size_t>> updates, std::vector<std::optional<size_t>> results,
               std::vector<std::optional<Order>> orders, py::object modes_may_be_hidden,
               const std::vector<size_t>& donated)
      : graph_(std::move(graph)),
        runnable_(graph_, "tsfuser_graph"),
        constants_(std::move(constants)),
        updates_(std::move(updates)),
        results_(std::move(results)),
        orders_(std::move(orders)),
        modes_may_be_hidden_(std::move(modes_may_be_hidden)) {
    const size_t inputs = graph_->inputs().size(), outputs = graph_->outputs().size();
    bool right = constants_.size() <= inputs && orders_.size() == outputs;
    donated_.resize(inputs);
    for (const size_t input : donated) {
      right = right && input + constants_.size() < inputs;
      donated_.at(input) = true;
    }
    for (const auto& [input, output] : updates_) {
      right = right && input + constants_.size() < inputs && output < outputs;
    }
    for (const auto& index : results_) {
      right = right && (!index || *index < outputs);
    }
    if (!right) {
      throw py::value_error(
          "a program's constants, updates, results, orders or donated inputs do not fit its graph");
    }
  }

  py::tuple call(const py::list& args) {
    counters().add(Count::GraphCalls);
    torch::jit::Stack stack;
    const size_t count = graph_->inputs().size() - constants_.size();
    if (args.size() != count) {
      throw py::value_error("a graph of " + std::to_string(count) + " inputs was given " +
                            std::to_string(args.size()));
    }
    stack.reserve(graph_->inputs().size() + 8);
    for (size_t i = 0; i < count; ++i) {
      c10::IValue value = argument(PyList_GET_ITEM(args.ptr(), i));
      stack.push_back(donated_[i] && value.isTensor() ? without_object(value.toTensor()) : std::move(value));
    }
    if (PyList_SetSlice(args.ptr(), 0, static_cast<Py_ssize_t>(count), nullptr) != 0) {
      throw py::error_already_set();
    }
    const bool hide =
        c10::impl::TorchDispatchModeTLS::any_modes_set() && modes_may_be_hidden_().cast<bool>();
    run(stack, hide);
    py::tuple results(results_.size());
    for (size_t i = 0; i < results_.size(); ++i) {
      results[i] = results_[i] ? result(stack[*results_[i]]) : py::none();
    }
    return results;
  }

  bool is_list_of_steps() const { return runnable_.is_list_of_steps(); }

 private:
  void run(torch::jit::Stack& stack, bool hide) {
    std::optional<torch::torch_dispatch_mode::StashTorchDispatchStackGuard> hidden;
    if (hide) {
      hidden.emplace();
    }
    const py::gil_scoped_release no_gil;
    // AOTAutograd has differentiated the graph, and sees to views and to version counters. But not for
    // forward-mode AD: the ops themselves compute tangents.
    const at::NoGradGuard no_grad;
    std::optional<at::AutoDispatchBelowADInplaceOrView> below;
    const bool moves = std::any_of(stack.begin(), stack.end(), [](const c10::IValue& value) {
      return value.isTensor() && has_tangent(value.toTensor());
    });
    if (!moves && !c10::impl::TorchDispatchModeTLS::any_modes_set()) {
      below.emplace();
    }
    const Versions versions = views_.empty() ? Versions() : versions_of(stack);
    std::vector<at::Tensor> targets;
    targets.reserve(updates_.size());
    for (const auto& update : updates_) {
      targets.push_back(stack[update.first].toTensor());
    }
    stack.insert(stack.end(), constants_.begin(), constants_.end());
    runnable_.run(stack);
    update(targets, stack);
    for (size_t i = 0; i < orders_.size(); ++i) {
      if (orders_[i] && stack[i].isTensor()) {
        const at::Tensor& tensor = stack[i].toTensor();
        at::Tensor ordered = in_order(tensor, *orders_[i]);
        if (!ordered.is_same(tensor)) {
          stack[i] = std::move(ordered);
        }
      }
    }
    for (const size_t i : views_) {
      if (stack[i].isTensor()) {
        share_version(stack[i].toTensor(), versions);
      }
    }
  }

  // Of many tensors at once, as torch does it: the parameters of an optimizer, the statistics of batch
  // norms.
  void update(std::vector<at::Tensor>& targets, const torch::jit::Stack& stack) const {
    std::vector<at::Tensor> sources;
    sources.reserve(targets.size());
    for (const auto& update : updates_) {
      sources.push_back(stack[update.second].toTensor());
    }
    if (targets.size() > 1 && !share_memory(targets, sources)) {
      return at::_foreach_copy_(targets, sources);
    }
    for (size_t i = 0; i < targets.size(); ++i) {
      targets[i].copy_(sources[i]);
    }
  }

  // Outputs that may be views: results of ops whose schemas say so.
  static std::vector<size_t> views_of(const torch::jit::Graph& graph) {
    std::vector<size_t> found;
    for (size_t i = 0; i < graph.outputs().size(); ++i) {
      const torch::jit::Node* node = graph.outputs()[i]->node();
      const auto* schema = node->maybeSchema();
      if (node->kind() == c10::prim::ListUnpack ||
          (schema && std::any_of(schema->returns().begin(), schema->returns().end(),
                                 [](const c10::Argument& a) { return a.alias_info() != nullptr; }))) {
        found.push_back(i);
      }
    }
    return found;
  }

  const std::shared_ptr<torch::jit::Graph> graph_;
  const RunnableGraph runnable_;
  const std::vector<at::Tensor> constants_;
  const std::vector<std::pair<size_t, size_t>> updates_;  // of an argument, by an output of the graph
  const std::vector<std::optional<size_t>> results_;      // outputs of the graph; none: None
  const std::vector<std::optional<Order>> orders_;        // by output of the graph
  const py::object modes_may_be_hidden_;
  std::vector<bool> donated_;  // by input: whether groups may write over it, if nobody else holds it
  const std::vector<size_t> views_ = views_of(*graph_);  // outputs that may be views
};

}  // namespace

void bind_graph_program(py::module_& m) {
  register_number_ops();
  py::register_local_exception_translator([](std::exception_ptr raised) {
    try {
      std::rethrow_exception(std::move(raised));
    } catch (const ZeroDivision& error) {
      PyErr_SetString(PyExc_ZeroDivisionError, error.what());
    }
  });
  m.def(
      "take_failed_place",
      []() -> std::optional<std::string> {
        const auto range = StepList::take_failed_place();
        if (!range) {
          return std::nullopt;
        }
        const auto [file, line, column] = *range->file_line_col();
        return c10::str("File \"", file, "\", line ", line, ": ", range->text().str());
      },
      "The line of the program in which the last program on this thread failed, once; None where it is not "
      "known.");
  py::class_<GraphProgram, std::shared_ptr<GraphProgram>>(m, "GraphProgram")
      .def(py::init<std::shared_ptr<torch::jit::Graph>, std::vector<at::Tensor>,
                    std::vector<std::pair<size_t, size_t>>, std::vector<std::optional<size_t>>,
                    std::vector<std::optional<Order>>, py::object, std::vector<size_t>>(),
           py::arg("graph"), py::arg("constants"), py::arg("updates"), py::arg("results"), py::arg("orders"),
           py::arg("modes_may_be_hidden"), py::arg("donated") = std::vector<size_t>())
      .def_property_readonly("is_list_of_steps", &GraphProgram::is_list_of_steps,
                             "Whether it runs without torch's interpreter.")
      .def("__call__", &GraphProgram::call, py::arg("args"),
           "The results for a list of tensors and numbers, which is emptied. ValueError for another number "
           "of arguments.");
}

}  // namespace tsfuser
