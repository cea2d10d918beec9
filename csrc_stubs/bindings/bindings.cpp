// tsfuser._C: what Python sees of this extension.

#include "bindings/interface.h"
#include "call/counters.h"
#include "group/failures.h"
#include "group/group.h"
#include "group/interrupts.h"
#include "group/observe.h"
#include "group/python.h"
#include "interpreter/graph_program.h"
#include "torchscript/hooks.h"
#include "torchscript/optimised.h"
#include "torchscript/prepare.h"
#include "torchscript/settled_branches.h"
#include "torchscript/unfused_functions.h"

#include <pybind11/stl.h>
#include <c10/util/Float8_e4m3fn.h>
#include <torch/csrc/utils/pybind.h>  // tensors as arguments
#include <torch/version.h>

#include <pthread.h>

#include <tuple>

namespace tsfuser {
namespace {

SlotKind slot_kind(const std::string& name) {
  static const std::map<std::string, SlotKind> kinds = {
      {"input", SlotKind::Input},
      {"update", SlotKind::Update},
      {"allocation", SlotKind::Allocation},
      {"cleared", SlotKind::Cleared},
      {"int32", SlotKind::Int32},
      {"int64", SlotKind::Int64},
      {"bool", SlotKind::NumberBool},
      {"int32_number", SlotKind::NumberInt32},
      {"int64_number", SlotKind::NumberInt64},
      {"float32", SlotKind::NumberFloat32},
      {"float64", SlotKind::NumberFloat64},
      {"complex64", SlotKind::NumberComplex64},
      {"complex128", SlotKind::NumberComplex128},
      {"element", SlotKind::Element},
      {"random", SlotKind::Random},
      {"seeded", SlotKind::Seeded},
      {"flag", SlotKind::Flag},
  };
  const auto found = kinds.find(name);
  if (found == kinds.end()) {
    throw py::value_error("tsfuser plan: no kernel argument is of kind " + name);
  }
  return found->second;
}

ResultKind result_kind(const std::string& name) {
  static const std::map<std::string, ResultKind> kinds = {{"allocation", ResultKind::Allocation},
                                                          {"input", ResultKind::Input},
                                                          {"integer", ResultKind::Integer},
                                                          {"undefined", ResultKind::Undefined}};
  const auto found = kinds.find(name);
  if (found == kinds.end()) {
    throw py::value_error("tsfuser plan: no result is of kind " + name);
  }
  return found->second;
}

std::shared_ptr<Launch> make_launch(const std::string& kind, uintptr_t function, std::string name,
                                    int32_t grid, int32_t block_x, int32_t block_y, int32_t shared,
                                    int32_t grain, size_t args_bytes,
                                    const std::vector<std::tuple<int32_t, std::string, int32_t>>& args,
                                    int32_t cluster, int32_t batch_capacity) {
  if ((kind != "cuda" && kind != "overlapped" && kind != "host") || !function) {
    throw py::value_error("tsfuser plan: a launch is of kind cuda, overlapped or host and has a function");
  }
  auto launch = std::make_shared<Launch>();
  launch->cuda = kind != "host";
  launch->overlaps = kind == "overlapped";
  launch->function = reinterpret_cast<void*>(function);
  launch->name = std::move(name);
  launch->grid = grid;
  launch->block_x = block_x;
  launch->block_y = block_y;
  launch->shared = shared;
  launch->grain = grain;
  launch->args_bytes = args_bytes;
  launch->cluster = cluster;
  launch->batch_capacity = batch_capacity;
  for (const auto& [offset, slot_name, index] : args) {
    const SlotKind slot = slot_kind(slot_name);
    const bool integer = slot == SlotKind::Int32 || slot == SlotKind::Int64;
    launch->updates |= slot == SlotKind::Update;
    if (slot == SlotKind::Cleared) {
      launch->cleared = index;
    }
    (integer ? launch->integers : launch->slots).push_back({offset, index, slot});
  }
  return launch;
}

Program make_program(int32_t leaf_count,
                     const std::vector<std::tuple<std::string, int64_t, int64_t>>& instructions,
                     const std::vector<std::tuple<int32_t, int32_t, int64_t>>& checks) {
  Program program;
  program.leaf_count = leaf_count;
  for (const auto& [name, a, b] : instructions) {
    const auto op = size_op(name);
    if (!op) {
      throw py::value_error("tsfuser plan: no size operation is called " + name);
    }
    program.instructions.push_back({*op, static_cast<int32_t>(b), a});
  }
  for (const auto& [after, index, expected] : checks) {
    program.checks.push_back({after, index, expected});
  }
  return program;
}

using LimitTuple = std::tuple<int32_t, std::pair<int64_t, int64_t>, std::pair<double, double>, bool, bool>;
using ReuseTuple = std::tuple<int32_t, int32_t, std::vector<std::tuple<int32_t, int32_t, int32_t>>>;
using AllocationTuple = std::tuple<std::string, std::vector<int32_t>, std::vector<int32_t>>;
using RoomTuple = std::tuple<size_t, int32_t, int64_t>;

std::shared_ptr<Plan> make_plan(int32_t leaf_count,
                                const std::vector<std::tuple<std::string, int64_t, int64_t>>& instructions,
                                const std::vector<std::tuple<int32_t, int32_t, int64_t>>& checks,
                                const std::vector<AllocationTuple>& allocations,
                                const std::vector<std::shared_ptr<Launch>>& launches,
                                const std::vector<std::pair<std::string, int32_t>>& results,
                                std::string refusal, py::object keepalive, int32_t random,
                                const std::vector<std::pair<int32_t, bool>>& updates, int32_t drawn,
                                const std::vector<LimitTuple>& limits, const std::vector<ReuseTuple>& reuses,
                                const std::vector<RoomTuple>& rooms) {
  auto plan = std::make_shared<Plan>();
  plan->program = make_program(leaf_count, instructions, checks);
  for (const auto& [name, sizes, strides] : allocations) {
    const auto dtype = dtype_from_name(name);
    if (!dtype) {
      throw py::value_error("tsfuser plan: no dtype is called " + name);
    }
    plan->allocations.push_back({*dtype, sizes, strides});
  }
  plan->launches.assign(launches.begin(), launches.end());
  for (const auto& [kind, index] : results) {
    plan->results.push_back({result_kind(kind), index});
  }
  for (const auto& [index, counted] : updates) {
    plan->updates.push_back({index, counted});
  }
  for (const auto& [index, whole, real, nan, infinite] : limits) {
    plan->limits.push_back({index, whole.first, whole.second, real.first, real.second, nan, infinite});
  }
  for (const auto& [allocation, input, alike] : reuses) {
    plan->reuses.push_back({allocation, input, {}});
    for (const auto& [extent, allocation_stride, input_stride] : alike) {
      plan->reuses.back().alike.push_back({extent, allocation_stride, input_stride});
    }
  }
  for (const auto& [allocation, elements, dim] : rooms) {
    if (allocation >= plan->allocations.size()) {
      throw py::value_error("tsfuser plan: what has room is not among the allocations");
    }
    plan->allocations[allocation].elements = elements;
    plan->allocations[allocation].room_dim = dim;
  }
  plan->random = random;
  plan->drawn = drawn;
  plan->refusal = std::move(refusal);
  plan->verify();
  if (!keepalive.is_none()) {
    plan->keepalive = {keepalive.release().ptr(), release_later};
  }
  return plan;
}

std::vector<at::Tensor> run_plan(const std::shared_ptr<Plan>& plan, const std::vector<at::Tensor>& tensors) {
  torch::jit::Stack stack(tensors.begin(), tensors.end());
  Arguments arguments;
  std::vector<int64_t> values;
  const char* refusal = gather(stack, arguments);
  refusal = refusal ? refusal : plan->mismatch(stack);
  if (refusal || !plan->refusal.empty() || !evaluate(plan->program, arguments.leaves, values)) {
    throw py::value_error(refusal ? refusal : "the plan does not serve these tensors");
  }
  run(*prepare(plan, arguments, std::move(values)), arguments, stack, tensors.size());
  std::vector<at::Tensor> results;
  for (const c10::IValue& result : stack) {
    results.push_back(result.toTensor());
  }
  return results;
}

py::dict stats() {
  release_now();
  py::dict result, fallbacks;
  const Counters& c = counters();
  result["groups"] = group_count();
  result["plans_built"] = c.total(Count::PlansBuilt);
  result["exact_hits"] = c.total(Count::ExactHits);
  result["class_hits"] = c.total(Count::ClassHits);
  result["launches"] = c.total(Count::Launches);
  result["graph_calls"] = c.total(Count::GraphCalls);
  result["python_calls"] = c.total(Count::PythonCalls);
  for (const auto& [reason, count] : counters().fallbacks()) {
    fallbacks[py::str(reason)] = count;
  }
  result["fallbacks"] = fallbacks;
  return result;
}

std::pair<size_t, size_t> set_plan_limits(size_t process, size_t group) {
  return {plan_limits().process.exchange(process), plan_limits().group.exchange(group)};
}

void reset() {
  {
    const py::gil_scoped_release released;
    reset_groups();
    counters().clear();
  }
  release_now();
}

py::list plans_of(int64_t id) {
  py::list result;
  for (const auto& plan : known_group(id).plans()) {
    auto* keepalive = static_cast<PyObject*>(plan->keepalive.get());
    result.append(py::make_tuple(plan->refusal.empty() ? plan->failure() : plan->refusal,
                                 keepalive ? py::reinterpret_borrow<py::object>(keepalive) : py::none()));
  }
  return result;
}

void after_fork() {
  forget_other_threads();
  interrupts_after_fork();
  groups_after_fork();
  SettledBranches::after_fork();
}

void bind_plan(py::module_& m) {
  py::class_<Launch, std::shared_ptr<Launch>>(m, "Launch")
      .def(py::init(&make_launch), py::arg("kind"), py::arg("function"), py::arg("name"), py::arg("grid"),
           py::arg("block_x"), py::arg("block_y"), py::arg("shared"), py::arg("grain"),
           py::arg("args_bytes"), py::arg("args"), py::arg("cluster") = -1, py::arg("batch_capacity") = 0)
      .def_readonly("name", &Launch::name);
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def(py::init(&make_plan), py::arg("leaf_count"), py::arg("instructions"), py::arg("checks"),
           py::arg("allocations"), py::arg("launches"), py::arg("results"), py::arg("refusal") = "",
           py::arg("keepalive") = py::none(), py::arg("random") = 0,
           py::arg("updates") = std::vector<std::pair<int32_t, bool>>(), py::arg("drawn") = -1,
           py::arg("limits") = std::vector<LimitTuple>(), py::arg("reuses") = std::vector<ReuseTuple>(),
           py::arg("rooms") = std::vector<RoomTuple>())
      .def_readonly("refusal", &Plan::refusal)
      .def(
          "evaluate",
          [](const Plan& plan, const std::vector<int64_t>& leaves) -> std::optional<std::vector<int64_t>> {
            std::vector<int64_t> values;
            return evaluate(plan.program, leaves, values) ? std::make_optional(values) : std::nullopt;
          },
          "The values array for a leaf vector, or None if a check does not hold.")
      .def("run", &run_plan, py::arg("tensors"),
           "The results of a call outside of any group. `tensors` have the dtypes and devices that the plan "
           "was made for; ValueError where it does not serve their sizes.");
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "tsfuser's native side: pass hook, guard, group lookup, launch";
  m.attr("built_for") = TORCH_VERSION;
  m.attr("interface") = interface_digest();
  remember_main_thread(
      py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>());
  hook_into_torch();
  static const int watched = pthread_atfork(nullptr, nullptr, after_fork);  // once a process
  static_cast<void>(watched);
  m.attr("most_dead_inputs") = most_dead_inputs;
  m.attr("batched_mark") = batched_mark;
  bind_plan(m);
  bind_graphs(m);
  bind_nodes(m);
  bind_optimised(m);
  bind_unfused_functions(m);
  bind_graph_program(m);
  m.def("set_enabled", [](bool on) { pass_enabled = on; });
  m.def("enabled", [] { return pass_enabled.load(); });
  m.def("set_pass", [](py::object fn) { return pass_callback().set(std::move(fn)); });
  m.def("set_first_graph", [](py::object fn) { return first_graph_callback().set(std::move(fn)); });
  m.def("set_guard_mode", [](bool on) { guard_mode = on; });
  m.def("guard_mode", [] { return guard_mode.load(); });
  m.def("group_text", [](int64_t id) { return known_group(id).text; });
  m.def("group_plans", &plans_of, "(why not fused or '', keepalive) of each plan of a group.");
  m.attr("e4m3fn_of_1000") = static_cast<int>(c10::Float8_e4m3fn(1000.0f).x);  // as bits
  m.def("set_dtypes", &set_dtypes, "The dtypes that kernels know: name -> number of its c10::ScalarType.");
  m.def("set_planner", [](py::object fn) { return planner_callback().set(std::move(fn)); });
  m.def("set_differentiable", [](py::object fn) { return differentiable_callback().set(std::move(fn)); });
  m.def("set_caller", [](py::object fn) { return caller_callback().set(std::move(fn)); });
  m.def("set_joint", [](py::object fn) { return joint_callback().set(std::move(fn)); });
  m.def("set_partial", [](py::object fn) { return partial_callback().set(std::move(fn)); });
  m.def("set_regions", [](py::object fn) { return regions_callback().set(std::move(fn)); });
  m.def("set_failure_reporter", [](py::object fn) { return failure_callback().set(std::move(fn)); });
  m.def("preparing_steps", &preparing_steps, "The names of the steps before torch profiles a graph.");
  m.def("fail_pass", &fail_pass,
        "For tests: the pass of that name raises at its end, none where it is empty. Returns the name "
        "before.");
  m.def("set_reporter", [](py::object fn) { return reporter_callback().set(std::move(fn)); });
  m.def("set_observer", &set_observer, py::arg("function"), py::arg("unfused") = false,
        py::arg("timed") = false,
        "function(group id, why it ran unfused or '', arguments, results, unfused results, launches) is "
        "called after each run of a group; a launch is (kernel, seconds, bytes, grid, block x, block y, "
        "shared bytes).");
  m.def("set_fallback_enabled", [](bool on) { fallback_enabled = on; });
  m.def("interrupted", &interrupted, "Whether Ctrl-C asks this thread to stop planning.");
  m.def("set_plan_limits", &set_plan_limits, py::arg("process"), py::arg("group"),
        "How many plans the groups of the process keep together, and one of them at most. Returns what it "
        "was.");
  m.def("stats", &stats);
  m.def(
      "direct_calls", [] { return counters().total(Count::DirectCalls); },
      "How many differentiable graphs ran directly, without torch's executors.");
  m.def("reset", &reset);
  py::module_::import("atexit").attr("register")(py::cpp_function(&close_python));
}

}  // namespace tsfuser
