// A region whose forward and backward one joint graph makes. See joint_function.h.

#include "torchscript/joint_function.h"
#include "torchscript/owned_call.h"
#include "call/arguments.h"
#include "group/failures.h"
#include "torchscript/hooks.h"
#include "torchscript/kept_writes.h"
#include "torchscript/nodes.h"
#include "torchscript/settled_branches.h"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>
#include <c10/util/bit_cast.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/runtime/interpreter.h>
#include <torch/csrc/jit/runtime/profiling_record.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace tsfuser {
namespace {

using torch::jit::Code;
using torch::jit::Graph;
using torch::jit::GraphFunction;
using torch::jit::Node;
using torch::jit::Stack;
using GraphPtr = std::shared_ptr<Graph>;

constexpr const char* kName = "joint";
constexpr size_t kMostPacked = 16;  // of one function

// Marks in the names of inputs (tsfuser/joint/names.py). The first input of a graph that is not to become a
// call again: a program's graph that Python has refused, and those inside of a packed one.
constexpr const char* kPart = ".joint_part";
// Those that the program may write to, and those of which packed graphs know whether they are row-major.
constexpr const char* kWritten = ".written";
constexpr const char* kLaidOut = ".laid_out";

bool has_mark(const torch::jit::Value* input, const char* mark) {
  return input->hasDebugName() && input->debugName().find(mark) != std::string::npos;
}

c10::Symbol held_name() {
  static const auto name = c10::Symbol::attr("joint_function");
  return name;
}

// 0 where autocast is off; else what it casts to.
int64_t autocast_of(at::DeviceType device) {
  return at::autocast::is_autocast_enabled(device)
             ? static_cast<int64_t>(at::autocast::get_autocast_dtype(device)) + 1
             : 0;
}

// Whether ops cast the tensor, though no graph shows that: of 16 bits, but of others.
bool is_cast_unseen(const at::Tensor& tensor, int64_t autocast) {
  const auto dtype = tensor.scalar_type();
  return autocast != 0 && (dtype == at::kHalf || dtype == at::kBFloat16) &&
         autocast != static_cast<int64_t>(dtype) + 1;
}

// A number, or a list of these, that a packed graph has as a constant.
template <class Words>
void describe_constant(const c10::IValue& value, Words& words) {
  if (value.isDouble()) {
    words.push_back(c10::bit_cast<int64_t>(value.toDouble()));
  } else if (value.isInt()) {
    words.push_back(value.toInt());
  } else if (value.isIntList()) {
    for (const c10::IValue& item : value.toListRef()) {
      words.push_back(item.toInt());
    }
  }
}

// The same of what is no tensor. Numbers are values in a packed graph; flags and devices are not, nor are
// `constants`. False: it is none of these.
template <class Words>
bool describe_number(const c10::IValue& value, bool is_constant, Words& words) {
  if (value.isBool()) {
    words.push_back(value.toBool() ? -1 : -2);
    return true;
  }
  if (value.isDevice()) {
    words.push_back(-7);
    words.push_back(static_cast<int64_t>(value.toDevice().type()) << 16 | (value.toDevice().index() + 1));
    return true;
  }
  if (!value.isInt() && !value.isDouble() && !value.isNone() && !value.isIntList()) {
    return false;
  }
  words.push_back(value.isInt() ? -3 : value.isDouble() ? -4 : value.isNone() ? -5 : -6);
  if (value.isIntList()) {
    words.push_back(static_cast<int64_t>(value.toListRef().size()));
  }
  if (is_constant) {
    describe_constant(value, words);
  }
  return true;
}

std::vector<JointFunction::Input> inputs_of(const Graph& graph) {
  return fmap(graph.inputs(), [](const torch::jit::Value* input) {
    const bool asked = std::all_of(input->uses().begin(), input->uses().end(), [](const auto& use) {
      return use.user->kind() == c10::prim::dtype || use.user->kind() == c10::prim::device;
    });
    return JointFunction::Input{asked, has_mark(input, kLaidOut)};
  });
}

// What a packed graph depends on, besides sizes; whether there may be one. Tensors without elements are left
// out, but for those that are only asked: some derivatives have no sizes to go by.
template <class Words>
bool describe(at::ArrayRef<c10::IValue> arguments, const std::vector<bool>& constants,
              const std::vector<JointFunction::Input>& inputs, Words& words) {
  bool records = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = arguments[i];
    if (!value.isTensor()) {
      if (!describe_number(value, constants[i], words)) {
        return false;
      }
      continue;
    }
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || !is_readable(tensor) || tensor.is_complex() || tensor.is_inference() ||
        tensor.layout() != at::kStrided || (tensor.numel() == 0 && !inputs[i].asked)) {
      return false;
    }
    const int64_t autocast = autocast_of(tensor.device().type());
    if (is_cast_unseen(tensor, autocast)) {
      return false;
    }
    records |= tensor.requires_grad();
    words.push_back(static_cast<int64_t>(tensor.scalar_type()));
    words.push_back(autocast << 32 | static_cast<int64_t>(tensor.device().type()) << 16 |
                    (tensor.device().index() + 1));
    words.push_back(tensor.dim() << 1 | static_cast<int64_t>(tensor.requires_grad()));
    if (inputs[i].laid_out) {
      words.push_back(static_cast<int64_t>(tensor.is_contiguous()));
    }
  }
  return records;
}

