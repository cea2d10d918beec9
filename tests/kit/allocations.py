"""What a call allocates."""

import torch
from torch.autograd.profiler import profile


def allocations(call, device):
    """(bytes that `call` allocates, the most of them that live at one time)"""
    if device == "cuda":
        allocated = "allocated_bytes.all.allocated"
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, made = torch.cuda.memory_allocated(), torch.cuda.memory_stats()[allocated]
        call()
        return torch.cuda.memory_stats()[allocated] - made, torch.cuda.max_memory_allocated() - before
    with profile(profile_memory=True) as found:
        call()
    live = peak = made = 0
    events = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live, made = live + event.nbytes(), made + max(event.nbytes(), 0)
        peak = max(peak, live)
    return made, peak
