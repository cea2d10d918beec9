// The one struct between Python and C++: what to allocate and what to launch for one class of calls.
//
// In: plain lists that Python makes once. Out: `PreparedCall`, the plan with all integers of one call
// filled in, and `run`, which does the call. Example: c = a + b is one allocation, and one launch with
// three addresses and a count.
#pragma once

#include "call/arguments.h"
#include "call/program.h"

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace tsfuser {

enum class SlotKind : uint8_t {
  Input,       // address of a tensor argument
  Update,      // the same, of one that the kernel writes
  Allocation,  // address of a new tensor
  Cleared,     // the same, of one that is all 0 bytes when the kernel starts
  Int32,       // values[index]
  Int64,
  NumberBool,  // number argument, converted
  NumberInt32,
  NumberInt64,
  NumberFloat32,
  NumberFloat64,
  NumberComplex64,
  NumberComplex128,
  Element,  // the element of a 0-dim CPU tensor argument, as it lies in memory
  Random,   // where the random numbers of the call begin, a RandomState
  Seeded,   // the same, of random numbers whose seed and offset a tensor argument holds, two int64
  Flag,     // address of an int32 that a host kernel sets to 1 where it finds an index out of range
};

// One kernel parameter: `index` is an argument, an allocation or a position in the values.
struct Slot {
  int32_t offset;
  int32_t index;
  SlotKind kind;
};

struct Allocation {
  c10::ScalarType dtype;
  std::vector<int32_t> sizes, strides;  // positions in the values
  // Where there is room behind dim `room_dim` (room.h): the position of the number of elements of the
  // memory. Else -1.
  int32_t elements = -1;
  int64_t room_dim = 0;
};

struct Launch {
  bool cuda = false;
  bool overlaps = false;  // may be set up while the kernel before it runs: it waits for that one by itself
  void* function = nullptr;  // CUfunction, or the address of a host kernel
  std::string name;
  int32_t grid = 0, block_x = 0, block_y = 0, shared = 0, grain = 0;  // positions in the values
  size_t args_bytes = 0;
  std::vector<Slot> integers;  // filled when a call is prepared
  std::vector<Slot> slots;     // filled at each call
  bool updates = false;        // some slot is an Update
  int32_t cluster = -1;        // position of the blocks of a cluster, or -1: it has no clusters
  // The allocation of its Cleared slot, or -1. Blocks of a kernel that has one meet there, so that all of
  // them run at the same time.
  int32_t cleared = -1;
  // How many argument structs its kernel takes (batched_launch.h); 0: one, by itself.
  int32_t batch_capacity = 0;
  mutable std::atomic<bool> shared_memory_raised{false};
};

enum class ResultKind : uint8_t {
  Allocation,  // a new tensor
  Input,       // an argument, passed through
  Integer,     // the number `index` itself
  Undefined,   // a tensor that is not there
};

struct Result {
  ResultKind kind;
  int32_t index;
};

// An argument whose memory kernels write. `counted`: its version goes up by one.
struct Update {
  int32_t index;
  bool counted;
};

// A new tensor that may lie in the memory of an argument: its kernel reads each element of that for the
// last time before it stores there. `alike`: what has to hold of each dim of the kernel's loops, by
// positions in the values: its extent is 1, or a step along it is as long in the one tensor as in the
// other.
struct Reuse {
  struct Dim {
    int32_t extent, allocation_stride, input_stride;
  };
  int32_t allocation, input;
  std::vector<Dim> alike;
};

// A number argument has to be within these bounds, or a call runs unfused (tsfuser/ir/limits.py).
struct Limit {
  int32_t index;
  int64_t low, high;   // of an int or a bool
  double least, most;  // of a float, and of each part of a complex number
  bool nan, infinite;  // whether these are allowed, too

  bool admits(const c10::IValue& number) const;
};

struct Plan {
  Program program;
  std::vector<Allocation> allocations;
  std::vector<std::shared_ptr<const Launch>> launches;
  std::vector<Result> results;
  std::vector<Update> updates;
  std::vector<Limit> limits;
  std::vector<Reuse> reuses;
  int32_t random = 0;  // random ops, each of which has a stream of its own in every call
  int32_t drawn = -1;  // where the ops' numbers are eager's: position of the Philox blocks that a call takes
  std::string refusal;                         // non-empty: calls of this class run unfused
  std::shared_ptr<void> keepalive;             // what the kernels need as long as the plan lives
  mutable std::atomic<uint64_t> last_used{0};  // in the time of its PlanTable
  mutable std::atomic<bool> has_run{false};    // told where it has reuses
  // What kind of report is due once a call has run unfused; null: none.
  mutable std::atomic<const char*> unreported{nullptr};

  Plan() = default;
  Plan(const Plan&) = delete;

  // Throws std::invalid_argument if an index points outside of what it indexes.
  void verify() const;
  // Null, or why the plan cannot serve such arguments (a planner's mistake).
  const char* mismatch(at::ArrayRef<c10::IValue> inputs) const;

  // Null, or why no kernel may write the arguments of this call.
  const char* conflict(const Arguments& arguments, at::ArrayRef<c10::IValue> inputs) const;

  // Whether the numbers of this call are within the limits.
  bool admits(at::ArrayRef<c10::IValue> inputs) const;

  // A launch failed: remembered, so that it is not tried again.
  void mark_failed(const std::string& reason) const;
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  std::string failure() const;

 private:
  mutable std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  mutable std::string failure_;
};

struct PreparedLaunch {
  const Launch* launch;
  int64_t grid, block_x, block_y, shared, grain;
  int64_t cluster;     // blocks of a cluster, 1 where there are none
  size_t args_offset;  // into PreparedCall::args
};

// A Reuse that the sizes of one call allow. `bytes`: of the new tensor; `dims`: where its sizes begin.
struct PreparedReuse {
  int32_t allocation, input;
  size_t bytes, dims;
};

// A plan for exactly one leaf vector. Immutable once made, so threads share it.
struct PreparedCall : std::enable_shared_from_this<PreparedCall> {
  std::shared_ptr<const Plan> plan;
  std::vector<uint64_t> structure;
  std::vector<int64_t> values;  // begins with the leaves
  uint64_t hash = 0;
  std::vector<int64_t> dims;  // sizes then strides of each allocation
  std::vector<PreparedReuse> reuses;
  std::vector<PreparedLaunch> launches;  // those with a grid of 0 are left out
  uint64_t drawn = 0;                    // Philox blocks by which the generator advances
  std::vector<char> args;                // parameter buffers with the integers filled in

  bool serves(const Arguments& arguments) const;
};

std::shared_ptr<const PreparedCall> prepare(std::shared_ptr<const Plan> plan, const Arguments& arguments,
                                            std::vector<int64_t> values);

struct LaunchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The random generator cannot be asked now: a capture of a CUDA graph is under way that does not know it.
struct RandomError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Where the random numbers of one call begin, as kernels read it (`random_state` of
// codegen/runtime/philox.h). While a CUDA graph is captured (1, else 0), seed and offset are device
// addresses, where torch puts other numbers before each replay, and `within` is how far into the graph's
// own numbers the call is. So are they where a tensor holds them. On the CPU (2) `seed` is the address of a
// key for each random op.
struct RandomState {
  uint64_t seed = 0, offset = 0, within = 0, captured = 0;
};

// An index that a kernel has found in a tensor is out of range.
struct OutOfRange : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// random.cpp: takes `blocks` Philox blocks from torch's default generator of the device. Throws
// RandomError.
RandomState draw_random(c10::Device device, uint64_t blocks);

// A kernel has failed after one before it had written a result over an operand: nothing can run the ops
// now.
struct OperandLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The inputs, one bit each, that nobody reads after the call. Those that the stack alone holds may give
// their memory to results.
using DeadInputs = uint64_t;
constexpr size_t most_dead_inputs = 63;

// Allocates, launches, and replaces the call's inputs on the stack by its outputs. On an exception the
// stack is as it was, but for arguments that a kernel has updated: there it holds copies, so that who runs
// the ops now updates the true ones no second time. Throws LaunchError, RandomError, OutOfRange,
// OperandLost, or c10::Error / std::bad_alloc where memory is short. Returns the number of launches.
size_t run(const PreparedCall& call, const Arguments& arguments, torch::jit::Stack& stack,
           size_t input_count, DeadInputs dead = 0);

// The parts of `run`, for calls that are launched later (group/waiting.h).
using Tensors = c10::SmallVector<at::Tensor, 8>;
// All that is not defined yet.
void allocate(const PreparedCall& call, c10::Device device, Tensors& allocated);
void fill_slots(const Launch& launch, char* args, const Arguments& arguments,
                at::ArrayRef<c10::IValue> inputs, at::ArrayRef<at::Tensor> allocated,
                const RandomState& random, int32_t* flag);
// Counts the versions of what was updated, and replaces the call's inputs on the stack by its outputs.
void give_results(const Plan& plan, const Tensors& allocated, torch::jit::Stack& stack, size_t input_count);
// Bytes from a tensor's first element to the end of its last one.
size_t reach(const at::Tensor& tensor);

// launch_host.cpp, launch_cuda.cpp
void launch_host(const PreparedLaunch& launch, const char* args);
void launch_cuda(const PreparedLaunch& launch, char* args, void* stream, int device);
void clear_cuda(void* memory, size_t bytes, void* stream,
                int device);              // fills it with 0, in the stream's order
bool captures(void* stream, int device);  // whether the launches on this CUDA stream go into a CUDA graph

// While it lives, this thread may load modules though a CUDA graph is being captured (by whatever thread).
class DuringCapture {
 public:
  explicit DuringCapture(bool cuda);
  ~DuringCapture();

 private:
  bool exchanged_ = false;
  int mode_ = 0;
};

}  // namespace tsfuser
