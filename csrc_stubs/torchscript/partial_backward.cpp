#include "torchscript/partial_backward.h"
#include "group/failures.h"
#include "torchscript/hooks.h"
#include "torchscript/joint_function.h"

#include <pybind11/stl.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/shape_analysis.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace tsfuser {
namespace {

using torch::jit::Stack;
using GraphPtr = std::shared_ptr<torch::jit::Graph>;

constexpr const char* kName = "partial_backward";
constexpr size_t kMostKept = 32;  // of one joint graph

std::vector<bool> as_list(const Flags& flags) { return std::vector<bool>(flags.begin(), flags.end()); }

bool any_of(const std::vector<size_t>& places, const Flags& flags) {
  return std::any_of(places.begin(), places.end(), [&flags](size_t place) { return flags[place]; });
}

// All of the backward, with zeros for missing gradients.
std::shared_ptr<const PartialBackward> whole(torch::jit::Graph& way, bool again, const Flags& present) {
  const GraphPtr graph = way.copy();
  torch::jit::EraseShapeInformation(graph);
  make_part(*graph);
  std::vector<size_t> places, zeros;
  for (size_t i = 0; i < graph->inputs().size(); ++i) {
    places.push_back(i);
    if (i < present.size() && !present[i]) {
      zeros.push_back(i);
    }
  }
  return std::make_shared<PartialBackward>(graph, std::move(places), std::move(zeros), again);
}

}  // namespace

PartialBackward::PartialBackward(GraphPtr graph, std::vector<size_t> places, std::vector<size_t> zeros,
                                 bool runs_again)
    : places_(std::move(places)), zeros_(std::move(zeros)) {
  if (runs_again) {
    code_ = std::make_unique<torch::jit::Code>(graph, kName);
  } else {
    executor_ = std::make_unique<torch::jit::GraphExecutor>(graph, "<backward op>");
  }
}

PartialBackward::~PartialBackward() = default;

void PartialBackward::look_at_plan() const {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock || state_ != State::Profiling || !executor_->isOptimized()) {
    return;
  }
  Stack none;  // only profiling looks at arguments
  const auto graph = executor_->getPlanFor(none).graph;
  attempt("step_lists", *graph, [&] {
    auto steps = StepList::of(*graph);
    end_of_pass("step_lists");
    steps_ = std::move(steps);
  });
  state_.store(steps_ ? State::Ready : State::Never, std::memory_order_release);
}

void PartialBackward::run(Stack& stack) const {
  if (code_) {
    torch::jit::InterpreterState(*code_).run(stack);
    return;
  }
  const bool optimises = torch::jit::getGraphExecutorOptimize();
  if (optimises && state_.load(std::memory_order_acquire) == State::Profiling) {
    look_at_plan();
  }
  if (optimises && state_.load(std::memory_order_acquire) == State::Ready) {
    run_with_traceback(*steps_, stack);
  } else {
    executor_->run(stack);
  }
}

PartialBackwards::PartialBackwards(const torch::jit::Node& node)
    : ways_(node.gs(c10::Symbol::attr("ways"))) {
  const auto& flat = node.is(c10::Symbol::attr("readers"));
  auto next = flat.begin();
  const auto take = [&next] {
    const auto first = next + 1;
    next = first + *next;
    return std::vector<size_t>(first, next);
  };
  while (next != flat.end()) {
    Reader reader;
    for (auto* places : {&reader.gradients, &reader.results, &reader.elements, &reader.others}) {
      *places = take();
    }
    readers_.push_back(std::move(reader));
  }
}

Flags PartialBackwards::running(const Flags& present, const Flags& asked) const {
  Flags running;
  for (const Reader& reader : readers_) {
    running.push_back(any_of(reader.gradients, present) && any_of(reader.results, asked));
  }
  return running;
}

std::shared_ptr<const PartialBackward> PartialBackwards::find(bool again, const Flags& present,
                                                              const Flags& asked) const {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Known& known : known_) {
      if (known.again == again && known.present == present && known.asked == asked) {
        return known.part;
      }
    }
  }
  auto made = make(again, present, asked);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (known_.size() >= kMostKept) {
    known_.erase(known_.begin());
  }
  known_.push_back({again, present, asked, made});
  return made;
}

std::shared_ptr<const PartialBackward> PartialBackwards::make(bool again, const Flags& present,
                                                              const Flags& asked) const {
  std::shared_ptr<const PartialBackward> made;
  torch::jit::Graph& way = *ways_.at(again);
  attempt(kName, way, [&] {
    const GraphPtr graph = way.copy();
    std::tuple<GraphPtr, std::vector<size_t>, std::vector<size_t>> found;
    with_callback(partial_callback(), "the part of a backward is no graph", [&](const py::object& part) {
      found = part(graph, as_list(present), as_list(asked)).cast<decltype(found)>();
    });
    auto& [part, places, zeros] = found;
    make_part(*part);
    end_of_pass(kName);
    made = std::make_shared<PartialBackward>(std::move(part), std::move(places), std::move(zeros), again);
  });
  return made ? made : whole(way, again, present);
}

void run_with_traceback(const StepList& steps, Stack& stack) {
  try {
    steps.run(stack);
  } catch (const c10::Error& error) {
    const auto place = StepList::take_failed_place();
    const bool keeps_type = dynamic_cast<const c10::NotImplementedError*>(&error) != nullptr;
    if (!place || keeps_type) {
      throw;
    }
    throw std::runtime_error(
        "The following operation failed in the TorchScript interpreter.\n"
        "Traceback of TorchScript (most recent call last):\n" +
        place->str() + "RuntimeError: " + error.what_without_backtrace());
  } catch (...) {
    StepList::take_failed_place();
    throw;
  }
}

Callback& partial_callback() {
  static Callback* c = new Callback;
  return *c;
}

}  // namespace tsfuser
