// Loads Python into a C++ program, on a thread of its own, and calls frontends/libtorch/embedded.py there.
//
// In: the path of an interpreter. Out: a Python that waits, without its lock, until something is to be
// planned. Nothing here is linked to Python or to tsfuser: a program starts where both are missing, and
// start() says so.
#include "tsfuser.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <future>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

extern char** environ;

namespace tsfuser {
namespace {

using Strings = std::vector<std::string>;

// Calls a function of embedded.py with strings, in this process or in another.
constexpr const char* call_embedded = R"(
import importlib.util, os, runpy, sys
try:
    spec = importlib.util.find_spec("tsfuser")
    if spec is None or not spec.origin:
        raise RuntimeError(sys.executable + " has no tsfuser: run `pip install --no-build-isolation .` of that "
                           "Python in tsfuser's folder")
    path = os.path.join(os.path.dirname(spec.origin), "frontends", "libtorch", "embedded.py")
    answer, failure = runpy.run_path(path)[function](*arguments), ""
except BaseException as error:
    answer, failure = "", str(error) or type(error).__name__
)";
constexpr const char* from_command_line = R"(
import sys
sys.path[:1] = []  # the working directory, where no embedded Python looks
function, *arguments = sys.argv[1:]
)";
constexpr const char* to_standard_output = R"(
print("failed\n" + failure if failure else "done\n" + answer)
)";

// Python's C functions, found when the program runs. Objects are opaque.
struct Python {
  using Object = void;
  int (*IsInitialized)();
  Object* (*SaveThread)();
  void (*RestoreThread)(Object*);
  int (*Ensure)();
  void (*Release)(int);
  int (*HoldsLock)();
  Object* (*NewDict)();
  int (*SetItem)(Object*, const char*, Object*);
  Object* (*GetItem)(Object*, const char*);
  Object* (*NewList)(ssize_t);
  int (*Append)(Object*, Object*);
  Object* (*NewString)(const char*);
  const char* (*Text)(Object*);
  Object* (*Run)(const char*, int, Object*, Object*);
  void (*PrintError)();
  void (*DecRef)(Object*);

  // Of the library `handle`. Throws Error.
  explicit Python(void* handle) {
    find(handle, "Py_IsInitialized", IsInitialized);
    find(handle, "PyEval_SaveThread", SaveThread);
    find(handle, "PyEval_RestoreThread", RestoreThread);
    find(handle, "PyGILState_Ensure", Ensure);
    find(handle, "PyGILState_Release", Release);
    find(handle, "PyGILState_Check", HoldsLock);
    find(handle, "PyDict_New", NewDict);
    find(handle, "PyDict_SetItemString", SetItem);
    find(handle, "PyDict_GetItemString", GetItem);
    find(handle, "PyList_New", NewList);
    find(handle, "PyList_Append", Append);
    find(handle, "PyUnicode_DecodeFSDefault", NewString);
    find(handle, "PyUnicode_AsUTF8", Text);
    find(handle, "PyRun_String", Run);
    find(handle, "PyErr_Print", PrintError);
    find(handle, "Py_DecRef", DecRef);
  }

  // The answer of a function of embedded.py. With Python's lock held. Throws Error.
  std::string call(const char* function, const Strings& arguments) const {
    Object* names = NewDict();
    Object* list = NewList(0);
    for (const std::string& argument : arguments) {
      give(NewString(argument.c_str()), [&](Object* text) { Append(list, text); });
    }
    give(list, [&](Object* value) { SetItem(names, "arguments", value); });
    give(NewString(function), [&](Object* value) { SetItem(names, "function", value); });
    constexpr int file_input = 257;  // Py_file_input
    Object* done = Run(call_embedded, file_input, names, names);
    std::string answer, failure = "Python failed";
    if (done) {
      answer = text_of(names, "answer");
      failure = text_of(names, "failure");
      DecRef(done);
    } else {
      PrintError();
    }
    DecRef(names);
    if (!failure.empty()) {
      throw Error("tsfuser: " + failure);
    }
    return answer;
  }

