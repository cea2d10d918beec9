#include "group/group.h"

#include "call/counters.h"
#include "group/guard_widening.h"
#include "group/observe.h"
#include "group/python.h"
#include "group/resolved.h"
#include "group/waiting.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/shape_analysis.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>

namespace tsfuser {
namespace {

// Set while this thread is inside the planner, which may itself run scripted functions.
thread_local bool planning = false;

// Where an observed run leaves why it went unfused; null for others.
thread_local std::string* why_unfused = nullptr;

// What is known of the call that this thread makes; steady calls reuse its buffers.
Arguments& this_call() {
  static thread_local Arguments arguments;
  return arguments;
}

struct Planning {
  const bool before = std::exchange(planning, true);
  ~Planning() { planning = before; }
};

// Python may run scripted functions, with guards of their own.
struct KeepAdmission {
  const Admission before = last_admission();
  ~KeepAdmission() { last_admission() = before; }
};

std::shared_ptr<const Plan> refused(const Arguments& arguments, std::string reason) {
  auto plan = std::make_shared<Plan>();
  plan->program.leaf_count = static_cast<int32_t>(arguments.leaves.size());
  plan->refusal = std::move(reason);
  return plan;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

std::atomic<bool> fallback_enabled{true};

Group::Group(int64_t id, std::shared_ptr<torch::jit::Graph> graph, std::string text)
    : id(id), text(std::move(text)), graph(std::move(graph)) {}

void Group::run(torch::jit::Stack& stack, size_t input_count, CallKey guard, DeadInputs dead) {
  if (C10_UNLIKELY(observing.load(std::memory_order_relaxed))) {
    return run_observed(*this, stack, input_count);
  }
  run_now(stack, input_count, guard, dead);
}

void Group::run_in_batch(torch::jit::Stack& stack, size_t input_count, bool last) {
  Waiting& waiting = Waiting::mine();
  bool waits = !planning && !observing.load(std::memory_order_relaxed);
  try {
    waits = waits && waiting.add(*this, stack, input_count);
  } catch (...) {
    waiting.launch();  // nobody else of this batch comes
    throw;
  }
  if (!waits) {
    waiting.launch();
    return run(stack, input_count);
  }
  if (last) {
    waiting.launch();
  }
}

bool Group::run_remembered(CallKey guard, torch::jit::Stack& stack, size_t input_count) {
  if (C10_UNLIKELY(planning || observing.load(std::memory_order_relaxed))) {
    return false;
  }
  Arguments& arguments = this_call();
  if (gather(torch::jit::last(stack, input_count), arguments)) {
    return false;
  }
  const PreparedCall* call = ExactTable::mine().find(guard, arguments);
  if (!call) {
    return false;
  }
  counters().add(Count::ExactHits);
  run_prepared(*call, arguments, stack, input_count);
  return true;
}

std::string Group::run_unobserved(torch::jit::Stack& stack, size_t input_count) {
  struct Notes {
    std::string reason;
    std::string* const before = std::exchange(why_unfused, &reason);
    ~Notes() { why_unfused = before; }
  } notes;
  run_now(stack, input_count);
  return notes.reason;
}

void Group::run_now(torch::jit::Stack& stack, size_t input_count, CallKey guard, DeadInputs dead) {
  if (planning) {
    return run_unfused(stack, "called while a plan is being made on this thread");
  }
  Arguments& arguments = this_call();
  at::ArrayRef<c10::IValue> inputs = torch::jit::last(stack, input_count);
  const char* reason = gather(inputs, arguments);
  torch::jit::Stack resolved;
  if (C10_UNLIKELY(reason && is_lazy(reason))) {
    reason = gather_resolved(inputs, arguments, resolved);
    inputs = resolved;
    guard = 0;  // it has not seen the copies
  }
  if (reason) {
    return run_unfused(stack, reason, "input");
  }
  ExactTable& exact = ExactTable::mine();
  const uint64_t epoch = ExactTable::epoch();
  const PreparedCall* call = exact.find(key_, arguments);
  if (call) {
    counters().add(Count::ExactHits, call->plan->refusal.empty());
  } else {
    Call found = find_class(arguments);
    if (!found) {
      Miss miss = plan_anew(arguments, inputs);
      if (miss.kind && send_back(stack, miss.reason)) {
        return;
      }
      if (miss.asks_again) {
        return run_this_time(stack, miss.reason);
      }
      if (!miss.call) {
        return run_unfused(stack, miss.reason, miss.kind);
      }
      miss.call->plan->unreported = miss.kind;
      found = std::move(miss.call);
    }
    call = exact.insert(key_, epoch, std::move(found));
  }
  if (guard && call->plan->refusal.empty()) {
    call = exact.insert(guard, epoch, call->shared_from_this());
  }
  run_prepared(*call, arguments, stack, input_count, dead, std::move(resolved));
}

const PreparedCall* Group::ready_call(const Arguments& arguments, at::ArrayRef<c10::IValue> inputs) {
  const PreparedCall* call = ExactTable::mine().find(key_, arguments);
  if (!call || !call->plan->refusal.empty() || call->plan->failed() || !call->plan->admits(inputs) ||
      call->plan->conflict(arguments, inputs)) {
    return nullptr;
  }
  plans_.use(*call->plan);
  return call;
}

void Group::run_after_failure(const std::shared_ptr<const Plan>& plan, const std::string& reason,
                              torch::jit::Stack& stack) {
  plan->mark_failed(reason);
  run_refused(plan, stack);
}

Group::Call Group::find_class(const Arguments& arguments) {
  static thread_local std::vector<int64_t> values;
  std::shared_ptr<const Plan> found = plans_.find(arguments, values);
  if (!found) {
    return nullptr;
  }
  counters().add(Count::ClassHits, found->refusal.empty());
  return prepare(std::move(found), arguments, values);
}

Group::Miss Group::plan_anew(const Arguments& arguments, at::ArrayRef<c10::IValue> inputs) {
  const KeepAdmission of_this_call;
  // Whoever waits for `planning_` has let go of the GIL, so its holder may wait for the GIL.
  const WithoutGil no_gil;
  const std::lock_guard<std::mutex> lock(planning_);
  if (Call call = find_class(arguments)) {  // planned while we waited
    return {std::move(call), nullptr, {}};
  }
  const auto room = plans_.make_room(group_count());
  if (!room) {
    return {nullptr, "limit", "more classes of calls than a group keeps plans for"};
  }
  const char* kind = nullptr;
  std::string reason;
  std::shared_ptr<const Plan> plan;
  try {
    const Planning mark;
    const DuringCapture unsafe_calls_allowed(arguments.device.is_cuda());
    plan = plan_in_python(id, inputs, plans_.has_structure(arguments));
    const char* mismatch = plan->mismatch(inputs);
    std::vector<int64_t> values;
    if (!mismatch && !evaluate(plan->program, arguments.leaves, values)) {
      mismatch = "its checks do not hold for the call that it was made for";
    }
    if (mismatch) {
      throw PlannerError(std::string("the plan is wrong: ") + mismatch);
    }
    if (!plan->refusal.empty()) {
      kind = "refusal";
      reason = plan->refusal;
    }
  } catch (const PlannerInterrupted& interrupted) {
    return {nullptr, nullptr, interrupted.what(), true};
  } catch (const PlannerPending& pending) {
    counters().add_fallback(pending.what());
    return {nullptr, nullptr, pending.what(), true};
  } catch (const PlannerAbsent& absent) {
    return {nullptr, nullptr, absent.what()};
  } catch (const PlannerError& error) {
    kind = "planner";
    reason = error.what();
    plan = refused(arguments, reason);
  }
  plans_.add(*room, arguments, plan);
  counters().add(Count::PlansBuilt, plan->refusal.empty());
  std::vector<int64_t> values;
  evaluate(plan->program, arguments.leaves, values);
  return {prepare(std::move(plan), arguments, std::move(values)), kind, std::move(reason)};
}

namespace {

// As nvFuser did, profilers show each run as run_fused_kernel; inside, it has its first kernel's name and,
// where they ask for them, the shapes of its inputs.
size_t run_recorded(const PreparedCall& call, const Arguments& arguments, torch::jit::Stack& stack,
                    size_t input_count, DeadInputs dead) {
  RECORD_FUNCTION("run_fused_kernel", c10::ArrayRef<const c10::IValue>());
  const auto run_named = [&](const char* name) {
    const auto inputs = torch::jit::last(stack, input_count);
    RECORD_FUNCTION(name, c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
    return tsfuser::run(call, arguments, stack, input_count, dead);
  };
  const auto& launches = call.plan->launches;
  return run_named(launches.empty() ? "nothing to compute" : launches.front()->name.c_str());
}

}  // namespace

void Group::run_prepared(const PreparedCall& call, const Arguments& arguments, torch::jit::Stack& stack,
                         size_t input_count, DeadInputs dead, torch::jit::Stack resolved) {
  const Plan& plan = *call.plan;
  plans_.use(plan);
  if (!plan.refusal.empty() && send_back(stack, plan.refusal)) {
    return;
  }
  if (!plan.refusal.empty() || plan.failed()) {
    return run_refused(call.plan, stack);
  }
  const auto given = torch::jit::last(stack, input_count);
  const at::ArrayRef<c10::IValue> inputs = resolved.empty() ? given : resolved;
  if (C10_UNLIKELY(!plan.admits(inputs))) {
    return run_beyond_limits(stack);
  }
  if (const char* reason = plan.conflict(arguments, inputs)) {
    return run_unfused(stack, reason);
  }
  if (C10_UNLIKELY(!resolved.empty())) {
    if (const char* reason = refuse_copies(plan, given)) {
      return run_unfused(stack, reason, "input");
    }
    std::move(resolved.begin(), resolved.end(), stack.end() - static_cast<std::ptrdiff_t>(input_count));
  }
  const char* kind = "memory";
  std::string reason = "not enough memory for the outputs of a fused group", detail;
  try {
    const size_t launches = run_recorded(call, arguments, stack, input_count, dead);
    counters().add(Count::Launches, static_cast<int64_t>(launches));
    return;
  } catch (const LaunchError& error) {
    return run_after_failure(call.plan, error.what(), stack);
  } catch (const OperandLost& error) {
    plan.mark_failed(error.what());
    throw;
  } catch (const OutOfRange&) {
    return interpret(stack);  // the ops find it, too, and raise what they raise: no failure of ours
  } catch (const RandomError& error) {
    kind = nullptr;  // as it should be, and over when the capture is: nothing to warn about
    reason = error.what();
  } catch (const c10::Error& error) {
    detail = ": " + first_line(error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
  }
  run_unfused(stack, reason, kind, detail);
}

namespace {

bool& eager_errors() {
  static thread_local bool wanted = false;
  return wanted;
}

std::shared_ptr<torch::jit::Graph> without_shapes(torch::jit::Graph& graph) {
  auto copy = graph.copy();
  torch::jit::EraseShapeInformation(copy);
  return copy;
}

}  // namespace

EagerErrors::EagerErrors() : before_(std::exchange(eager_errors(), true)) {}
EagerErrors::~EagerErrors() { eager_errors() = before_; }
bool EagerErrors::wanted() { return eager_errors(); }

const torch::jit::Code& Group::unfused_code() {
  const std::lock_guard<std::mutex> lock(code_mutex_);
  if (!code_) {
    code_ = std::make_shared<torch::jit::Code>(without_shapes(*graph), "tsfuser_unfused");
  }
  return *code_;
}

const RunnableGraph& Group::unfused_steps() {
  const std::lock_guard<std::mutex> lock(code_mutex_);
  if (!steps_) {
    steps_ = std::make_unique<RunnableGraph>(without_shapes(*graph), "tsfuser_unfused");
  }
  return *steps_;
}

bool Group::send_back(torch::jit::Stack& stack, const std::string& reason) {
  const Admission admission = std::exchange(last_admission(), {});
  if (!admission.widening || !admission.widening->send_back(admission.pattern)) {
    return false;
  }
  if (why_unfused) {
    *why_unfused = reason;
  }
  interpret(stack);
  return true;
}

// No error where fallbacks are: the next call asks for a plan again. Behind Ctrl-C, KeyboardInterrupt comes
// when the call has returned.
void Group::run_this_time(torch::jit::Stack& stack, const std::string& reason) {
  if (why_unfused) {
    *why_unfused = reason;
  }
  interpret(stack);
}

void Group::run_beyond_limits(torch::jit::Stack& stack) {
  interpret(stack);
  // The limits are narrower than eager's here and there, so that it may have raised nothing.
  const char* reason = "a number is beyond what the plan is made for";
  counters().add_fallback(reason);
  if (why_unfused) {
    *why_unfused = reason;
  }
}

void Group::run_refused(const std::shared_ptr<const Plan>& plan, torch::jit::Stack& stack) {
  const std::string reason = plan->refusal.empty() ? plan->failure() : plan->refusal;
  run_unfused(stack, reason);
  if (C10_UNLIKELY(plan->unreported.load(std::memory_order_relaxed))) {
    if (const char* kind = plan->unreported.exchange(nullptr)) {  // no other thread has
      report(kind, reason);
    }
  }
}

void Group::run_unfused(torch::jit::Stack& stack, const std::string& reason, const char* kind,
                        const std::string& detail) {
  counters().add_fallback(reason);
  if (why_unfused) {
    *why_unfused = reason;
  }
  TORCH_CHECK(fallback_enabled.load(std::memory_order_relaxed),
              "tsfuser does not run this group fused: ", reason, "\n(its fallback is disabled)\n", text);
  interpret(stack);
  if (kind) {
    report(kind, reason + detail);
  }
}

void Group::interpret(torch::jit::Stack& stack) {
  if (EagerErrors::wanted()) {
    unfused_steps().run(stack);
  } else {
    torch::jit::InterpreterState(unfused_code()).run(stack);
  }
}

void Group::report(const char* kind, const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(reports_mutex_);
    if (reported_.size() >= most_reports || !reported_.insert(kind + (": " + reason)).second) {
      return;
    }
  }
  const Planning mark;  // what Python does with the report is not ours to fuse
  report_in_python(kind, id, reason);
}

void Group::reset() {
  plans_.clear();
  const std::lock_guard<std::mutex> lock(reports_mutex_);
  reported_.clear();
}

void Group::after_fork() {
  plans_.after_fork();
  new (&reports_mutex_) std::mutex;
  new (&planning_) std::mutex;
  new (&code_mutex_) std::mutex;
}

}  // namespace tsfuser