// A region whose graph says which of its operands and results the program may write to: for torch's passes
// `y + 0` is `y` else, of which a derivative may be made.
std::unique_ptr<GraphFunction> plain_region(Graph& graph, const std::vector<int64_t>& written,
                                            const std::string& name) {
  const GraphPtr noted = graph.copy();
  for (torch::jit::Value* operand : noted->inputs()) {
    if (has_mark(operand, kWritten)) {
      note_write(operand);
    }
  }
  for (const int64_t i : written) {
    note_write(noted->outputs().at(static_cast<size_t>(i)));
  }
  return plain_function(*noted, name);
}

}  // namespace

JointFunction::JointFunction(GraphPtr graph, const std::vector<int64_t>& written)
    : OwnedFunction(kName, graph->inputs().size()),
      graph_(std::move(graph)),
      written_(written),
      inputs_(inputs_of(*graph_)),
      constants_(graph_->inputs().size()) {}

JointFunction::~JointFunction() = default;

bool JointFunction::call(Stack& stack, std::optional<size_t> bail_out, Run run) {
  if (const Code* code = code_for(torch::jit::last(stack, num_inputs()))) {
    run(*code);
    return true;
  }
  return made_plain().call(stack, bail_out, run);
}

GraphFunction& JointFunction::made_plain() {
  if (GraphFunction* made = plain()) {
    return *made;
  }
  auto made = plain_region(*graph_, written_, running_function(kName));
  const std::unique_lock<std::shared_mutex> lock(mutex_);
  if (!plain_) {  // of threads at once the first one stays
    plain_ = std::move(made);
  }
  return *plain_;
}

GraphFunction* JointFunction::plain() const {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  return plain_.get();
}

std::vector<JointFunction::PackedGraph> JointFunction::packed() const {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  std::vector<PackedGraph> found;
  for (const auto& made : known_) {
    if (made->graph) {
      found.push_back({made->graph, made->code.get()});
    }
  }
  return found;
}

