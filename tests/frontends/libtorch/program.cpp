// What tests/frontends/test_libtorch.py looks at, from inside of C++ programs. Each line on stdout is a
// fact; a check that does not hold ends the program with 1.
//
//     program life MODEL CACHE DEVICE    start, threads, stop
//     program errors MODEL PYTHON...     the texts of errors, then a start, and no stop
//     program own MODEL LIBPYTHON        in a Python that the program has started
//     program serve MODEL [DEVICE]       the example, which main.cpp has included
#include <tsfuser.h>

#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>

#include <dlfcn.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace {

constexpr int threads = 8;

void check(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "does not hold: %s\n", what);
    std::exit(1);
  }
}

template <typename Function>
Function* python(const char* name) {
  void* const found = dlsym(RTLD_DEFAULT, name);
  check(found, name);
  return reinterpret_cast<Function*>(found);
}

// Another shape in each call: `words` by 32.
at::Tensor input(int words, at::Device device) {
  return at::arange(words * 32, at::TensorOptions(device).dtype(at::kFloat))
      .view({words, 32})
      .mul(0.01)
      .sin();
}

at::Tensor call(torch::jit::Module& module, const at::Tensor& x) {
  const c10::InferenceMode no_gradients;
  return module.forward({x}).toTensor();
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && at::allclose(a, b, 1e-5, 1e-5);
}

// Two modules, one of them frozen.
std::vector<torch::jit::Module> load(const char* path, at::Device device) {
  std::vector<torch::jit::Module> modules{torch::jit::load(path, device), torch::jit::load(path, device)};
  modules[0].eval();
  modules[1].eval();
  modules[1] = torch::jit::freeze(modules[1]);
  return modules;
}

// Calls all modules from threads, and compares with what they gave before fusion was on.
void serve(std::vector<torch::jit::Module>& modules, std::vector<torch::jit::Module>& unfused, int calls,
           at::Device device) {
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      for (int i = 0; i < calls; ++i) {
        const at::Tensor x = input(2 + t + threads * i, device);
        for (size_t m = 0; m < modules.size(); ++m) {
          check(same(call(modules[m], x), call(unfused[m], x)), "the result is the same as unfused");
        }
      }
    });
  }
  for (std::thread& worker : workers) {
    worker.join();
  }
}

void warm_up(std::vector<torch::jit::Module>& modules, at::Device device) {
  for (torch::jit::Module& module : modules) {
    for (int words : {7, 7, 7, 8, 9, 10, 11, 12}) {  // whose sizes divide by 4, and others
      call(module, input(words, device));
    }
  }
}

volatile sig_atomic_t interrupts = 0;

void note(int) { interrupts = interrupts + 1; }

constexpr int watched[] = {SIGINT, SIGTERM, SIGPIPE, SIGCHLD, SIGSEGV, SIGUSR1};

std::vector<struct sigaction> handlers() {
  std::vector<struct sigaction> all;
  for (int number : watched) {
    struct sigaction now = {};
    sigaction(number, nullptr, &now);
    all.push_back(now);
  }
  return all;
}

bool same(const std::vector<struct sigaction>& a, const std::vector<struct sigaction>& b) {
  constexpr int asked = SA_SIGINFO | SA_RESTART | SA_ONSTACK | SA_NODEFER;  // the system adds others
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].sa_handler != b[i].sa_handler || (a[i].sa_flags & asked) != (b[i].sa_flags & asked)) {
      std::fprintf(stderr, "signal %d has another handler\n", watched[i]);
      return false;
    }
  }
  return true;
}

