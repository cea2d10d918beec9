// Loads Python into a C++ program, on a thread of its own, and calls frontends/libtorch/embedded.py there.
//
// In: the path of an interpreter. Out: a Python that waits, without its lock, until something is to be
// planned. Nothing here is linked to Python or to tsfuser: a program starts where both are missing, and
// start() says so.
#include "tsfuser.h"
#include "tsfuser/probe.h"
#include "tsfuser/python.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <functional>
#include <future>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace tsfuser {
namespace {

// All of a process. Leaked: threads may still call start() and stats() while the process exits.
struct State {
  std::mutex mutex;
  std::atomic<const Python*> python{nullptr};
  bool on = false;
  bool ours = false;     // start() has started Python
  bool stopped = false;  // and stop() has ended it
  pid_t process = 0;     // that has the thread; the child of a fork has not
  std::thread thread;    // has started Python, and will end it
  std::promise<void> end;

  bool can_enter() const { return on && (!ours || process == getpid()); }
};

State& state() {
  static State* s = new State;
  return *s;
}

// The Python that is in the process and runs, if there is one.
const Python* running_python() {
  void* const found = dlsym(RTLD_DEFAULT, "Py_IsInitialized");
  const bool runs = found && reinterpret_cast<int (*)()>(found)();
  return runs ? new Python(RTLD_DEFAULT) : nullptr;
}

// Holds the state's mutex. Whoever waits for it has let go of Python's lock, so that its holder may wait for
// that.
class Turn {
 public:
  Turn() {
    State& s = state();
    if (!s.python) {
      s.python = running_python();
    }
    python_ = s.python;
    if (python_ && python_->IsInitialized() && python_->HoldsLock()) {
      thread_ = python_->SaveThread();
    }
    s.mutex.lock();
  }
  ~Turn() {
    state().mutex.unlock();
    if (thread_) {
      python_->RestoreThread(thread_);
    }
  }
  Turn(const Turn&) = delete;
  // Whether this thread had Python's lock.
  bool inside_python() const { return thread_ != nullptr; }

 private:
  const Python* python_ = nullptr;
  Python::Object* thread_ = nullptr;
};

// Gives SIGINT back: Python's module `signal` takes it when it is imported, if it has no handler.
class Interrupt {
 public:
  Interrupt() { sigaction(SIGINT, nullptr, &before_); }
  ~Interrupt() {
    struct sigaction now = {};
    sigaction(SIGINT, nullptr, &now);
    if (before_.sa_handler == SIG_DFL && (now.sa_handler == SIG_DFL || is_of_python(now))) {
      sigaction(SIGINT, &before_, nullptr);
    }
  }
  Interrupt(const Interrupt&) = delete;

 private:
  // A handler that the program sets meanwhile stays.
  static bool is_of_python(const struct sigaction& action) {
    const Python* const python = state().python;
    Dl_info handler = {}, library = {};
    return python && dladdr(reinterpret_cast<void*>(action.sa_handler), &handler) &&
           dladdr(reinterpret_cast<void*>(python->IsInitialized), &library) &&
           handler.dli_fbase == library.dli_fbase;
  }

  struct sigaction before_ = {};
};

// What Python's main thread does first: `threading` takes the thread that imports it for the main one, and
// `signal` takes SIGINT.
constexpr const char* first_imports = R"(
import signal, threading
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
)";

// Python's main thread: from Py_InitializeEx to Py_FinalizeEx. In between it waits without Python's lock.
void live(const OwnPython& python, const std::string& interpreter, std::promise<void> ready,
          std::future<void> end) {
  wchar_t* const name = python.DecodeLocale(interpreter.c_str(), nullptr);
  python.SetProgramName(name);  // tells the environment
  python.InitializeEx(0);       // 0: no handlers of signals
  python.RunSimple(first_imports, nullptr);
  Python::Object* const thread = python.SaveThread();
  ready.set_value();
  end.wait();
  python.RestoreThread(thread);
  python.FinalizeEx();
  python.Free(name);
}

// Signals are the program's: they go to the program's threads, not to one that is started in this scope.
class SignalsHeldBack {
 public:
  SignalsHeldBack() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsHeldBack() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsHeldBack(const SignalsHeldBack&) = delete;

