"""The typed `torch._C.Graph` that all passes work on: questions about nodes, their effects and types, and
rewrites."""
