// A group of ops that runs as one: its plans, their lookup, and its unfused form if there is no plan.
//
// In: the interpreter's stack. Out: the same stack with the inputs replaced by the outputs. A call is
//   1 an exact hit: this thread has seen the leaf vector before -> everything is ready: launch
//   2 a class hit: the checks of some plan hold -> evaluate its size program, launch, remember for 1
//   3 a miss: Python makes a plan, once -> as 2
//   4 refused: the subgraph is interpreted, and `stats` counts the reason
// 1 and 2 never take the GIL.
#pragma once

#include "call/exact_cache.h"
#include "call/plan.h"
#include "call/plan_table.h"
#include "group/runnable_graph.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace torch::jit {
struct Graph;
struct Node;
struct Code;
}  // namespace torch::jit

namespace tsfuser {

class Callback;  // python.h

// The end of the text of a group that is in batches: its plans are made for batched launches.
inline constexpr const char* batched_mark = "# batched";

extern std::atomic<bool> fallback_enabled;

// While there is one on this thread, a group that runs unfused raises what its ops raise. Else torch's
// interpreter runs it, whose errors have the traceback that TorchScript programs are used to.
class EagerErrors {
 public:
  EagerErrors();
  ~EagerErrors();
  EagerErrors(const EagerErrors&) = delete;
  EagerErrors& operator=(const EagerErrors&) = delete;

  static bool wanted();

 private:
  const bool before_;
};

class Group {
 public:
  Group(int64_t id, std::shared_ptr<torch::jit::Graph> graph, std::string text);

  // `guard`: the key of a guard that the call agrees with; 0: none. Later calls of that guard with such
  // arguments would agree, too, and `run_remembered` runs them. `dead`: the inputs that nobody reads later.
  void run(torch::jit::Stack& stack, size_t input_count, CallKey guard = 0, DeadInputs dead = 0);
  // False, with the stack as it was, where this thread has run no such call for the guard.
  bool run_remembered(CallKey guard, torch::jit::Stack& stack, size_t input_count);
  // As one of a batch of groups, which are launched when the `last` one comes (waiting.h).
  void run_in_batch(torch::jit::Stack& stack, size_t input_count, bool last);
  // The same as `run` without telling the observer (observe.h). Returns why it ran unfused, or "".
  std::string run_unobserved(torch::jit::Stack& stack, size_t input_count);
  // The call with such arguments that this thread has made before, where nothing keeps it from being
  // launched; else null.
  const PreparedCall* ready_call(const Arguments& arguments, at::ArrayRef<c10::IValue> inputs);
  // The launch of such a call has failed: its nodes are run, as in `interpret`.
  void run_after_failure(const std::shared_ptr<const Plan>& plan, const std::string& reason,
                         torch::jit::Stack& stack);
  // Runs the nodes one by one, as they stand in the subgraph.
  void interpret(torch::jit::Stack& stack);
  void reset();
  void after_fork();

  const int64_t id;
  const std::string text;
  const std::shared_ptr<torch::jit::Graph> graph;
  std::vector<std::shared_ptr<const Plan>> plans() { return plans_.all(); }

 private:
  using Call = std::shared_ptr<const PreparedCall>;
  // What a miss came to: a call to run, or none; and what to report, if anything.
  struct Miss {
    Call call;
    const char* kind;
    std::string reason;
    bool asks_again = false;  // the next call
  };

  Call find_class(const Arguments& arguments);
  Miss plan_anew(const Arguments& arguments, at::ArrayRef<c10::IValue> inputs);

  // `guard`: that a call is remembered for; 0: none.
  void run_now(torch::jit::Stack& stack, size_t input_count, CallKey guard = 0, DeadInputs dead = 0);
  // `resolved`: the inputs that the call is prepared for, where some on the stack are lazy (resolved.h).
  void run_prepared(const PreparedCall& call, const Arguments& arguments, torch::jit::Stack& stack,
                    size_t input_count, DeadInputs dead = 0, torch::jit::Stack resolved = {});
  // Where the guard was open for a call that has no plan: the guard lets no more of them in, and this one,
  // which its fallback would have run, is interpreted. False where the call came otherwise.
  bool send_back(torch::jit::Stack& stack, const std::string& reason);
  // With a number that eager rejects, most likely: its error is raised.
  void run_beyond_limits(torch::jit::Stack& stack);
  // `kind`: of the report that is due, if any. What eager rejects raises here, and reports nothing.
  void run_unfused(torch::jit::Stack& stack, const std::string& reason, const char* kind = nullptr,
                   const std::string& detail = "");
  // The call of a plan that is refused, or has failed.
  void run_refused(const std::shared_ptr<const Plan>& plan, torch::jit::Stack& stack);
  void run_this_time(torch::jit::Stack& stack, const std::string& reason);
  void report(const char* kind, const std::string& reason);
  const torch::jit::Code& unfused_code();
  const RunnableGraph& unfused_steps();

  static constexpr size_t most_reports = 64;

  const CallKey key_ = new_call_key();
  PlanTable plans_;
  std::mutex reports_mutex_;  // of what follows, never held while waiting for the GIL
  std::set<std::string> reported_;

  std::mutex planning_;  // held while Python plans; waited for without the GIL
  std::mutex code_mutex_;
  std::shared_ptr<const torch::jit::Code> code_;
  std::unique_ptr<const RunnableGraph> steps_;
};

// The process-wide registry. Equal texts are one group; groups live as long as the process.
Group* group_by_text(const std::shared_ptr<torch::jit::Graph>& graph, const std::string& text);
Group* group_by_id(int64_t id);  // null if there is none
// The group that a prim::CudaFusionGroup runs.
Group* group_of(const torch::jit::Node* node);
Group& known_group(int64_t id);  // throws std::out_of_range
size_t group_count();
void reset_groups();
void groups_after_fork();

// planner.cpp, the calls into Python. What Python raised comes as PlannerError, with its reason;
// PlannerAbsent says that nobody could be asked this time, PlannerInterrupted that Ctrl-C ended the
// planning, PlannerPending that the plan is made beside the program: the call runs unfused, with the last
// two even where that is an error otherwise, and the next one asks again.
struct PlannerError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct PlannerAbsent : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct PlannerInterrupted : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct PlannerPending : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// What Python has set.
Callback& planner_callback();
Callback& reporter_callback();
std::shared_ptr<const Plan> plan_in_python(int64_t group, at::ArrayRef<c10::IValue> inputs, bool varies);
void report_in_python(const char* kind, int64_t group, const std::string& reason);

}  // namespace tsfuser
