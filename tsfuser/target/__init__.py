"""Compilers: kernel source in, a function that can be launched out. Each target compiles into the disk
cache and loads from it."""
