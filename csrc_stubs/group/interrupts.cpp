#include "group/interrupts.h"

#include <signal.h>

#include <atomic>
#include <mutex>
#include <new>
#include <string>

namespace tsfuser {
namespace {

// After so many of them Ctrl-C is passed on at once: whoever insists does not wait for the planner.
constexpr int patience = 3;

struct State {
  std::mutex mutex;  // of `holders`, `saved`
  int holders = 0;
  struct sigaction saved = {};       // the handler that ours stands in for
  std::atomic<int> main_depth{0};    // how often the main thread holds
  std::atomic<int> kept{0};          // signals kept from the main thread
  std::atomic<uint64_t> signals{0};  // all that came while somebody held
  unsigned long main_thread = 0;
};

// Leaked: a signal may come while the process exits.
State& state() {
  static State* s = new State;
  return *s;
}

thread_local HeldInterrupts* innermost = nullptr;

// Runs as a signal handler: touches atomics, and `saved`, which does not change while this handler is
// installed.
void note(int number, siginfo_t* info, void* context) {
  State& s = state();
  s.signals.fetch_add(1);
  if (s.main_depth.load() > 0 && s.kept.fetch_add(1) + 1 < patience) {
    return;
  }
  s.kept = 0;
  if (s.saved.sa_flags & SA_SIGINFO) {
    s.saved.sa_sigaction(number, info, context);
  } else {
    s.saved.sa_handler(number);
  }
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) && action.sa_sigaction == note;
}

void install() {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (s.holders++ > 0) {
    return;
  }
  struct sigaction now = {};
  if (sigaction(SIGINT, nullptr, &now) != 0 || is_ours(now)) {
    return;
  }
  s.saved = now;
  const bool has_handler =
      (now.sa_flags & SA_SIGINFO) || (now.sa_handler != SIG_DFL && now.sa_handler != SIG_IGN);
  if (has_handler) {
    now.sa_flags |= SA_SIGINFO;
    now.sa_sigaction = note;
    sigaction(SIGINT, &now, nullptr);
  }
}

void restore() {
  struct sigaction now = {};
  if (sigaction(SIGINT, nullptr, &now) == 0 && is_ours(now)) {
    sigaction(SIGINT, &state().saved, nullptr);
  }
}

void uninstall() {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  if (--s.holders == 0) {
    restore();
  }
}

// Runs between two bytecodes of the main thread.
int raise_kept(void* exception) {
  PyObject* value = static_cast<PyObject*>(exception);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value)), value);
  Py_DECREF(value);
  return -1;
}

}  // namespace

HeldInterrupts::HeldInterrupts()
    : outer_(innermost),
      main_(PyThread_get_thread_ident() == state().main_thread),
      before_(state().signals.load()) {
  if (main_) {
    state().main_depth.fetch_add(1);
  }
  install();
  tripped_ = PyOS_InterruptOccurred() != 0;  // in the main thread only
  innermost = this;
}

HeldInterrupts::~HeldInterrupts() {
  State& s = state();
  innermost = outer_;
  const bool last = main_ && s.main_depth.fetch_sub(1) == 1;
  uninstall();
  if (exception_ && main_) {
    PyObject* value = exception_.release().ptr();
    if (Py_AddPendingCall(raise_kept, value) != 0) {
      Py_DECREF(value);
      tripped_ = true;
    }
  } else if (exception_) {
    PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), py::type::of(exception_).ptr());
    exception_ = py::object();
  }
  if (tripped_ && outer_) {
    outer_->tripped_ = true;
  } else if (tripped_) {
    PyErr_SetInterrupt();
  }
  if (last && s.kept.exchange(0) > 0) {
    raise(SIGINT);  // not PyErr_SetInterrupt: the handler need not be Python's
  }
}

void HeldInterrupts::keep(py::error_already_set& error) {
  exception_ = error.value();
  if (std::string(py::str(error.type().attr("__name__"))) == "Interrupted") {
    exception_ = exception_.attr("cause");
  }
  if (exception_.is_none()) {
    exception_ = py::object();
    return;
  }
  PyException_SetTraceback(exception_.ptr(), Py_None);  // frames, and what they hold, go now
  PyException_SetContext(exception_.ptr(), nullptr);
}

bool interrupted() {
  return innermost && (innermost->tripped_ || state().signals.load() != innermost->before_);
}

void remember_main_thread(unsigned long thread) { state().main_thread = thread; }

void interrupts_after_fork() {
  State& s = state();
  new (&s.mutex) std::mutex;
  s.main_thread = PyThread_get_thread_ident();
  if (!innermost) {
    s.holders = 0;
    s.main_depth = 0;
    s.kept = 0;
    restore();
  }
}

}  // namespace tsfuser
