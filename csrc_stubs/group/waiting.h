// The calls of a batch of groups wait for each other. A batch: neighbours in a graph that do not read each
// other's results (frontends/dynamo/groups/batched_launches.py). All calls of a batch but the last one wait,
// with their outputs allocated. The last one launches all of them, by one batched launch per kernel.
//
// In: the calls of a batch, one by one. Out: the same results as if each had been launched immediately. Some
// calls cannot wait: their sizes are new, they draw random numbers, their plan has several launches... Such
// a call runs immediately, after all that wait. If calls write to memory that others read or write, they
// are launched one by one, in order.
#pragma once

#include "call/batched_launch.h"
#include "call/plan.h"

#include <cstdint>
#include <string>
#include <vector>

namespace tsfuser {

class Group;

class Waiting {
 public:
  // Of the calling thread.
  static Waiting& mine();

  // Makes the call wait, and replaces its inputs on the stack by its outputs, which nothing may read before
  // `launch`. If the call cannot wait, returns false and leaves the stack as it was.
  bool add(Group& group, torch::jit::Stack& stack, size_t input_count);
  // Launches all that waits. What cannot be launched is interpreted.
  void launch();

 private:
  // `launch` is null where it has nothing to do. `args`, `input`, `allocation`: where its own begin.
  struct Call {
    Group* group;
    std::shared_ptr<const Plan> plan;
    const PreparedLaunch* launch;
    size_t args, input, input_count, allocation;
    bool done;
  };
  // Memory that a call reads or writes.
  struct Range {
    uintptr_t begin, end;
    bool written;
  };

  void add_ranges(const Plan& plan, const Arguments& arguments, at::ArrayRef<c10::IValue> inputs);
  bool in_conflict();
  // Returns the number of launches. Throws LaunchError.
  size_t launch_all(bool together);
  void run_unfused(const std::string& reason) const;
  void clear();

  std::vector<Call> calls_;
  std::vector<char> args_;
  // Kept until the launch: memory that is freed earlier may be given to the next call.
  std::vector<c10::IValue> inputs_;
  std::vector<at::Tensor> allocated_;
  std::vector<Range> ranges_;
  bool updates_ = false;
  c10::Device device_{c10::DeviceType::CPU};
};

}  // namespace tsfuser
