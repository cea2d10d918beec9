"""Host time of a training step on tensors too small to matter, and the floor of it: autograd alone.

In: peers. Out: a `Result` for each block, in us a step; `of autograd` is the time over that of an autograd
node in C++ that saves its operands, allocates its result and the gradients, and computes nothing. Example:

    for result in steps(peers, Settings.here(quick=False), quick=False):
        print(result.table())
"""

import contextlib

import torch
from torch.utils import cpp_extension

from .blocks import BLOCKS
from .report import Result
from .timing import DEVICE, seconds
from .training import WARM_UP, attempt, step_of

SHAPE = (2, 3, 8)
COMPARED = ("eager", "script", "nnc", "tsfuser")
_SOURCE = """
struct Floor : torch::autograd::Node {
  std::vector<torch::autograd::SavedVariable> saved;
  std::vector<at::TensorOptions> options;
  std::vector<std::vector<int64_t>> sizes;

  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    torch::autograd::variable_list gradients(options.size());
    for (size_t i = 0; i < options.size(); ++i) {
      if (task_should_compute_output(i)) {
        gradients[i] = at::empty(sizes[i], options[i]);
      }
    }
    return gradients;
  }

  static auto make() {  // torch has changed what holds a node
    using Counted = std::enable_shared_from_this<torch::autograd::Node>;
    if constexpr (std::is_base_of_v<Counted, torch::autograd::Node>) {
      return std::make_shared<Floor>();
    } else {
      return c10::make_intrusive<Floor>();
    }
  }
};

at::Tensor step(const std::vector<at::Tensor>& tensors) {
  const auto pointer = Floor::make();
  Floor& node = *pointer;
  node.set_next_edges(torch::autograd::collect_next_edges(tensors));
  for (const at::Tensor& tensor : tensors) {
    node.saved.emplace_back(tensor, /*is_output=*/false);
    node.options.push_back(tensor.options().requires_grad(false));
    node.sizes.push_back(tensor.sizes().vec());
  }
  at::Tensor result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    result = at::empty(node.sizes[0], node.options[0]);
  }
  torch::autograd::create_gradient_edge(result, node.getptr());
  return result;
}
"""


def built():
    """The floor's forward: the result for a list of tensors, the first of which has its sizes. Builds it, in
    half a minute, if torch has not done so before."""
    return cpp_extension.load_inline("tsfuser_floor", _SOURCE, functions=["step"], extra_cflags=["-O2"]).step


def fastest(ready, count, rounds):
    """Name -> the least host time of a step, in us. All measure in turns. `ready`: name -> context, step."""
    found = dict.fromkeys(ready, float("inf"))
    for _ in range(rounds):
        for name, (context, step) in ready.items():
            with context():
                took, _ = seconds(lambda: [step() for _ in range(count)] and None)
            found[name] = min(found[name], 1e6 * took / count)
    return found


def steps(peers, settings, quick):
    """A result for each block; of a quick run without the floor, which takes a compiler long."""
    floor, missing = None, ""
    try:
        floor = None if quick else built()
    except Exception as error:  # no compiler, no ninja
        missing = f"not measured: {type(error).__name__}: {error}".splitlines()[0]
    for name, block in BLOCKS.items():
        torch.manual_seed(0)
        tensors = block.tensors(SHAPE, DEVICE)
        gradient = torch.randn(SHAPE, device=DEVICE).to(block.dtype)
        title = f"host time of a training step of the {name} block, {list(SHAPE)} on {DEVICE}"
        result = Result(f"{name}_step", title, "us", lower=True)
        ready = {}
        if floor:
            ready["autograd"] = contextlib.nullcontext, step_of(lambda *xs: floor(xs), tensors, gradient)

        def prepare(key):
            peer = peers[key]
            with peer.context():
                step = step_of(peer.prepare(block.function, block.numbers), tensors, gradient)
                for _ in range(WARM_UP):
                    step()
            ready[key] = peer.context, step
            return {}

        for key in COMPARED:
            if key in peers:
                attempt(result.cells.setdefault(key, {}), settings, lambda: prepare(key))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # which wait for each other longer than they compute
        found = fastest(ready, *((5, 1) if quick else (100, 15)))
        torch.set_num_threads(threads)
        alone = found.pop("autograd", None)
        for key, us in found.items():
            result.cells[key] = {"us": us, **({"of autograd": us / alone} if alone else {})}
        if alone or missing:
            result.facts["autograd alone"] = f"{alone:.1f} us" if alone else missing
        yield result
