#include "group/failures.h"

#include "group/group.h"
#include "group/interrupts.h"

#include <c10/util/Exception.h>
#include <torch/csrc/jit/ir/ir.h>

#include <cxxabi.h>

#include <atomic>
#include <mutex>
#include <new>
#include <stdexcept>
#include <utility>

namespace tsfuser {
namespace {

struct Asked {
  std::atomic<bool> any{false};
  std::mutex mutex;  // of `name`
  std::string name;
};

Asked& asked() {
  static Asked* a = new Asked;
  return *a;
}

// The place in the program of the first node that has one, as "file:line"; outside of inlined calls.
std::string place_in(const torch::jit::Block& block) {
  for (const torch::jit::Node* node : block.nodes()) {
    const auto& calls = node->callstack();
    const auto own = calls ? std::get<1>((*calls)->vec().front()) : node->sourceRange();
    const auto range = own.findSourceRangeThatGenerated().value_or(own);
    if (const auto place = range.file_line_col()) {
      return std::get<0>(*place) + ":" + std::to_string(std::get<1>(*place));
    }
    for (const torch::jit::Block* inner : node->blocks()) {
      if (const std::string found = place_in(*inner); !found.empty()) {
        return found;
      }
    }
  }
  return "";
}

// The text of the exception that is being handled; raises it again where memory is out, or where the thread
// ends: `pthread_exit` unwinds it so, as Python does where it takes the GIL once the interpreter is gone.
std::string text_of_exception() {
  try {
    throw;
#ifdef __GLIBCXX__
  } catch (const abi::__forced_unwind&) {
    throw;
#endif
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception without a text";
  }
}

void report_failure(const char* name, const std::string& text, const std::string& place) {
  const PythonCall python;
  const py::object reporter = python ? failure_callback().get() : py::object();
  if (!reporter) {
    return;
  }
  HeldInterrupts held;
  try {
    reporter(name, text, place);
  } catch (py::error_already_set& error) {
    dispose(error, held, "tsfuser failed pass");
  }
}

}  // namespace

Callback& failure_callback() {
  static Callback* c = new Callback;
  return *c;
}

void pass_failed(const char* name, const torch::jit::Graph& graph) {
  const std::string text = text_of_exception();
  if (!fallback_enabled.load(std::memory_order_relaxed)) {
    throw;
  }
  report_failure(name, text, place_in(*graph.block()));
}

void end_of_pass(const char* name) {
  if (C10_LIKELY(!asked().any.load(std::memory_order_relaxed))) {
    return;
  }
  const std::lock_guard<std::mutex> lock(asked().mutex);
  TORCH_CHECK(asked().name != name, "a test has the pass ", name, " fail");
}

std::string fail_pass(std::string name) {
  const std::lock_guard<std::mutex> lock(asked().mutex);
  asked().any = !name.empty();
  return std::exchange(asked().name, std::move(name));
}

}  // namespace tsfuser
