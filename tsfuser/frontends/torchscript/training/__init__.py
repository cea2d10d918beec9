"""What is done to the forward and the backward of a differentiable graph together."""
