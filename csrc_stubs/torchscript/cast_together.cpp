// The operator that casts all weights of a graph together (weight_casts.cpp), and its backward.
//
// In: tensors, which of them to cast, the arguments of autocast's cast, and whether a program asks for it,
// whatever the dtype of a tensor. Out: the result of the cast for each tensor, or the tensor itself. On a
// GPU the casts are groups, and one batched launch runs many of them: torch's op for many tensors gives each
// block of threads 65,536 elements, which takes 20 us, however few blocks there are. Elsewhere that op runs.
// Gradients are cast back in parts of `kTogether`: each waits for the last one of its part. Example: 96
// weights of many sizes and layouts take fewer than 16 launches each way (tests/e2e/test_weight_casts.py).

#include "call/arguments.h"
#include "group/group.h"
#include "torchscript/weight_casts.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_autocast_to_reduced_precision_ops.h>
#include <ATen/ops/_foreach_copy_ops.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <array>
#include <atomic>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using at::Tensor;
using torch::autograd::variable_list;
using torch::jit::Stack;

// Elements whose gradients are cast together, unless one tensor has more: 32 MB of float32, about what
// distributed training sends at once.
constexpr int64_t kTogether = int64_t{1} << 23;

std::atomic<bool> groups_everywhere{false};

// The group `aten::to(%x, dtype, 0, 0, None)`, for batches.
Group& make_cast_group(at::ScalarType dtype) {
  const auto graph = std::make_shared<torch::jit::Graph>();
  torch::jit::Value* no = graph->insertConstant(false);
  torch::jit::Value* result =
      graph->insert(c10::aten::to, {graph->addInput(), static_cast<int64_t>(dtype), no, no, c10::IValue()});
  graph->registerOutput(result);
  const auto text = graph->toString(/*print_source_locations=*/false);
  return *group_by_text(graph, text + batched_mark);
}

Group& cast_group(at::ScalarType dtype) {
  constexpr auto kTypes = static_cast<size_t>(at::ScalarType::NumOptions);
  static std::array<std::atomic<Group*>, kTypes> groups{};  // equal texts are one group
  std::atomic<Group*>& found = groups.at(static_cast<size_t>(dtype));
  if (!found) {
    found = &make_cast_group(dtype);
  }
  return *found;
}

// Copies in another dtype, as the tensors lie in memory, of tensors of one device. They have no history.
std::vector<Tensor> cast_all(const std::vector<Tensor>& tensors, at::ScalarType dtype) {
  const at::AutoDispatchBelowADInplaceOrView no_history;
  const at::NoGradGuard no_gradients;  // groups refuse what autograd would have to record
  std::vector<Tensor> made;
  made.reserve(tensors.size());
  if (!tensors.empty() && (tensors[0].is_cuda() || groups_everywhere)) {
    Group& group = cast_group(dtype);
    Stack stack;
    for (size_t i = 0; i < tensors.size(); ++i) {
      stack.assign(1, tensors[i]);
      group.run_in_batch(stack, 1, /*last=*/i + 1 == tensors.size());
      made.push_back(std::move(stack[0]).toTensor());
    }
    return made;
  }
  for (const Tensor& tensor : tensors) {
    made.push_back(at::empty_like(tensor, tensor.options().dtype(dtype)));
  }
  if (!made.empty()) {
    at::_ops::_foreach_copy_::call(made, tensors, /*non_blocking=*/false);
  }
  return made;
}

// The backward of casts of float32 tensors.
class CastBackward : public torch::autograd::Node {
 public:
  // As what accumulates gradients, it runs as soon as it can, though it was made before the rest.
  CastBackward() : Node(std::numeric_limits<uint64_t>::max()) {}

  static auto make() {
    if constexpr (std::is_base_of_v<std::enable_shared_from_this<torch::autograd::Node>,
                                    torch::autograd::Node>) {
      return std::make_shared<CastBackward>();
    } else {
      return c10::make_intrusive<CastBackward>();
    }
  }

  void add(const Tensor& given, Tensor& made) {
    add_next_edge(torch::autograd::impl::gradient_edge(given));
    torch::autograd::create_gradient_edge(made, getptr());
  }

