"""TorchScript graph in, TorchScript graph with guarded fusion groups out. Python over torch's graph
bindings."""
