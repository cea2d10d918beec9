// Launches on CUDA, by a driver that is opened when the first kernel runs: by cuLaunchKernel; by
// cuLaunchCooperativeKernel if all blocks wait for each other; by cuLaunchKernelEx if the blocks of a
// cluster do.

#include "call/cuda_driver.h"
#include "call/plan.h"

#include <dlfcn.h>

#include <limits>

namespace tsfuser {
namespace {

template <class F>
void resolve(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (!function) {
    throw LaunchError(std::string("libcuda.so.1 has no ") + name);
  }
}

const cuda::Driver& driver() {
  static const cuda::Driver opened = [] {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      throw LaunchError(std::string("the CUDA driver does not open: ") + dlerror());
    }
    cuda::Driver d{};
    resolve(library, "cuLaunchKernel", d.launch_kernel);
    cuda::Result (*version)(int*) = nullptr;
    resolve(library, "cuDriverGetVersion", version);
    int known = 0;
    version(&known);
    d.launch_with = nullptr;
    if (known >= cuda::launch_with_version) {
      resolve(library, "cuLaunchKernelEx", d.launch_with);
    }
    d.overlaps_in_graphs = known >= cuda::overlap_in_graphs_version;
    resolve(library, "cuLaunchCooperativeKernel", d.launch_cooperative);
    resolve(library, "cuMemsetD8Async", d.fill_bytes);
    resolve(library, "cuFuncGetAttribute", d.function_get_attribute);
    resolve(library, "cuFuncSetAttribute", d.function_set_attribute);
    resolve(library, "cuDeviceGetAttribute", d.device_get_attribute);
    resolve(library, "cuDeviceGet", d.device_get);
    resolve(library, "cuCtxGetCurrent", d.context_get_current);
    resolve(library, "cuCtxSetCurrent", d.context_set_current);
    resolve(library, "cuDevicePrimaryCtxRetain", d.primary_context_retain);
    resolve(library, "cuThreadExchangeStreamCaptureMode", d.exchange_capture_mode);
    resolve(library, "cuStreamIsCapturing", d.stream_is_capturing);
    resolve(library, "cuGetErrorName", d.error_name);
    resolve(library, "cuGetErrorString", d.error_string);
    return d;
  }();
  return opened;
}

void check(cuda::Result result, const char* what, const char* kernel) {
  if (result == cuda::success) {
    return;
  }
  const char *name = nullptr, *text = nullptr;
  driver().error_name(result, &name);
  driver().error_string(result, &text);
  throw LaunchError(std::string(what) + " failed for kernel " + kernel + ": " +
                    (name ? name : std::to_string(result)) +
                    (text ? std::string(" (") + text + ")" : std::string()));
}

// A thread that has not called the CUDA runtime yet (a fresh one, or one of the autograd engine) has no
// current context; the launch needs the primary one, which is the one that torch and CuPy use. True if
// there was none.
bool adopt_primary_context(int ordinal, const char* kernel) {
  cuda::Context current = nullptr;
  check(driver().context_get_current(&current), "cuCtxGetCurrent", kernel);
  if (current) {
    return false;
  }
  constexpr int most_devices = 64;
  static std::atomic<cuda::Context> retained[most_devices];  // retained once a process, never released
  cuda::Context primary = ordinal < most_devices ? retained[ordinal].load() : nullptr;
  if (!primary) {
    cuda::Device device;
    check(driver().device_get(&device, ordinal), "cuDeviceGet", kernel);
    check(driver().primary_context_retain(&primary, device), "cuDevicePrimaryCtxRetain", kernel);
    if (ordinal < most_devices) {
      retained[ordinal].store(primary);
    }
  }
  check(driver().context_set_current(primary), "cuCtxSetCurrent", kernel);
  return true;
}

void see_context(int ordinal, const char* kernel) {
  static thread_local bool seen = false;
  if (C10_UNLIKELY(!seen)) {
    adopt_primary_context(ordinal, kernel);
    seen = true;
  }
}

// Calls the driver; once more where the thread has no context, or something has taken it away since it was
// seen.
template <class Call>
cuda::Result attempt(const Call& call, const char* kernel, int ordinal) {
  const cuda::Result result = call();
  return C10_UNLIKELY(result != cuda::success) && adopt_primary_context(ordinal, kernel) ? call() : result;
}

// A kernel gets more than 48 KB of dynamic shared memory only after this. Raised to all that the device
// has, so that plans that share a function cannot lower each other's limit.
void raise_shared_memory(const Launch& launch, int ordinal) {
  const auto function = static_cast<cuda::Function>(launch.function);
  const char* kernel = launch.name.c_str();
  cuda::Device device;
  int most = 0, fixed = 0;
  adopt_primary_context(ordinal, kernel);
  check(driver().device_get(&device, ordinal), "cuDeviceGet", kernel);
  check(driver().device_get_attribute(&most, cuda::device_max_shared_bytes_optin, device),
        "cuDeviceGetAttribute", kernel);
  check(driver().function_get_attribute(&fixed, cuda::function_static_shared_bytes, function),
        "cuFuncGetAttribute", kernel);
  check(driver().function_set_attribute(function, cuda::function_max_dynamic_shared_bytes, most - fixed),
        "cuFuncSetAttribute", kernel);
  launch.shared_memory_raised.store(true, std::memory_order_release);
}

// Blocks in clusters, or set up while the kernel before runs, or both.
cuda::Result launch_with_attributes(const PreparedLaunch& prepared, cuda::LaunchConfig config,
                                    void** parameters) {
  const cuda::Driver& d = driver();
  if (!d.launch_with) {
    throw LaunchError("clusters need a driver of CUDA 11.8 or later");
  }
  cuda::LaunchAttribute attributes[2] = {};
  config.attributes = attributes;
  if (prepared.cluster > 1) {
    cuda::LaunchAttribute& clusters = attributes[config.attribute_count++];
    clusters.id = cuda::attribute_cluster;
    clusters.value.cluster = {static_cast<unsigned>(prepared.cluster), 1, 1};
  }
  if (prepared.launch->overlaps && d.overlaps_in_graphs) {
    cuda::LaunchAttribute& overlap = attributes[config.attribute_count++];
    overlap.id = cuda::attribute_overlap;
    overlap.value.allowed = 1;
  }
  const auto function = static_cast<cuda::Function>(prepared.launch->function);
  return d.launch_with(&config, function, parameters, nullptr);
}

}  // namespace

