// The operators that collect what a graph adds to counters (deferred_counts.cpp).
//
// In: a capsule, which `tsfuser::counts` makes, and each counter with the number to add. Out: the capsule.
// `tsfuser::add_counts` adds all numbers. If the graph raises an error before, the destructor of the
// capsule adds what was collected until then. Example: 53 batch norms on a GPU launch one kernel for their
// counters.

#include "torchscript/counts.h"
#include "call/arguments.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_foreach_add_ops.h>
#include <ATen/ops/add_ops.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Stack;

struct Addition {
  at::Tensor counter;
  int64_t number;
};

void add_now(const Addition& count) {
  at::Tensor counter = count.counter;
  at::_ops::add__Scalar::call(counter, count.number, 1);
}

// Whether the sum may be written to the counter's memory.
bool is_plain(const at::Tensor& counter) {
  return counter.is_cpu() && counter.scalar_type() == at::kLong && counter.numel() == 1 &&
         !counter.requires_grad() && !counter.is_inference() && !c10::InferenceMode::is_enabled() &&
         !refuse_tensor(counter);
}

// Whether one kernel may add to all counters: they are distinct tensors, and one increment is added.
bool may_be_one_op(const std::vector<Addition>& counts) {
  std::vector<const void*> memory;
  memory.reserve(counts.size());
  for (const Addition& count : counts) {
    memory.push_back(count.counter.const_data_ptr());
  }
  std::sort(memory.begin(), memory.end());
  return std::adjacent_find(memory.begin(), memory.end()) == memory.end() &&
         std::all_of(counts.begin(), counts.end(), [&counts](const Addition& count) {
           const at::Tensor &first = counts[0].counter, &counter = count.counter;
           return count.number == counts[0].number && counter.is_cuda() && !refuse_tensor(counter) &&
                  counter.device() == first.device() && counter.scalar_type() == first.scalar_type() &&
                  !counter.is_inference() && !counter.requires_grad();
         });
}

// torch's op for many tensors raises a version once or more often, by its route and device; the counter's
// own op raises it once.
void add_together(const std::vector<Addition>& counts) {
  std::vector<at::Tensor> counters;
  std::vector<int64_t> versions;
  for (const Addition& count : counts) {
    counters.push_back(count.counter);
    versions.push_back(count.counter._version());
  }
  at::_ops::_foreach_add__Scalar::call(counters, counts[0].number);
  for (size_t i = 0; i < counters.size(); ++i) {
    c10::VariableVersion version = counters[i].unsafeGetTensorImpl()->version_counter();  // shared
    version.set_version(versions[i]);
  }
  for (const at::Tensor& counter : counters) {
    counter.unsafeGetTensorImpl()->bump_version();
  }
}

class Counts : public torch::CustomClassHolder {
 public:
  // `given`: the arguments of the program. It may read them, so that what is of their memory is added at
  // once.
  explicit Counts(at::ArrayRef<c10::IValue> given) {
    for (const c10::IValue& value : given) {
      if (value.isTensor() && value.toTensor().defined() && value.toTensor().has_storage()) {
        given_.push_back(value.toTensor().storage().unsafeGetStorageImpl());
      }
    }
  }
  ~Counts() override {
    try {
      add();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the program's own error is raised
    }
  }

  void count(at::Tensor counter, int64_t number) {
    Addition added{std::move(counter), number};
    if (refuse_mode() || !added.counter.has_storage() ||
        std::find(given_.begin(), given_.end(), added.counter.storage().unsafeGetStorageImpl()) !=
            given_.end()) {
      return add_now(added);
    }
    pending_.push_back(std::move(added));
  }

  void add() {
    std::vector<Addition> others;
    for (Addition& count : std::exchange(pending_, {})) {
      if (is_plain(count.counter)) {
        *count.counter.mutable_data_ptr<int64_t>() += count.number;
        count.counter.unsafeGetTensorImpl()->bump_version();
      } else {
        others.push_back(std::move(count));
      }
    }
    if (others.size() > 1 && may_be_one_op(others)) {
      add_together(others);
      return;
    }
    std::for_each(others.begin(), others.end(), add_now);
  }

 private:
  std::vector<const void*> given_;
  std::vector<Addition> pending_;
};

// -> counts
void make_counts(Stack& stack) {
  const size_t given = torch::jit::pop(stack).toInt();
  auto counts = c10::make_intrusive<Counts>(torch::jit::last(stack, given));
  torch::jit::drop(stack, given);
  stack.push_back(c10::IValue::make_capsule(std::move(counts)));
}

Counts& counts_of(const c10::IValue& capsule) { return static_cast<Counts&>(*capsule.toCapsule()); }

// counts, counter, number, whether to add it -> counts
void count_later(Stack& stack) {
  const bool on = torch::jit::pop(stack).toBool();
  const int64_t number = torch::jit::pop(stack).toInt();
  at::Tensor counter = torch::jit::pop(stack).toTensor();
  if (on) {
    counts_of(stack.back()).count(std::move(counter), number);
  }
}

// counts ->
void add_counts(Stack& stack) {
  const c10::IValue counts = torch::jit::pop(stack);
  counts_of(counts).add();
}

}  // namespace

// Only the last one has a side effect for torch.
void register_count_operators() {
  using torch::jit::Operator;
  constexpr auto kind = c10::AliasAnalysisKind::FROM_SCHEMA;
  static const torch::jit::RegisterOperators registered(
      {Operator("tsfuser::counts(...) -> Capsule", make_counts, kind),
       Operator("tsfuser::count(Capsule counts, Tensor counter, int number, bool on) -> Capsule",
                count_later, kind),
       Operator("tsfuser::add_counts(Capsule counts) -> ()", add_counts,
                c10::AliasAnalysisKind::CONSERVATIVE)});
}

}  // namespace tsfuser