// Null where the program's graph runs.
const Code* JointFunction::code_for(at::ArrayRef<c10::IValue> arguments) {
  if (!c10::GradMode::is_enabled() || refuse_mode() || !torch::jit::getGraphExecutorOptimize()) {
    return nullptr;
  }
  for (size_t tries = 0; tries <= arguments.size(); ++tries) {  // each may find more constants
    c10::SmallVector<int64_t, 96> words;
    std::vector<bool> constants;
    {
      const std::shared_lock<std::shared_mutex> lock(mutex_);
      if (!describe(arguments, constants_, inputs_, words)) {
        return nullptr;
      }
      const auto found = std::find_if(known_.begin(), known_.end(), [&words](const auto& made) {
        return std::equal(words.begin(), words.end(), made->words.begin(), made->words.end());
      });
      if (found != known_.end() || known_.size() >= kMostPacked) {
        return found == known_.end() ? nullptr : (*found)->code.get();
      }
      constants = constants_;
    }
    auto made = std::make_unique<Packed>();
    made->words.assign(words.begin(), words.end());
    std::vector<size_t> more;
    attempt("joint_graph", *graph_, [&] { more = pack(arguments, constants, *made); });
    const std::unique_lock<std::shared_mutex> lock(mutex_);
    if (std::all_of(more.begin(), more.end(), [&constants](size_t i) { return constants.at(i); })) {
      known_.push_back(std::move(made));  // of threads at once the first one stays
      continue;
    }
    for (const size_t i : more) {
      constants_.at(i) = true;
    }
  }
  return nullptr;
}

// The numbers among the arguments that have to be constants; then nothing is made.
std::vector<size_t> JointFunction::pack(at::ArrayRef<c10::IValue> arguments,
                                        const std::vector<bool>& constants, Packed& made) const {
  const GraphPtr graph = graph_->copy();
  std::vector<bool> wanted;
  std::vector<c10::IValue> numbers;  // of this call; for tensors None
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_tensor = arguments[i].isTensor();
    wanted.push_back(is_tensor && arguments[i].toTensor().requires_grad());
    numbers.push_back(is_tensor ? c10::IValue() : arguments[i]);
    torch::jit::Value* input = graph->inputs()[i];
    if (is_tensor) {
      input->setType(c10::TensorType::create(arguments[i].toTensor()));
    } else if (arguments[i].isBool() || arguments[i].isDevice() || arguments[i].isNone() || constants[i]) {
      const torch::jit::WithInsertPoint first(*graph->nodes().begin());
      input->replaceAllUsesWith(graph->insertConstant(arguments[i]));
    } else {
      input->setType(arguments[i].type());
    }
  }
  std::vector<size_t> more;
  with_callback(joint_callback(), "the joint graph is no graph", [&](const py::object& pack) {
    const py::object result = pack(graph, wanted, fmap(numbers, torch::jit::toPyObject));
    if (py::isinstance<py::tuple>(result)) {
      more = result.cast<std::vector<size_t>>();
    } else if (!result.is_none()) {
      made.graph = result.cast<GraphPtr>();
    }
  });
  if (made.graph) {
    made.code = std::make_unique<Code>(made.graph, running_function(kName));
  }
  return more;
}

JointFunction* region_of(const Node* node) { return owned_by<JointFunction>(node, held_name()); }

Node* region_call(Graph& graph, std::unique_ptr<JointFunction> region,
                  at::ArrayRef<torch::jit::Value*> operands) {
  return owned_call(graph, std::move(region), kName, held_name(), operands);
}

std::unique_ptr<GraphFunction> plain_function(Graph& graph, const std::string& name) {
  auto part = graph.copy();
  if (part->outputs().size() != 1) {
    Node* together = part->appendNode(part->createTuple(part->outputs()));
    while (!part->outputs().empty()) {
      part->eraseOutput(part->outputs().size() - 1);
    }
    part->registerOutput(together->output());
  }
  make_part(*part);
  auto made = std::make_unique<GraphFunction>(c10::QualifiedName(name), std::move(part), nullptr);
  keep_casts(*made);
  return made;
}

void make_part(Graph& graph) {
  if (!is_part(graph)) {
    torch::jit::Value* first = graph.inputs()[0];
    first->setDebugName(first->debugName() + kPart);
  }
}

bool is_part(const Graph& graph) { return graph.inputs().empty() || has_mark(graph.inputs()[0], kPart); }

bool is_joint(const Node& differentiable) {
  static const auto name = c10::Symbol::attr("joint");
  return differentiable.hasAttribute(name);
}

Callback& joint_callback() {
  static Callback* c = new Callback;
  return *c;
}

}  // namespace tsfuser