void launch_cuda(const PreparedLaunch& prepared, char* args, void* stream, int device) {
  const Launch& launch = *prepared.launch;
  if (prepared.grid > std::numeric_limits<int32_t>::max()) {
    throw LaunchError("kernel " + launch.name + " needs " + std::to_string(prepared.grid) +
                      " blocks, CUDA has 2^31 - 1");
  }
  const char* kernel = launch.name.c_str();
  see_context(device, kernel);
  if (prepared.shared > cuda::shared_bytes_without_optin &&
      !launch.shared_memory_raised.load(std::memory_order_acquire)) {
    raise_shared_memory(launch, device);
  }
  void* parameters[] = {args};  // every kernel has one parameter, a struct
  const auto function = static_cast<cuda::Function>(launch.function);
  const auto grid = static_cast<unsigned>(prepared.grid), x = static_cast<unsigned>(prepared.block_x);
  const auto y = static_cast<unsigned>(prepared.block_y), shared = static_cast<unsigned>(prepared.shared);
  const auto on = static_cast<cuda::Stream>(stream);
  const auto start = [&] {
    const cuda::Driver& d = driver();
    if (launch.cleared >= 0) {
      return d.launch_cooperative(function, grid, 1, 1, x, y, 1, shared, on, parameters);
    }
    if (prepared.cluster > 1 || (launch.overlaps && d.overlaps_in_graphs)) {
      return launch_with_attributes(prepared, {grid, 1, 1, x, y, 1, shared, on, nullptr, 0}, parameters);
    }
    return d.launch_kernel(function, grid, 1, 1, x, y, 1, shared, on, parameters, nullptr);
  };
  check(attempt(start, kernel, device), launch.cleared < 0 ? "cuLaunchKernel" : "cuLaunchCooperativeKernel",
        kernel);
}

void clear_cuda(void* memory, size_t bytes, void* stream, int device) {
  constexpr auto kernel = "memset";
  see_context(device, kernel);
  const auto address = reinterpret_cast<unsigned long long>(memory);
  const auto fill = [&] {
    return driver().fill_bytes(address, 0, bytes, static_cast<cuda::Stream>(stream));
  };
  check(attempt(fill, kernel, device), "cuMemsetD8Async", kernel);
}

bool captures(void* stream, int device) {
  int status = 0;
  const auto ask = [&] { return driver().stream_is_capturing(static_cast<cuda::Stream>(stream), &status); };
  return attempt(ask, "capture", device) != cuda::success || status;
}

DuringCapture::DuringCapture(bool cuda) {
  if (cuda) {
    try {
      mode_ = cuda::capture_mode_relaxed;
      exchanged_ = driver().exchange_capture_mode(&mode_) == cuda::success;
    } catch (const LaunchError&) {
      // no driver: the first launch says so
    }
  }
}

DuringCapture::~DuringCapture() {
  if (exchanged_) {
    driver().exchange_capture_mode(&mode_);
  }
}

}  // namespace tsfuser
