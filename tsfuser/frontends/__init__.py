"""Who hands in programs, one folder a front end. Each translates into a typed `torch._C.Graph`."""
