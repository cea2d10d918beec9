// The calls from a group into Python: to make a plan, and to report a failure.

#include "group/group.h"
#include "group/interrupts.h"
#include "group/python.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

namespace tsfuser {
namespace {

py::tuple integers(at::IntArrayRef values) {
  py::tuple result(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    result[i] = py::int_(values[i]);
  }
  return result;
}

py::tuple describe_list(const c10::IValue& value) {
  const auto items = value.toListRef();
  const bool ints = value.isIntList();
  py::tuple values(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    values[i] = ints ? py::object(py::int_(items[i].toInt())) : py::object(py::bool_(items[i].toBool()));
  }
  return py::make_tuple("list", ints ? "int" : "bool", values);
}

// One argument as tsfuser.ir.call knows it; `gather` has refused what has no description.
py::tuple describe(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& t = value.toTensor();
    return py::make_tuple("tensor", dtype_name(t.scalar_type()), t.device().str(), integers(t.sizes()),
                          integers(t.strides()), alignment_of(t.const_data_ptr()));
  }
  if (value.isInt()) {
    return py::make_tuple("scalar", "int", value.toInt());
  }
  if (value.isBool()) {
    return py::make_tuple("scalar", "bool", value.toBool());
  }
  if (value.isDouble() || value.isComplexDouble()) {
    return py::make_tuple("scalar", value.isDouble() ? "float" : "complex", py::none());
  }
  if (value.isList()) {
    return describe_list(value);
  }
  return py::make_tuple(
      "other", value.isString() ? py::object(py::str(value.toStringRef())) : py::object(py::none()));
}

// A refusal is its sentence; any other exception is named.
std::string reason_of(py::error_already_set& error) {
  std::string name = "exception", text;
  try {
    name = py::str(error.type().attr("__name__"));
    text = py::str(error.value());
  } catch (py::error_already_set&) {
    text = "(its text cannot be had)";
  }
  return name == "Refusal" ? text : "the planner failed: " + name + (text.empty() ? "" : ": " + text);
}

std::shared_ptr<const Plan> ask(const py::object& planner, int64_t group, at::ArrayRef<c10::IValue> inputs,
                                bool varies) {
  HeldInterrupts held;
  try {
    release_now();
    py::tuple args(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      args[i] = describe(inputs[i]);
    }
    const py::object plan = planner(group, args, varies);
    if (plan.is_none()) {
      throw PlannerPending("its kernels are being compiled in the background");
    }
    return plan.cast<std::shared_ptr<Plan>>();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) {  // Interrupted, SystemExit
      held.keep(error);
      throw PlannerInterrupted("planning was interrupted");
    }
    throw PlannerError(reason_of(error));
  } catch (const py::cast_error&) {
    throw PlannerError("the planner returned something else than a plan");
  }
}

}  // namespace

// Leaked, as pass_callback is: they may be called as long as any thread runs.
Callback& planner_callback() {
  static Callback* c = new Callback;
  return *c;
}

Callback& reporter_callback() {
  static Callback* c = new Callback;
  return *c;
}

std::shared_ptr<const Plan> plan_in_python(int64_t group, at::ArrayRef<c10::IValue> inputs, bool varies) {
  const PythonCall python;
  if (!python) {
    throw PlannerAbsent("the Python interpreter is shutting down");
  }
  const py::object planner = planner_callback().get();
  if (!planner) {
    throw PlannerAbsent("no planner is set");
  }
  return ask(planner, group, inputs, varies);
}

void report_in_python(const char* kind, int64_t group, const std::string& reason) {
  const PythonCall python;
  if (!python) {
    return;
  }
  const py::object reporter = reporter_callback().get();
  if (!reporter) {
    return;
  }
  HeldInterrupts held;
  try {
    reporter(kind, group, reason);
  } catch (py::error_already_set& error) {
    dispose(error, held, "tsfuser reporter");
  }
}

}  // namespace tsfuser