 private:
  sigset_t before_;
};

// Imports tsfuser, and torch with it, and switches fusion on; returns the Error if that fails. A thread that
// has no Python thread state of its own leaves it to one that ends here: pybind11 before 3.0.2 keeps, for as
// long as the thread lives, the thread state in which it was imported, also after that state is deleted.
std::exception_ptr import_tsfuser(const Python& python, const Strings& arguments, bool inside_python) {
  std::exception_ptr failure;
  const auto import = [&] {
    const Lock lock(python);
    try {
      python.call("start", arguments);
    } catch (const Error&) {
      failure = std::current_exception();
    }
  };
  if (inside_python) {
    import();
  } else {
    std::thread thread;
    {
      const SignalsHeldBack held;
      thread = std::thread(import);
    }
    thread.join();
  }
  return failure;
}

// Loads and starts Python. Throws Error.
void start_python(State& s, const std::string& wanted, const char* compiled_with) {
  const auto [interpreter, library] = probe(wanted, compiled_with);
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL);  // extension modules look there
  if (!handle) {
    throw Error(std::string("tsfuser: Python's library does not load: ") + dlerror());
  }
  const OwnPython* const python = new OwnPython(handle);
  s.python = python;
  if (python->IsInitialized()) {
    return;  // a part of the program has started it, where RTLD_DEFAULT does not look
  }
  std::promise<void> ready;
  std::future<void> is_ready = ready.get_future();
  {
    const SignalsHeldBack held;
    s.thread = std::thread(live, std::cref(*python), interpreter, std::move(ready), s.end.get_future());
  }
  is_ready.wait();
  s.ours = true;
  s.process = getpid();
}

// At the exit of a process that has not called stop(): no thread enters Python any more, and its exit
// functions run. It is not torn down, as libraries that it uses may be gone already.
void leave() {
  const Turn turn;
  State& s = state();
  if (s.ours && !s.stopped && s.process == getpid() && !turn.inside_python()) {
    s.stopped = true;
    try {
      const Lock lock(*s.python);
      s.python.load()->call("leave", {});
    } catch (const Error&) {  // nobody is there to catch it
    }
  }
}

}  // namespace

std::string detail::python_of_the_build() {
#ifdef TSFUSER_PYTHON_PATH
  const unsigned char path[] = {TSFUSER_PYTHON_PATH};  // its characters as numbers, between commas
  return {std::begin(path), std::end(path)};
#else
  return "python3";
#endif
}

void detail::start(const Options& options, const char* compiled_with) {
  const Turn turn;
  State& s = state();
  if (s.on) {
    return;
  }
  if (s.stopped) {
    throw Error("tsfuser: a process starts Python once, and stop() has ended it");
  }
  const Interrupt stays_the_programs;
  if (!s.python) {
    start_python(s, options.python, compiled_with);
  }
  Strings arguments{compiled_with, loaded_libtorch()};
  for (const auto& [name, value] : options.variables) {
    arguments.push_back(name + "=" + value);
  }
  const std::exception_ptr failure = import_tsfuser(*s.python, arguments, turn.inside_python());
  std::atexit(leave);  // now, so that it runs before the destructors of what Python has loaded
  if (failure) {
    std::rethrow_exception(failure);
  }
  s.on = true;
}

std::map<std::string, int64_t> stats() {
  const Turn turn;
  State& s = state();
  std::map<std::string, int64_t> counts;
  if (!s.can_enter()) {
    return counts;
  }
  const Lock lock(*s.python);
  const std::string text = s.python.load()->call("stats", {});
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const size_t space = text.find(' ', begin);
    counts[text.substr(space + 1, end - space - 1)] = std::stoll(text.substr(begin, space - begin));
    begin = end + 1;
  }
  return counts;
}

void stop() {
  const Turn turn;
  State& s = state();
  if (s.can_enter()) {
    const Lock lock(*s.python);
    s.python.load()->call("stop", {});
  }
  s.on = false;
  // A thread inside of Python cannot wait for its end.
  if (s.ours && !s.stopped && s.process == getpid() && !turn.inside_python()) {
    s.end.set_value();
    s.thread.join();
    s.stopped = true;
  }
}

}  // namespace tsfuser
