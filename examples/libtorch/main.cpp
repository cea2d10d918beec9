// A server in small: threads that call one scripted module with inputs of changing shape, without tsfuser
// and then with it.
//
//     server MODEL [DEVICE]        server model.pt cuda
#include <ATen/Parallel.h>
#include <torch/script.h>
#include <tsfuser.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int threads = 8;
constexpr int requests = 60;  // of each thread

torch::jit::Module load(const std::string& path, const torch::Device& device) {
  torch::jit::Module module = torch::jit::load(path, device);
  module.eval();
  return torch::jit::freeze(module);
}

// The requests of a thread: another batch, and another number of words, in each.
std::vector<torch::Tensor> inputs(int thread, const torch::Device& device) {
  std::vector<torch::Tensor> made;
  for (int i = 0; i < requests; ++i) {
    const int64_t batch = 1 + (thread + i) % 7, words = 3 + (13 * i + 5 * thread) % 120;
    made.push_back(torch::sin(torch::arange(batch * words * 64, device).view({batch, words, 64}) * 0.37));
  }
  return made;
}

void synchronize(const torch::Device& device) {
  if (device.is_cuda()) {
    torch::zeros({1}, device).item();
  }
}

// Calls the module from all threads, and prints the requests per second.
std::vector<torch::Tensor> serve(const char* name, torch::jit::Module& module, const torch::Device& device) {
  const c10::InferenceMode no_gradients;
  for (const torch::Tensor& input : inputs(0, device)) {  // torch profiles, tsfuser plans
    module.forward({input});
  }
  std::vector<std::vector<torch::Tensor>> given, results(threads);
  for (int t = 0; t < threads; ++t) {
    given.push_back(inputs(t, device));
  }
  synchronize(device);
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([&, t] {
      const c10::InferenceMode no_gradients_here;  // a mode of a thread
      for (const torch::Tensor& input : given[t]) {
        results[t].push_back(module.forward({input}).toTensor());
      }
    });
  }
  for (std::thread& worker : workers) {
    worker.join();
  }
  synchronize(device);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  std::printf("%s: %.0f requests a second\n", name, threads * requests / took.count());
  std::vector<torch::Tensor> all;
  for (const auto& part : results) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

int run(const std::string& path, const torch::Device& device) {
  at::set_num_threads(1);  // the requests run side by side
  torch::jit::Module plain = load(path, device);
  const std::vector<torch::Tensor> expected = serve("unfused", plain, device);

  tsfuser::start();
  torch::jit::Module module = load(path, device);  // what was called before stays unfused
  const std::vector<torch::Tensor> results = serve("fused", module, device);

  double difference = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    difference = std::max(difference, (results[i] - expected[i]).abs().max().item<double>());
  }
  std::printf("largest difference: %.1e\n", difference);
  for (const auto& [name, count] : tsfuser::stats()) {
    std::printf("%s: %lld\n", name.c_str(), static_cast<long long>(count));
  }
  tsfuser::stop();
  return difference < 1e-4 ? 0 : 1;
}

}  // namespace

int main(int count, char** words) {
  if (count < 2) {
    std::fprintf(stderr, "usage: %s MODEL [DEVICE]\n", words[0]);
    return 2;
  }
  try {
    return run(words[1], torch::Device(count > 2 ? words[2] : "cpu"));
  } catch (const c10::Error& error) {  // no such file, no such device
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {  // tsfuser::Error is one
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