 protected:
  template <typename Function>
  static void find(void* handle, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    if (!function) {
      throw Error(std::string("tsfuser: this Python is of a version that is not known: it has no ") + name);
    }
  }

 private:
  template <typename Use>
  void give(Object* object, Use use) const {
    use(object);
    DecRef(object);
  }

  std::string text_of(Object* names, const char* name) const {
    Object* value = GetItem(names, name);
    const char* text = value ? Text(value) : nullptr;
    return text ? text : "";
  }
};

// And those that start and end it.
struct OwnPython : Python {
  wchar_t* (*DecodeLocale)(const char*, size_t*);
  void (*SetProgramName)(const wchar_t*);
  void (*InitializeEx)(int);
  int (*RunSimple)(const char*, void*);
  int (*FinalizeEx)();
  void (*Free)(void*);

  explicit OwnPython(void* handle) : Python(handle) {
    find(handle, "Py_DecodeLocale", DecodeLocale);
    find(handle, "Py_SetProgramName", SetProgramName);
    find(handle, "Py_InitializeEx", InitializeEx);
    find(handle, "PyRun_SimpleStringFlags", RunSimple);
    find(handle, "Py_FinalizeEx", FinalizeEx);
    find(handle, "PyMem_RawFree", Free);
  }
};

// Python's lock, for this scope.
class Lock {
 public:
  explicit Lock(const Python& python) : python_(python), state_(python.Ensure()) {}
  ~Lock() { python_.Release(state_); }
  Lock(const Lock&) = delete;

 private:
  const Python& python_;
  const int state_;
};

// The file that the program has loaded libtorch_cpu.so from; "" where it has loaded none.
std::string loaded_libtorch() {
  std::string path;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* found) {
        const std::string name = info->dlpi_name;
        const std::string wanted = "/libtorch_cpu.so";
        const bool same = name.size() > wanted.size() &&
                          name.compare(name.size() - wanted.size(), wanted.size(), wanted) == 0;
        if (same) {
          *static_cast<std::string*>(found) = name;
        }
        return static_cast<int>(same);
      },
      &path);
  return path;
}

std::string read_all(int file) {
  std::string text;
  char buffer[4096];
  ssize_t count = 0;
  while ((count = read(file, buffer, sizeof buffer)) > 0 || (count < 0 && errno == EINTR)) {
    text.append(buffer, count > 0 ? static_cast<size_t>(count) : 0);
  }
  return text;
}

// What a program writes on its standard output; no shell is needed. Throws Error where it does not run.
std::string output_of(const Strings& command) {
  std::vector<char*> words;
  for (const std::string& word : command) {
    words.push_back(const_cast<char*>(word.c_str()));
  }
  words.push_back(nullptr);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    throw Error(std::string("tsfuser: no pipe can be made: ") + std::strerror(errno));
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  pid_t child = 0;
  const int failed = posix_spawnp(&child, words[0], &actions, nullptr, words.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  const std::string text = failed ? "" : read_all(ends[0]);
  close(ends[0]);
  if (failed) {
    throw Error("tsfuser finds no Python: \"" + command[0] + "\" does not run (" + std::strerror(failed) +
                "); Options::python names the interpreter of the environment that has torch and tsfuser");
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return text;
}

// Two lines of embedded.probe: the interpreter, and its library. Throws Error.
std::pair<std::string, std::string> probe(const std::string& python, const char* compiled_with) {
  const std::string code = std::string(from_command_line) + call_embedded + to_standard_output;
  const std::string text = output_of({python, "-c", code, "probe", compiled_with, loaded_libtorch()});
  const size_t first = text.find('\n'), second = text.find('\n', first + 1);
  const std::string kind = text.substr(0, first);
  if (first == std::string::npos || second == std::string::npos || (kind != "done" && kind != "failed")) {
    throw Error("tsfuser finds no Python: \"" + python + "\" is no Python that runs");
  }
  const std::string rest = text.substr(first + 1, text.size() - first - 2);
  if (kind == "failed") {
    throw Error("tsfuser: " + rest);
  }
  const size_t middle = rest.find('\n');
  return {rest.substr(0, middle), rest.substr(middle + 1)};
}

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
