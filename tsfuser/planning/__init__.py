"""From a Fusion to a Plan: what C++ repeats on every later call."""
