#include "group/observe.h"

#include "call/timing.h"
#include "group/group.h"
#include "group/interrupts.h"

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tsfuser {

std::atomic<bool> observing{false};

namespace {

using Values = std::vector<c10::IValue>;

std::atomic<bool> wants_unfused{false}, wants_times{false};
thread_local bool inside = false;  // what the observer itself runs is not observed

Callback& observer() {
  static Callback* c = new Callback;  // leaked, like the other callbacks
  return *c;
}

// Dense copies of the tensors that a group may write to.
Values copies(at::ArrayRef<c10::IValue> values) {
  const c10::impl::ExcludeDispatchKeyGuard no_gradients(c10::autograd_dispatch_keyset);
  Values result(values.begin(), values.end());
  for (c10::IValue& value : result) {
    if (value.isTensor() && value.toTensor().defined()) {
      value = value.toTensor().clone();
    }
  }
  return result;
}

// torch's default generators of the CPU and of the arguments' device, with their states.
class Generators {
 public:
  explicit Generators(at::ArrayRef<c10::IValue> inputs) {
    add(c10::Device(c10::kCPU));
    for (const c10::IValue& value : inputs) {
      if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) {
        add(value.toTensor().device());
        break;
      }
    }
  }
  std::vector<at::Tensor> states() const {
    std::vector<at::Tensor> result;
    for (at::Generator generator : generators_) {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      result.push_back(generator.get_state());
    }
    return result;
  }
  void set(const std::vector<at::Tensor>& states) const {
    for (size_t i = 0; i < states.size(); ++i) {
      at::Generator generator = generators_[i];
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(states[i]);
    }
  }

 private:
  void add(c10::Device device) { generators_.push_back(at::globalContext().defaultGenerator(device)); }
  std::vector<at::Generator> generators_;
};

struct Inside {
  std::vector<Timing>* const before;
  explicit Inside(std::vector<Timing>* wanted) : before(std::exchange(timings, wanted)) { inside = true; }
  ~Inside() {
    timings = before;
    inside = false;
  }
};

py::tuple to_python(const Values& values) {
  py::tuple result(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    result[i] = torch::jit::toPyObject(values[i]);
  }
  return result;
}

py::list to_python(const std::vector<Timing>& list) {
  py::list result;
  for (const Timing& t : list) {
    result.append(py::make_tuple(t.kernel, t.seconds, t.bytes, t.grid, t.block_x, t.block_y, t.shared));
  }
  return result;
}

// What the observer raises goes to who called the group.
void tell(const Group& group, const std::string& reason, const Values& inputs, const Values& outputs,
          const Values& unfused, const std::vector<Timing>& times) {
  const PythonCall python;
  if (!python) {
    return;
  }
  const py::object function = observer().get();
  if (!function) {
    return;
  }
  std::string failure;
  std::optional<HeldInterrupts> held;  // of a failure only: the callback is the user's, and stops at Ctrl-C
  try {
    function(group.id, reason, to_python(inputs), to_python(outputs), to_python(unfused), to_python(times));
    return;
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) {
      return held.emplace().keep(error);
    }
    failure = error.what();
  }
  TORCH_CHECK(false, "the callback that looks at fused groups raised ", failure);
}

}  // namespace

bool being_captured(at::ArrayRef<c10::IValue> inputs) {
  for (const c10::IValue& value : inputs) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) {
      const c10::Device device = value.toTensor().device();
      void* stream = c10::impl::getDeviceGuardImpl(device.type())->getStream(device).native_handle();
      return captures(stream, device.index());
    }
  }
  return false;
}

void set_observer(py::object function, bool unfused, bool timed) {
  wants_unfused = unfused;
  wants_times = timed;
  observing = !function.is_none();
  observer().set(std::move(function));
}

void run_observed(Group& group, torch::jit::Stack& stack, size_t input_count) {
  const auto arguments = torch::jit::last(stack, input_count);
  if (inside || being_captured(arguments)) {
    group.run_unobserved(stack, input_count);
    return;
  }
  std::vector<Timing> times;
  const Inside mark(wants_times ? &times : nullptr);
  const bool compare = wants_unfused;
  Values inputs(arguments.begin(), arguments.end()), unfused;
  std::vector<at::Tensor> states;
  const Generators generators(inputs);
  if (compare) {
    inputs = copies(inputs);  // as they are before the run
    states = generators.states();
  }
  const size_t below = stack.size() - input_count;
  const std::string reason = group.run_unobserved(stack, input_count);
  const Values outputs(stack.begin() + static_cast<std::ptrdiff_t>(below), stack.end());
  if (compare && reason.empty()) {
    const std::vector<at::Tensor> after = generators.states();
    generators.set(states);
    unfused = copies(inputs);
    group.interpret(unfused);
    generators.set(after);
  }
  tell(group, reason, inputs, outputs, unfused, times);
}

}  // namespace tsfuser