  variable_list apply(variable_list&& gradients) override {
    variable_list results(gradients.size());
    std::vector<Tensor> plain;
    std::vector<size_t> places;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const Tensor& gradient = gradients[i];
      if (!gradient.defined() || !task_should_compute_output(i)) {
        continue;
      }
      const bool is_alone = c10::GradMode::is_enabled() || refuse_mode() || refuse_tensor(gradient) ||
                            (!plain.empty() && (gradient.device() != plain[0].device() ||
                                                gradient.scalar_type() != plain[0].scalar_type()));
      if (is_alone) {
        results[i] = gradient.to(at::kFloat);
      } else {
        plain.push_back(gradient);
        places.push_back(i);
      }
    }
    gradients.clear();
    std::vector<Tensor> made = cast_all(plain, at::kFloat);
    for (size_t i = 0; i < made.size(); ++i) {
      results[places[i]] = std::move(made[i]);
    }
    return results;
  }

  std::string name() const override { return "tsfuser::CastBackward"; }
};

void record(const std::vector<Tensor>& given, std::vector<Tensor>& made) {
  if (!c10::GradMode::is_enabled()) {
    return;
  }
  decltype(CastBackward::make()) node;
  int64_t elements = 0;
  for (size_t i = 0; i < given.size(); ++i) {
    if (!given[i].requires_grad()) {
      continue;
    }
    if (!node || elements + given[i].numel() > kTogether) {
      node = CastBackward::make();
      elements = 0;
    }
    elements += given[i].numel();
    node->add(given[i], made[i]);
  }
}

struct Target {
  bool cuda_enabled, cpu_enabled;
  at::ScalarType cuda_dtype, cpu_dtype;

  bool casts(const Tensor& tensor) const {
    return tensor.defined() && !refuse_tensor(tensor) && tensor.scalar_type() == at::kFloat &&
           (tensor.is_cuda() ? cuda_enabled : cpu_enabled);
  }
  at::ScalarType dtype(const Tensor& tensor) const { return tensor.is_cuda() ? cuda_dtype : cpu_dtype; }
};

void cast_together(Stack& stack) {
  Target target{};
  const bool always = torch::jit::pop(stack).toBool();
  target.cpu_dtype = torch::jit::pop(stack).toScalarType();
  target.cuda_dtype = torch::jit::pop(stack).toScalarType();
  target.cpu_enabled = torch::jit::pop(stack).toBool();
  target.cuda_enabled = torch::jit::pop(stack).toBool();
  const c10::List<bool> on = torch::jit::pop(stack).toBoolList();
  std::vector<Tensor> tensors = torch::jit::pop(stack).toTensorVector();
  const bool is_watched = refuse_mode() != nullptr;
  std::vector<Tensor> given;
  std::vector<size_t> places;
  for (size_t i = 0; i < tensors.size(); ++i) {
    Tensor& tensor = tensors[i];
    if (!on[i]) {
      continue;
    }
    if (is_watched || !target.casts(tensor) || (!given.empty() && tensor.device() != given[0].device())) {
      tensor =
          always ? tensor.to(target.dtype(tensor))
                 : at::_ops::_autocast_to_reduced_precision::call(
                       tensor, target.cuda_enabled, target.cpu_enabled, target.cuda_dtype, target.cpu_dtype);
    } else {
      given.push_back(tensor);
      places.push_back(i);
    }
  }
  if (!given.empty()) {
    std::vector<Tensor> made = cast_all(given, target.dtype(given[0]));
    record(given, made);
    for (size_t i = 0; i < made.size(); ++i) {
      tensors[places[i]] = std::move(made[i]);
    }
  }
  stack.emplace_back(std::move(tensors));
}

}  // namespace

bool cast_in_groups_everywhere(bool on) { return groups_everywhere.exchange(on); }

void register_cast_operator() {
  static const torch::jit::RegisterOperators registered({torch::jit::Operator(
      "tsfuser::cast_together(Tensor(a)[] tensors, bool[] on, bool cuda_enabled, "
      "bool cpu_enabled, ScalarType cuda_dtype, ScalarType cpu_dtype, bool always) -> Tensor(a)[]",
      cast_together, c10::AliasAnalysisKind::FROM_SCHEMA)});
}

}  // namespace tsfuser