void life(const char* path, const char* cache, at::Device device) {
  struct sigaction own = {};
  own.sa_handler = note;
  sigaction(SIGINT, &own, nullptr);
  std::vector<torch::jit::Module> unfused = load(path, device);
  warm_up(unfused, device);  // which starts CUDA, whose handlers are its own
  const auto before = handlers();
  check(tsfuser::stats().empty(), "nothing is counted before the start");

  tsfuser::Options options;
  options.variables["TSFUSER_CACHE_DIR"] = cache;
  tsfuser::start(options);
  tsfuser::start(options);  // does nothing
  std::vector<torch::jit::Module> modules = load(path, device);
  warm_up(modules, device);
  auto counts = tsfuser::stats();
  check(counts["python_calls"] > 0 && counts["plans_built"] > 0, "plans were made");
  check(counts["fallbacks"] == 0, "nothing ran unfused");
  check(same(before, handlers()), "signals are as they were");
  raise(SIGINT);
  check(interrupts == 1, "the program's handler was called");

  const int lock = python<int()>("PyGILState_Ensure")();
  serve(modules, unfused, 20, device);  // would wait for ever, if a call entered Python
  python<void(int)>("PyGILState_Release")(lock);
  auto after = tsfuser::stats();
  check(after["python_calls"] == counts["python_calls"], "no call entered Python");
  check(after["class_hits"] > counts["class_hits"], "new shapes ran fused");
  check(after["launches"] >= counts["launches"] + 20 * threads * 2, "kernels ran");
  check(after["fallbacks"] == 0, "nothing ran unfused, then");
  for (const auto& [name, count] : after) {
    std::printf("%s: %lld\n", name.c_str(), static_cast<long long>(count));
  }

  tsfuser::stop();
  tsfuser::stop();  // does nothing
  check(!python<int()>("Py_IsInitialized")(), "Python has ended");
  check(tsfuser::stats().empty(), "nothing is counted after the stop");
  serve(modules, unfused, 2, device);  // fused as before
  for (int i = 0; i < 4; ++i) {        // a new class: unfused
    const at::Tensor x = input(6, device).view({2, 3, 32});
    check(same(call(modules[0], x), call(unfused[0], x)), "a call without a plan gives the same");
  }
  try {
    tsfuser::start();
  } catch (const tsfuser::Error& error) {
    std::printf("%s\n", error.what());
  }
  check(same(before, handlers()), "signals are as they were, at the end");
}

void failing_start(const std::function<void(tsfuser::Options&)>& change,
                   const char* version = TORCH_VERSION) {
  tsfuser::Options options;
  change(options);
  try {
    tsfuser::detail::start(options, version);
    check(false, "start() fails");
  } catch (const tsfuser::Error& error) {
    std::printf("%s\n", error.what());
  }
}

void errors(const char* path, int count, char** pythons) {
  const auto before = handlers();  // Ctrl-C ends the program
  for (int i = 0; i < count; ++i) {
    failing_start([&](tsfuser::Options& options) { options.python = pythons[i]; });
  }
  failing_start([](tsfuser::Options&) {}, "2.9.0");
  check(!dlsym(RTLD_DEFAULT, "Py_IsInitialized"), "no Python is loaded by a start that fails");
  failing_start([](tsfuser::Options& options) { options.variables["TSFUSER_CACHE_DIRECTORY"] = "/tmp"; });
  tsfuser::start();
  std::vector<torch::jit::Module> modules = load(path, at::kCPU), unfused = load(path, at::kCPU);
  warm_up(modules, at::kCPU);
  check(tsfuser::stats()["launches"] > 0, "fused after an error");
  check(same(before, handlers()), "Ctrl-C still ends the program");
}

void own(const char* path, const char* library) {
  check(dlopen(library, RTLD_NOW | RTLD_GLOBAL), "the library loads");
  const std::string path_of_python = tsfuser::Options().python;
  const std::wstring interpreter(path_of_python.begin(), path_of_python.end());
  python<void(const wchar_t*)>("Py_SetProgramName")(interpreter.c_str());
  python<void(int)>("Py_InitializeEx")(0);
  tsfuser::start();  // with Python's lock held
  check(!tsfuser::stats().empty(), "counters can be read with Python's lock");
  void* const state = python<void*()>("PyEval_SaveThread")();
  std::vector<torch::jit::Module> unfused = load(path, at::kCPU), modules = load(path, at::kCPU);
  serve(modules, modules, 3, at::kCPU);  // plans in several threads at once
  auto counts = tsfuser::stats();
  check(counts["launches"] > 0 && counts["fallbacks"] == 0, "fused in the program's own Python");
  tsfuser::stop();
  python<void(void*)>("PyEval_RestoreThread")(state);
  check(python<int()>("Py_IsInitialized")(), "the program's Python runs on");
  tsfuser::start();  // again, since stop() has not ended it
  check(python<int()>("Py_FinalizeEx")() == 0, "the program ends its Python");
}

}  // namespace

int main(int count, char** words) {
  const std::string mode = words[1];
  if (mode == "life") {
    life(words[2], words[3], at::Device(words[4]));
  } else if (mode == "errors") {
    errors(words[2], count - 3, words + 3);
  } else if (mode == "own") {
    own(words[2], words[3]);
  } else {
    return server::main(count - 1, words + 1);
  }
  std::printf("end of main\n");
  return 0;
}
